"""Draft a chain and two trees with one EAGLE-3 head, and count drafted and accepted tokens.

python examples/tree_drafting.py [target [EAGLE-3 head]]
"""

import sys
from pathlib import Path

import jspec

DEMO = Path(jspec.__file__).parent / "assets" / "demo"
target, head = [*sys.argv[1:], DEMO / "target", DEMO / "eagle3"][:2]
PROMPTS = ["class Stack:\n    def __init__(self):\n", "def median(values):\n", "import json\n"]

# On a device that is bound by memory, a pass over 16 tokens costs about as much as one over 5.
TREES = {
    "chain of 4": {"num_speculative_tokens": 4},
    # Children are sampled without replacement: exact under the default rule at any temperature.
    "16 nodes, sampled": {"tree": "sampled", "tree_size": 16, "tree_depth": 4, "tree_top_k": 3},
    # EAGLE-2: the likeliest children, expanded by the head's confidence.
    "16 nodes, likeliest": {"tree": "eagle2", "tree_size": 16, "tree_depth": 4, "tree_top_k": 3},
}

model = jspec.load(target)
for name, tree in TREES.items():
    llm = jspec.LLM(model, {"method": "eagle3", "model": head, **tree})
    settings = jspec.SamplingParams(temperature=0.8, max_tokens=64, seed=0)
    outputs = llm.generate(PROMPTS, settings)
    stats = [output.speculative_decoding_stats for output in outputs]
    drafted = sum(stat["num_draft_tokens"] for stat in stats)
    accepted = sum(stat["num_accepted_draft_tokens"] for stat in stats)
    tokens = sum(len(output.outputs[0].token_ids) for output in outputs)
    print(
        f"{name:20} {drafted / (tokens - accepted):5.1f} tokens drafted a pass, "
        f"{tokens / (tokens - accepted):.2f} tokens emitted a pass"
    )

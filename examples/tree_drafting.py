"""One EAGLE-3 head drafting a chain and trees: how much is drafted, and how much is kept.

python examples/tree_drafting.py [target [EAGLE-3 head]]
"""

import sys
from pathlib import Path

import jspec

DEMO = Path(jspec.__file__).parent / "assets" / "demo"
target, head = [*sys.argv[1:], DEMO / "target", DEMO / "eagle3"][:2]
PROMPTS = ["class Stack:\n    def __init__(self):\n", "def median(values):\n", "import json\n"]

# Where the device waits for memory, a pass over 16 tokens costs about what one over 5 does.
SHAPES = {
    "chain of 4": {"num_speculative_tokens": 4},
    # Children drawn without replacement: exact at any temperature under the default rule.
    "16 nodes, drawn": {"tree": "sampled", "tree_size": 16, "tree_depth": 4, "tree_top_k": 3},
    # Follows the head's confidence (EAGLE-2); its children are the likeliest, not drawn.
    "16 nodes, likeliest": {"tree": "eagle2", "tree_size": 16, "tree_depth": 4, "tree_top_k": 3},
}

model = jspec.load(target)
for name, shape in SHAPES.items():
    llm = jspec.LLM(model, {"method": "eagle3", "model": head, **shape})
    settings = jspec.SamplingParams(temperature=0.8, max_tokens=64, seed=0)
    outputs = llm.generate(PROMPTS, settings)
    stats = [output.speculative_decoding_stats for output in outputs]
    drafted = sum(each["num_draft_tokens"] for each in stats)
    accepted = sum(each["num_accepted_draft_tokens"] for each in stats)
    tokens = sum(len(output.outputs[0].token_ids) for output in outputs)
    print(
        f"{name:20} {drafted / (tokens - accepted):5.1f} tokens drafted a pass, "
        f"{tokens / (tokens - accepted):.2f} tokens kept, the target's own included"
    )

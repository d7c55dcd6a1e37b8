"""Generate many prompts in one call, each with its own settings; first streamed, then at once.

python examples/batch_generation.py [target [draft model]]
"""

import sys
from pathlib import Path

import jspec

DEMO = Path(jspec.__file__).parent / "assets" / "demo"
target, draft = [*sys.argv[1:], DEMO / "target", DEMO / "draft"][:2]

REQUESTS = {
    "import os\n": jspec.SamplingParams(temperature=0, max_tokens=32),
    "def add(": jspec.SamplingParams(temperature=0.8, max_tokens=32, seed=7),
    "class Stack:\n    def": jspec.SamplingParams(top_p=0.9, max_tokens=48, seed=8),
    "# Read a file and": jspec.SamplingParams(temperature=0.7, max_tokens=48, stop="\n\n", seed=9),
}

llm = jspec.LLM(
    target,
    speculative_config={"method": "draft_model", "model": draft, "num_speculative_tokens": 4},
    max_num_seqs=32,  # rows of a batch; more prompts run in groups of similar length
)

# The batch is one program on the device; with stream, the host reads it every `rounds` rounds.
streamed = {}
for output in llm.stream(list(REQUESTS), list(REQUESTS.values()), rounds=4):
    streamed[output.prompt] = output.outputs[0].text
    print(f"request {output.request_id}: {len(output.outputs[0].token_ids)} tokens so far")

for output in llm.generate(list(REQUESTS), list(REQUESTS.values())):  # the same, at once
    answer = output.outputs[0]
    length = output.speculative_decoding_stats["mean_acceptance_length"]
    print(f"\n{length:.2f} tokens a pass, ended by {answer.finish_reason}:")
    print(output.prompt + answer.text)
    print("streamed the same:", streamed[output.prompt] == answer.text)

print()
for metric in llm.get_metrics():  # vLLM's names
    print(metric.name, getattr(metric, "values", None) or f"{metric.value:.6g}")

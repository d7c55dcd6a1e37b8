"""Answer a dataset of prompts with two copies of a model, by Ray Data.

    pip install 'ray[data]'
    python examples/ray_data.py [target]

Ray Data streams blocks of rows from files through the actors and back to files, over any number of
machines. Each actor has its own LLM.
"""

import sys
from pathlib import Path

import ray

import jspec

DEMO = Path(jspec.__file__).parent / "assets" / "demo" / "target"
TARGET = str(sys.argv[1] if len(sys.argv) > 1 else DEMO)
DRAFTS = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 3}


class Writer:
    """An actor that continues the prompts of a block."""

    def __init__(self):
        self.llm = jspec.LLM(TARGET, DRAFTS, max_num_seqs=8)

    def __call__(self, block):
        """Add a column with the texts, and one with their acceptance lengths."""
        params = jspec.SamplingParams(temperature=0, max_tokens=24)
        outputs = self.llm.generate(list(block["prompt"]), params)
        block["text"] = [output.outputs[0].text for output in outputs]
        stats = [output.speculative_decoding_stats for output in outputs]
        block["acceptance"] = [each["mean_acceptance_length"] for each in stats]
        return block


prompts = [{"prompt": f"def function_{index}(x):\n    return"} for index in range(32)]
answers = ray.data.from_items(prompts).map_batches(
    Writer,
    batch_size=8,
    compute=ray.data.ActorPoolStrategy(size=2),
    num_cpus=1,  # num_gpus=1 on a GPU
)
rows = answers.take_all()  # write_parquet(...) for many
print(f"{len(rows)} prompts answered")
print(rows[0]["prompt"] + rows[0]["text"])

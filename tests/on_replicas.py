"""Texts of one engine and of several, each on devices of its own; prints one JSON per case.

Its arguments are a folder for checkpoints, and the tensor_parallel_size of each case of two
engines. tests/test_replicas.py runs this where one CPU simulates eight devices.
"""

import asyncio
import json
import sys
from pathlib import Path

import jax

import jspec
from jspec.api.async_llm import AsyncLLM
from jspec.server.metrics import Observer
from tests import llm_fixtures

NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 1}
PROMPTS = ["the quick brown", "def add(x, y):", "grüße", "the the the the"]
COMMON = {"max_tokens": 20, "ignore_eos": True}
SETTINGS = [
    jspec.SamplingParams(temperature=0, **COMMON),
    jspec.SamplingParams(temperature=0.8, top_p=0.95, seed=3, n=2, **COMMON),
    jspec.SamplingParams(temperature=1, top_k=9, seed=5, **COMMON),
    jspec.SamplingParams(temperature=0, structured_outputs={"regex": "(the|dog| ){9}"}),
]


def texts(outputs) -> list[str]:
    return [text.text for output in outputs for text in output.outputs]


def values(llm) -> dict[str, int]:
    return {each.name: each.value for each in llm.get_metrics() if hasattr(each, "value")}


async def together(llm) -> list[str]:
    """Return the texts of requests that come at once to an ``AsyncLLM``."""

    async def last(prompt, params):
        output = None
        async for each in served.generate(prompt, params):
            output = each
        return output

    with AsyncLLM(llm) as served:
        calls = [last(*pair) for pair in zip(PROMPTS, SETTINGS, strict=True)]
        return texts(await asyncio.gather(*calls))


def devices_of(engine) -> list[int]:
    """Return the devices of an engine's weights, pages and state."""
    arrays = jax.tree.leaves((engine.params, engine.pool.buffers, engine.runner.worker._state))
    return sorted({device.id for array in arrays for device in array.devices()})


def case(target, tensor: int) -> dict:
    """Return what two engines of ``tensor`` devices each did."""
    llm = jspec.LLM(
        target,
        NGRAM,
        max_num_seqs=2,
        tensor_parallel_size=tensor,
        data_parallel_size=2,
    )
    seen = []
    llm.runtime.pin(seen.append)
    given = texts(llm.generate(PROMPTS, SETTINGS))
    llm.runtime.unpin(seen.append)
    counted = values(llm)
    devices = [devices_of(each) for each in llm.runtime._replicas.engines]
    try:
        llm.save_shared("state")
        refusal = ""
    except ValueError as error:
        refusal = str(error)
    llm.load_shared(None)
    traced = jspec.trace(llm, PROMPTS[0], SETTINGS[0])
    llm.update_params(llm.build.params.target)
    return {
        "tensor": tensor,
        "texts": given,
        "again": texts(llm.generate(PROMPTS, SETTINGS)),
        "together": asyncio.run(together(llm)),
        "counted": counted,
        "devices": devices,
        "traced": traced.text,
        "metrics": Observer(llm, "tiny").text().decode(),
        "pages": sum(pool.blocks.kinds[0].num_pages - 1 for pool in llm.runtime.pools),
        "launches": len(seen),
        "refusal": refusal,
    }


def main():
    root, *sizes = sys.argv[1:]
    target = llm_fixtures.loaded(Path(root))["target"]
    llm = jspec.LLM(target, NGRAM, max_num_seqs=2)
    expected = texts(llm.generate(PROMPTS, SETTINGS))
    print(json.dumps({"texts": expected, "counted": values(llm)}))
    for size in sizes:
        print(json.dumps(case(target, int(size))))


if __name__ == "__main__":
    main()

"""Many unlike calls: the programs and the memory of the process stay bounded."""

import gc
import random
import resource
import sys
from pathlib import Path

import pytest

import jspec
from jspec.engine import program_memory

TARGET = Path(jspec.__file__).with_name("assets") / "demo" / "target"
CALLS = 240


def resident():
    """Return the resident memory in MB."""
    gc.collect()
    if sys.platform == "linux":
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        return pages * resource.getpagesize() / 1e6
    pytest.skip("resident memory is read from /proc")


def programs():
    """Return the bytes that programs hold, in MB."""
    return program_memory.held().total() / 1e6


def asked(rng, index):
    """Return the prompts and the sampling parameters of a call."""
    prompts = [
        {"prompt_token_ids": [rng.randrange(4, 4000) for _ in range(rng.randint(1, 400))]}
        for _ in range(rng.randint(1, 3))
    ]
    options = {"max_tokens": rng.randint(1, 40), "temperature": rng.choice([0.0, 0.7])}
    if rng.random() < 0.3:
        options["stop"] = [rng.choice("abcdefgh(") * 2 for _ in range(rng.randint(1, 3))]
    if rng.random() < 0.3:
        options["stop_token_ids"] = rng.sample(range(4, 4000), rng.randint(1, 8))
    if rng.random() < 0.3:
        options["logprobs"] = rng.randint(0, 8)
    if index % 6 == 0:  # a function of its own for every call
        options["logits_processors"] = [lambda logits, *_: logits + 0.0 * index]
    return prompts, jspec.SamplingParams(**options)


@pytest.mark.slow
def test_programs_and_memory_stay_bounded_whatever_is_asked(monkeypatch):
    monkeypatch.setattr(program_memory, "MOST_BYTES", 500_000_000)
    llm = jspec.LLM(str(TARGET), speculative_config={"method": "suffix"})
    rng, seen = random.Random(0), []
    for index in range(CALLS):
        llm.generate(*asked(rng, index))
        if index % 40 == 39:
            seen.append((programs(), resident()))
    assert max(held for held, _ in seen) < 700
    assert seen[-1][1] - seen[CALLS // 80][1] < 300, seen

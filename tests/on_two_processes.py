"""One of two processes that share an ``LLM``; tests/test_several_processes.py starts both.

Arguments: the case, the model, the port of process 0, and the number of this process.
"""

import asyncio
import atexit
import json
import sys
import threading
import time
from typing import Any

import jax
import numpy as np

import jspec
from jspec.api.async_llm import AsyncLLM
from jspec.models import partition
from jspec.sharding import TENSOR
from jspec.util.processes import exit_at_once

SMALL = {"max_num_seqs": 4, "max_model_len": 64, "block_size": 8, "num_gpu_blocks_override": 16}
NGRAM = {
    "method": "ngram",
    "num_speculative_tokens": 3,
    "prompt_lookup_max": 3,
    "prompt_lookup_min": 1,
}
SUFFIX = {"method": "suffix", "num_speculative_tokens": 3}
EBNF = 'root ::= "[" item ("," item)* "]"\nitem ::= "a" | "[" root "]"'  # followed by the host
FEW = {"max_tokens": 24, "ignore_eos": True}
GREEDY = jspec.SamplingParams(temperature=0, **FEW)
DRAWN = jspec.SamplingParams(temperature=0.8, top_p=0.95, seed=3, n=2, **FEW)
REGEX = jspec.SamplingParams(temperature=1, seed=5, structured_outputs={"regex": "(ab|cd)+"}, **FEW)
SCORED = jspec.SamplingParams(temperature=0, logprobs=2, prompt_logprobs=1, **FEW)
FOLLOWED = jspec.SamplingParams(temperature=1, seed=5, structured_outputs={"grammar": EBNF}, **FEW)
CASES = {"few": (NGRAM, [GREEDY, DRAWN, REGEX]), "more": (SUFFIX, [SCORED, DRAWN, FOLLOWED])}
ENDS = (SystemExit(3), SystemExit(), SystemExit("nothing"), KeyError("fails"))
PROMPTS = ["the quick brown fox jumps", "the quick brown fox", "def add(x"]


def texts(llm: jspec.LLM, settings: list[jspec.SamplingParams]) -> list[list[int]]:
    """Return tokens, after a text that its reader left."""
    stream = llm.stream(PROMPTS[0], GREEDY, rounds=1)
    next(stream)
    stream.close()
    outputs = llm.generate(PROMPTS, settings)
    return [list(text.token_ids) for output in outputs for text in output.outputs]


def louder(model: str, ways: int) -> Any:
    """Return weights for ``update_params``, in the parts of ``ways`` devices."""
    loaded = jspec.load(model)
    rules = partition.rules(loaded.config, ways)

    def put(path, x):
        fields = tuple(getattr(key, "name", getattr(key, "idx", None)) for key in path)
        spec, order = rules.get(fields, (None, None))
        x = np.asarray(x)
        x = x if order is None else np.take(x, order, list(spec).index(TENSOR))
        return np.float32(1.5) * x

    return jax.tree_util.tree_map_with_path(put, loaded.params)


def ask(served: AsyncLLM, settings: jspec.SamplingParams, lengths: range) -> float:
    """Have prompts of several lengths continued together; return the time before."""

    async def ask(length: int) -> None:
        async for _ in served.generate({"prompt_token_ids": [5] * length}, settings):
            pass

    async def ask_all() -> None:
        await asyncio.gather(*map(ask, lengths))

    begin = time.time()
    asyncio.run(ask_all())
    return begin


def print_compilations() -> None:
    """Print at the end when and in which thread large programs were compiled."""
    found: list[tuple[float, str, str]] = []

    def note(event: str, _: float, fun_name: str = "", **__: Any) -> None:
        if "backend_compile" in event:
            found.append((time.time(), threading.current_thread().name, fun_name))

    jax.monitoring.register_event_duration_secs_listener(note)
    atexit.register(lambda: print(json.dumps(found), flush=True))


def main():
    case, model, port, index = sys.argv[1:]
    if case == "ahead":
        print_compilations()
    drafter, settings = CASES.get(case, CASES["few"])
    llm = jspec.LLM(
        model,
        drafter,
        tensor_parallel_size=4,
        coordinator=f"localhost:{port}",
        num_processes=2,
        process_id=int(index),
        **SMALL,
    )
    if case == "ahead":
        with AsyncLLM(llm) as served:
            served.warm_up()
            times = [ask(served, each, range(1, 40, 13)) for each in (GREEDY, DRAWN, REGEX)]
        print(json.dumps(times[::2]))
        return
    while case == "runs":
        llm.generate(PROMPTS)
        print("runs", flush=True)
    if case == "at once":
        exit_at_once(5)
    for end in ENDS:
        if case == repr(end):
            raise end
    several, alone = texts(llm, settings), jspec.LLM(model, drafter, **SMALL)
    one = texts(alone, settings)
    if case == "more":
        for each, ways in ((llm, 4), (alone, 1)):
            each.update_params(louder(model, ways))
            each.load_shared(None)
        several += texts(llm, settings)
        one += texts(alone, settings)
    try:
        llm.generate("a", jspec.SamplingParams(logits_processors=[lambda logits, *_: logits]))
    except ValueError as error:
        refused = str(error)
    preempted = sum(metric.value for metric in llm.get_metrics() if "preem" in metric.name)
    print(json.dumps([several, one, preempted, refused]), flush=True)


if __name__ == "__main__":
    main()

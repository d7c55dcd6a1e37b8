"""What a round of an EAGLE chain costs besides the matmuls that it cannot do without.

    python -m benchmarks.overhead [--out benchmarks/results/overhead.json]

On random weights, greedy, batch 1: ::

    overhead = (round - target's pass over K + 1 nodes - only the head's matmuls) / target's pass

A round is measured in the shipped ``decode``; each part runs in a loop of its own inside one
program, and the three take turns.
"""

import argparse
import json
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console

from benchmarks import curve
from jspec import ops
from jspec.core.types import Array, Params
from jspec.drafters import METHODS
from jspec.engine.batch import SequenceParams, advance, read, start
from jspec.engine.plan import Plan
from jspec.models import decoder
from jspec.models.decoder import DecoderConfig
from jspec.models.heads import eagle
from jspec.models.heads.eagle import EagleConfig, EagleParams
from jspec.tools.bench import environment

TARGET = DecoderConfig(
    vocab_size=32000,
    hidden_size=1024,
    intermediate_size=2816,
    num_layers=12,
    num_heads=16,
    num_kv_heads=4,
    head_dim=64,
    max_positions=2048,
)
HEAD = EagleConfig(
    network=DecoderConfig(**(vars(TARGET) | {"num_layers": 1, "vocab_size": 8000})),
    generation=3,
    capture_layers=(2, 6, 9),
    target_hidden_size=1024,
    target_vocab_size=32000,
    separate_head=True,
)
_RESULTS = Path(__file__).with_name("results")
_PROMPT, _ROUNDS, _LOOPS = 192, 24, 24


def round_seconds(params: Params, depth: int):
    """A function that decodes some rounds and returns the seconds of one."""
    drafter = METHODS["eagle3"](
        HEAD,
        target=decoder.Decoder(TARGET),
        num_speculative_tokens=depth,
        draft_sample_method="greedy",
    )
    plan = Plan(decoder.Decoder(TARGET), drafter, node_buckets=(depth + 1,))
    prompt = tuple(np.random.default_rng(0).integers(0, TARGET.vocab_size, _PROMPT).tolist())
    row = SequenceParams(prompt, max_tokens=512 - _PROMPT - depth - 2)

    def run() -> float:
        batch = jax.block_until_ready(start(plan, params, [row]))
        begin = time.perf_counter()
        batch = jax.block_until_ready(advance(plan, params, batch, _ROUNDS))
        seconds = time.perf_counter() - begin
        return seconds / read(batch)[0].rounds

    return run


def matmul_seconds(head: EagleParams, depth: int):
    """A function that runs a round's matmuls of the head and returns the seconds of one round.

    K + 1 rows of true features pass the head and one of them its output matrix; then K - 1 drafted
    tokens, one at a time, pass both.
    """

    def passed(x: Array) -> Array:
        layer = head.layers[0]
        x = ops.linear(jnp.concatenate([x, x], -1), layer.qkv)[..., : x.shape[-1]] + x
        x = ops.linear(x, layer.output) + x
        return ops.linear(ops.linear(x, layer.gate_up)[..., : layer.down.shape[0]], layer.down)

    def scored(x: Array) -> Array:
        return x + ops.linear(x, head.head).max(-1, keepdims=True)

    def body(_, x: Array) -> Array:
        x = passed(ops.linear(jnp.concatenate([x, x, x], -1), head.fc))
        last = scored(x[:1])
        for _ in range(depth - 1):
            last = scored(passed(last))
        return 1e-3 * (x + last)

    program = jax.jit(lambda x: jax.lax.fori_loop(0, _LOOPS, body, x))
    rows = jnp.ones((depth + 1, HEAD.hidden_size))
    jax.block_until_ready(program(rows))

    def run() -> float:
        begin = time.perf_counter()
        jax.block_until_ready(program(rows))
        return (time.perf_counter() - begin) / _LOOPS

    return run


def measure(dtype: str, depth: int, repeats: int) -> dict:
    """Milliseconds of the three parts, best of ``repeats``, and the overhead."""
    weights = jnp.dtype(dtype)
    params = Params(
        decoder.init_params(jax.random.key(0), TARGET, weights),
        eagle.init_params(jax.random.key(1), HEAD, weights),
    )
    runs = {
        "round": round_seconds(params, depth),
        "target": curve.passes(TARGET, params.target, depth + 1, prefix=_PROMPT),
        "head_matmuls": matmul_seconds(params.drafter, depth),
    }
    best = dict.fromkeys(runs, float("inf"))
    for _ in range(repeats):
        best = {name: min(best[name], run()) for name, run in runs.items()}
    overhead = (best["round"] - best["target"] - best["head_matmuls"]) / best["target"]
    return {
        "dtype": dtype,
        "num_speculative_tokens": depth,
        "milliseconds": {name: round(1e3 * seconds, 3) for name, seconds in best.items()},
        "overhead": round(overhead, 4),
    }


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description="overhead of a round of an EAGLE chain")
    parser.add_argument("--out", type=Path, default=_RESULTS / "overhead.json")
    parser.add_argument("--depths", type=int, nargs="+", default=(4,), metavar="K")
    parser.add_argument("--dtypes", nargs="+", default=("float32", "bfloat16"))
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args()
    rows = [
        measure(dtype, depth, arguments.repeats)
        for dtype in arguments.dtypes
        for depth in arguments.depths
    ]
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(environment.describe() | {"rows": rows}, indent=1) + "\n")
    for row in rows:
        Console().print(row)


if __name__ == "__main__":
    main()

"""What a step costs by committed length and by capacity: ``python -m benchmarks.context``.

Attention walks the committed prefix only, so a step at length 200 must cost the same in a cache of
8192 slots as in one of 256. Weights are random: the cost of a step does not depend on them.
"""

import argparse
import functools
import json
import time
from pathlib import Path

import jax
import jax.numpy as jnp
from rich.console import Console
from rich.table import Table

from jspec.core import kv_cache, trees
from jspec.models import decoder
from jspec.tools.bench import environment

SIZES = dict(
    vocab_size=4096,
    hidden_size=256,
    intermediate_size=704,
    num_layers=8,
    num_heads=4,
    num_kv_heads=2,
    head_dim=64,
    tie_embeddings=True,
)
CASES = ((200, 256), (200, 1024), (200, 8192), (2000, 8192), (8000, 8192))  # (length, capacity)
STEPS = 16  # in one program, so that its launch does not count


@functools.partial(jax.jit, static_argnames="config")
def run(config, params, cache, tokens):
    """``STEPS`` passes over the nodes ``tokens`` [B, N], each fed the last one's best tokens."""
    depth = tokens.shape[1] - 1
    tree = trees.from_parents(trees.chain(depth), depth)

    def step(_, tokens):
        out = decoder.forward(params, config, tokens, tree, cache)
        return jnp.argmax(out.logits, -1).astype(jnp.int32)

    return jax.lax.fori_loop(0, STEPS, step, tokens)


def contender(nodes: int, length: int, capacity: int):
    """A function that does ``STEPS`` steps at one length and capacity."""
    config = decoder.DecoderConfig(**SIZES, max_positions=capacity)
    params = decoder.init_params(jax.random.key(0), config)
    cache = decoder.init_cache(config, 1, capacity)
    cache = kv_cache.KVCache(cache.layers, jnp.array([length], jnp.int32))
    tokens = jnp.zeros((1, nodes), jnp.int32)
    return lambda: jax.block_until_ready(run(config, params, cache, tokens))


def race(contenders: dict, repeats: int) -> dict[str, float]:
    """Best milliseconds a step of each, run in turns."""
    best = dict.fromkeys(contenders, float("inf"))
    for _ in range(repeats + 1):  # the first turn compiles; it is never the best
        for name, once in contenders.items():
            begun = time.perf_counter()
            once()
            best[name] = min(best[name], (time.perf_counter() - begun) / STEPS * 1e3)
    return best


def main() -> None:
    """Measures, prints a table, and writes the figures where ``--json`` says."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    rows = []
    for nodes in (1, 5):
        cases = {case: contender(nodes, *case) for case in CASES}
        for (length, capacity), found in race(cases, arguments.repeats).items():
            rows.append(dict(nodes=nodes, length=length, capacity=capacity, milliseconds=found))
    table = Table("nodes", "length", "capacity", "ms a step", title="float32, batch 1")
    for row in rows:
        table.add_row(*map(str, list(row.values())[:3]), f"{row['milliseconds']:.3f}")
    Console().print(table)
    if arguments.json:
        arguments.json.write_text(json.dumps(environment.describe() | {"rows": rows}, indent=1))


if __name__ == "__main__":
    main()

"""Kernels beside XLA and beside what the memory allows: ``python -m benchmarks.kernels``.

A row is one operation at one size. ``floor`` is the time in which the device reads what the
operation has to read, at the bandwidth measured in the same run; ``/floor`` is how far a contender
is from it, ``x XLA`` how much faster than the reference a kernel is. A kernel becomes the default
of a device, in ``jspec.ops``, only with such a row. Without an accelerator there is only XLA.
"""

import argparse
import functools
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.table import Table

from jspec import ops, sampling, topology
from jspec.bench import environment
from jspec.kernels.rejection_sampling.shapes import CASES as DRAFTS
from jspec.kernels.rejection_sampling.shapes import Case
from jspec.kernels.tree_attention.shapes import CASES
from jspec.types import Draft, Sampling
from jspec.verify import RULES

REFERENCE = "reference"
KERNELS = {"tpu": "pallas_tpu", "gpu": "pallas_gpu"}  # of a platform
STEPS = 16  # in one program, so that its launch does not count
SIZES = ("batch", "length", "dtype")  # keys of a case that make up its size
WORKING_SET = 2**28  # bytes read before anything is read again, past any cache of the device


class Contest(NamedTuple):
    """One operation at one size."""

    operation: str
    case: dict  # what tells it from the others
    contenders: dict[str, Callable[[], jax.Array]]  # each does ``calls`` calls, the first is XLA's
    calls: int
    num_bytes: int  # that one call has to read and write


def tree_attention(settings: argparse.Namespace) -> Iterator[Contest]:
    """Trees of real shapes over long caches; every call of a turn has a cache of its own."""
    for name in settings.cases:
        for batch in settings.batch if name in CASES else ():
            for length in settings.lengths:
                yield _attention_contest(name, batch, length, jnp.dtype(settings.dtype))


def _attention_contest(name: str, batch: int, length: int, dtype: jnp.dtype) -> Contest:
    case = CASES[name]
    queries, kv_heads, features = case.heads
    slots = -(-(length + case.nodes) // 16) * 16
    cache_bytes = 2 * batch * kv_heads * slots * features * dtype.itemsize
    layers = max(1, min(8, WORKING_SET // cache_bytes))
    keys = iter(jax.random.split(jax.random.key(0), 2 * layers + 4))
    array = lambda *shape: jax.random.normal(next(keys), (batch, *shape), dtype)
    near = jnp.arange(case.keys) <= jnp.arange(case.nodes)[:, None] + case.keys - case.nodes
    arrays = dict(
        q=array(queries, case.nodes, features),
        tree=(array(kv_heads, case.keys, features), array(kv_heads, case.keys, features)),
        ancestors=topology.pack_bits(jnp.broadcast_to(near, (batch, *near.shape))),
        caches=[(array(kv_heads, slots, features), array(kv_heads, slots, features))
                for _ in range(layers)],
        length=jnp.full((batch,), length, jnp.int32),
    )  # fmt: skip
    read = length if case.window is None else min(length, case.window)
    moved = 2 * batch * kv_heads * (read + case.keys) * features * dtype.itemsize
    moved += arrays["q"].size * (dtype.itemsize + 4)
    names = [REFERENCE, *([KERNELS[jax.default_backend()]] if _has_kernel(dtype) else [])]
    contenders = {each: functools.partial(_attend, case, each, **arrays) for each in names}
    facts = {"case": name, "batch": batch, "length": length, "dtype": dtype.name}
    return Contest("tree_attention", facts, contenders, STEPS * layers, moved)


def _has_kernel(dtype: jnp.dtype) -> bool:
    return _has_accelerator() and (jax.default_backend() == "tpu" or dtype == jnp.bfloat16)


def _has_accelerator() -> bool:
    return jax.default_backend() in KERNELS


@functools.partial(jax.jit, static_argnums=(0, 1))
def _attend(case, implementation, *, q, tree, ancestors, caches, length):
    """``STEPS`` passes over all caches, each fed what the last one gave."""
    positions = length[:, None] + jnp.arange(q.shape[2])

    def step(_, q):
        for cache in caches:
            mixed = ops.attention(
                q, *tree, ancestors, *cache, length, scale=q.shape[-1] ** -0.5, window=case.window,
                positions=positions, soft_cap=case.soft_cap, implementation=implementation,
            )  # fmt: skip
            q = mixed.astype(q.dtype)
        return q

    return jax.lax.fori_loop(0, STEPS, step, q)


def rejection_sampling(settings: argparse.Namespace) -> Iterator[Contest]:
    """Drafts over vocabularies of real models, from raw logits to the token."""
    for name in settings.cases:
        for batch in settings.batch if name in DRAFTS else ():
            yield _sampling_contest(name, batch)


def _sampling_contest(name: str, batch: int) -> Contest:
    case = DRAFTS[name]
    keys = iter(jax.random.split(jax.random.key(0), 20))
    shape = (batch, len(case.parents), case.vocab)
    one = 3 * jax.random.normal(next(keys), shape)
    dtypes = jnp.dtype(case.logits), jnp.dtype(case.draft)
    moved = one.size * sum(dtype.itemsize for dtype in dtypes)
    rounds = [
        _draft(case, one + jax.random.normal(next(keys), shape), next(keys), one)
        for _ in range(max(1, min(8, WORKING_SET // moved)))
    ]
    uniform = jax.random.uniform(next(keys), (batch,))
    names = [REFERENCE, *([KERNELS[jax.default_backend()]] if _has_accelerator() else [])]
    contenders = {each: functools.partial(_judge, case, each, rounds, uniform) for each in names}
    facts = {"case": name, "batch": batch, "dtype": case.logits}
    return Contest("rejection_sampling", facts, contenders, STEPS * len(rounds), moved)


def _draft(case: Case, recorded: jax.Array, key: jax.Array, target: jax.Array) -> tuple:
    """(target logits, tokens, recorded logits, coins): every node drawn from its parent's row."""
    parents = jnp.array(case.parents)
    key, coins = jax.random.split(key)
    tokens = jax.random.categorical(key, recorded[:, parents]).astype(jnp.int32)
    coins = jax.random.uniform(coins, tokens.shape)
    return target.astype(case.logits), tokens, recorded.astype(case.draft), coins


@functools.partial(jax.jit, static_argnums=(0, 1))
def _judge(case, implementation, rounds, uniform):
    """``STEPS`` verdicts on all rounds, each drawn after the last one: the tokens."""
    count, nodes = rounds[0][1].shape
    parents = np.array([-1, *case.parents[1:]], np.int32)
    tree = topology.broadcast(topology.from_parents(parents, case.depth), count)
    sampled = None if case.drawn is None else jnp.tile(jnp.array(case.drawn), (count, 1))
    valid = jnp.ones((count, nodes), bool)
    full = lambda value: jnp.full((count,), value)
    warps = Sampling(full(0.8), full(0.01), full(50), full(0.9), names=case.warps)
    rule = RULES[case.rule].judging(case.proposal)

    def judge(logits, draft, coins, uniform):
        if implementation == REFERENCE:  # what runs by default
            _, _, law = rule.walk(sampling.warp(logits, warps), draft, tree, coins)
            return sampling.draw(law, uniform)
        return ops.rejection_sampling(
            logits, warps, draft, tree, coins, uniform, rule=case.rule,
            replaced=case.proposal == "iid", implementation=implementation,
        )[2]  # fmt: skip

    def step(_, token):
        for logits, tokens, recorded, coins in rounds:
            draft = Draft(tokens, parents, valid, recorded, sampled, max_depth=case.depth)
            after = jnp.where(token < 0, 0.5, uniform)  # never; the compiler cannot know
            token = judge(logits, draft, coins, after)
        return token

    return jax.lax.fori_loop(0, STEPS, step, jnp.zeros((count,), jnp.int32))


OPERATIONS = {"tree_attention": tree_attention, "rejection_sampling": rejection_sampling}


def race(contest: Contest, repeats: int) -> dict[str, float]:
    """Best seconds a call of each contender, run in turns."""
    best = dict.fromkeys(contest.contenders, float("inf"))
    for _ in range(repeats + 1):  # the first turn compiles; it is never the best
        for name, once in contest.contenders.items():
            begun = time.perf_counter()
            jax.block_until_ready(once())
            best[name] = min(best[name], (time.perf_counter() - begun) / contest.calls)
    return best


def difference(contest: Contest) -> float:
    """The largest difference between the results of a kernel and of XLA; 0 without a kernel."""
    results = [once().astype(jnp.float32) for once in contest.contenders.values()]
    return float(max(jnp.abs(result - results[0]).max() for result in results))


def bandwidth(repeats: int = 10) -> float:
    """Bytes a second that a matrix-vector product reads."""
    matrix = jnp.ones((2 * WORKING_SET // 4 // 4096, 4096), jnp.float32)
    vector = jnp.ones((4096,), jnp.float32)
    product = jax.jit(jnp.matmul)
    best = float("inf")
    for _ in range(repeats + 1):
        begun = time.perf_counter()
        product(matrix, vector).block_until_ready()
        best = min(best, time.perf_counter() - begun)
    return matrix.nbytes / best


def rows(settings: argparse.Namespace) -> Iterator[dict]:
    """Measures every contest; one row for each."""
    speed = bandwidth()
    for operation in settings.operations:
        for contest in OPERATIONS[operation](settings):
            seconds = race(contest, settings.repeats)
            yield dict(
                operation=operation, **contest.case, floor=contest.num_bytes / speed,
                seconds=seconds, difference=difference(contest), bytes_per_second=speed,
            )  # fmt: skip


def table(found: list[dict]) -> Table:
    """For people."""
    speed = found[0]["bytes_per_second"] / 1e9
    shown = Table("case", title=f"microseconds a call; the device reads {speed:.0f} GB/s")
    for name in ("size", "floor", "XLA", "/floor", "kernel", "/floor", "x XLA", "differs by"):
        shown.add_column(name, justify="right")
    for row in found:
        reference, *kernels = row["seconds"].values()
        size = [str(value) for key, value in row.items() if key in SIZES]
        cells = [f"{row['operation']}: {row['case']}", " ".join(size)]
        cells += [_microseconds(row["floor"]), _microseconds(reference)]
        cells.append(f"{reference / row['floor']:.2f}")
        for seconds in kernels:
            cells += [_microseconds(seconds), f"{seconds / row['floor']:.2f}"]
            cells += [f"{reference / seconds:.2f}", f"{row['difference']:.1e}"]
        shown.add_row(*cells)
    return shown


def _microseconds(seconds: float) -> str:
    return f"{seconds * 1e6:.1f}"


def main() -> None:
    """Measures, prints a table, and writes the figures where ``--json`` says."""
    on_cpu = jax.default_backend() == "cpu"
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.kernels", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--operations", nargs="+", choices=OPERATIONS, default=list(OPERATIONS))
    cases = [*CASES, *DRAFTS]
    parser.add_argument("--cases", nargs="+", choices=cases, default=cases, metavar="CASE")
    parser.add_argument("--batch", nargs="+", type=int, default=[1] if on_cpu else [1, 8, 32])
    lengths = [1024] if on_cpu else [1024, 8192, 32768]
    parser.add_argument("--lengths", nargs="+", type=int, default=lengths)
    parser.add_argument("--dtype", default="float32" if on_cpu else "bfloat16", help="of attention")
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    found = list(rows(arguments))
    Console().print(table(found))
    if arguments.json:
        arguments.json.write_text(json.dumps(environment.describe() | {"rows": found}, indent=1))


if __name__ == "__main__":
    main()

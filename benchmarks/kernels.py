"""Kernels against XLA and the memory bandwidth: ``python -m benchmarks.kernels``.

A row is one operation at one size. ``floor`` is the time to read the operation's inputs at the
bandwidth measured in the same run. ``/floor`` is a contender's time in units of it, ``x XLA`` the
speedup of a kernel over XLA. A kernel becomes the default of a device, in ``jspec.ops``, only with
such a row. Without an accelerator there is only XLA, and for products with quantised matrices
Pallas' interpreter of the Hopper kernel on small ones, whose time means nothing.

``differs by`` compares one call: the largest difference of attention, relative to the largest
value, or the share of different verdicts. ``LIMITS`` bounds it. A kernel that does not compile, or
returns NaN, is an error of its row; the other rows continue.
"""

import argparse
import concurrent.futures
import functools
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.contests import (
    MOST_COPIES,
    STEPS,
    WORKING_SET,
    XLA,
    Contest,
    kernels,
    no_kernels,
)
from benchmarks.products import EXPERTS, MATRICES, grouped_matmul, quantized_matmul
from jspec import ops
from jspec.core import sampling, trees
from jspec.core.types import Draft, Sampling
from jspec.engine import programs
from jspec.kernels.rejection_sampling.shapes import CASES as DRAFTS
from jspec.kernels.rejection_sampling.shapes import Case
from jspec.kernels.tree_attention.shapes import CASES
from jspec.tools.bench import environment, files
from jspec.verify import RULES

SIZES = ("batch", "length", "dtype", "page")  # keys of a case that are its size
PEAK = 4.0  # standard deviation of scores: few keys have most of the weight, as in real layers
# bfloat16 attention rounds scores and weights. Verdicts differ where a draw falls on the border of
# two tokens and sums round differently.
LIMITS = {"tree_attention": 0.02, "rejection_sampling": 0.25}
LIMITS |= {"grouped_matmul": 0.01, "quantized_matmul": 0.01}


def tree_attention(settings: argparse.Namespace) -> Iterator[Contest]:
    """Yield trees of real shapes over long caches; every call in turn has its own cache."""
    for name in settings.cases:
        for batch in settings.batch if name in CASES else ():
            for length in settings.lengths:
                for page in settings.pages:
                    yield _attention_contest(name, batch, length, jnp.dtype(settings.dtype), page)


def _attention_contest(name: str, batch: int, length: int, dtype: jnp.dtype, page: int) -> Contest:
    case = CASES[name]
    queries, kv_heads, features = case.heads
    multiple = page or 16
    slots = -(-(length + case.nodes) // multiple) * multiple
    table, shape = None, (batch, kv_heads, slots, features)
    if page:  # those of a row lie apart, as in a pool that is used for long
        table = jax.random.permutation(jax.random.key(2), batch * slots // page).astype(jnp.int32)
        table, shape = table.reshape(batch, -1), (table.size, kv_heads, page, features)
    cache_bytes = 2 * batch * kv_heads * slots * features * dtype.itemsize
    layers = max(1, min(MOST_COPIES, -(-WORKING_SET // cache_bytes)))
    keys = iter(jax.random.split(jax.random.key(0), 2 * layers + 4))
    normal = lambda *shape: jax.random.normal(next(keys), shape, dtype)
    array = functools.partial(normal, batch)
    near = jnp.arange(case.keys) <= jnp.arange(case.nodes)[:, None] + case.keys - case.nodes
    arrays = dict(
        q=(PEAK * array(queries, case.nodes, features)).astype(dtype),
        tree=(array(kv_heads, case.keys, features), array(kv_heads, case.keys, features)),
        ancestors=trees.pack_bits(jnp.broadcast_to(near, (batch, *near.shape))),
        caches=[(normal(*shape), normal(*shape)) for _ in range(layers)],
        table=table,
        length=jnp.full((batch,), length, jnp.int32),
        nudge=jnp.zeros((), dtype),
    )
    read = length if case.window is None else min(length, case.window)
    moved = 2 * batch * kv_heads * (read + case.keys) * features * dtype.itemsize
    moved += arrays["q"].size * (dtype.itemsize + 4)
    takes = jax.default_backend() == "tpu" or dtype == jnp.bfloat16
    names = [XLA, *(kernels() if takes else ())]
    contenders = {each: functools.partial(_attend, case, each, **arrays) for each in names}
    facts = {"case": name, "batch": batch, "length": length, "dtype": dtype.name, "page": page}
    return Contest("tree_attention", facts, contenders, STEPS * layers, moved, layers)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _attend(case, implementation, *, q, tree, ancestors, caches, table, length, nudge):
    """Run ``STEPS`` passes over all caches; return the result of the last call.

    ``nudge`` is 0. It makes each call depend on the one before, with the same queries.
    """
    positions = length[:, None] + jnp.arange(q.shape[2])

    def step(_, mixed):
        for cache in caches:
            mixed = ops.attention(
                q + nudge * mixed.astype(q.dtype),
                *tree,
                ancestors,
                *cache,
                length,
                scale=q.shape[-1] ** -0.5,
                window=case.window,
                positions=positions,
                soft_cap=case.soft_cap,
                sinks=jnp.zeros(q.shape[1]) if case.has_sinks else None,
                table=table,
                implementation=implementation,
            )
        return mixed

    return jax.lax.fori_loop(0, STEPS, step, jnp.zeros(q.shape, jnp.float32))


def rejection_sampling(settings: argparse.Namespace) -> Iterator[Contest]:
    """Yield drafts over vocabularies of real models, from raw logits to the token."""
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
        for _ in range(max(1, min(MOST_COPIES, -(-WORKING_SET // moved))))
    ]
    uniform = jax.random.uniform(next(keys), (batch, 2)) * jnp.array([1, 2**-24])
    names = [XLA, *kernels()]
    contenders = {each: functools.partial(_judge, case, each, rounds, uniform) for each in names}
    facts = {"case": name, "batch": batch, "dtype": case.logits}
    calls = STEPS * len(rounds)
    return Contest("rejection_sampling", facts, contenders, calls, moved, len(rounds))


def _draft(case: Case, recorded: jax.Array, key: jax.Array, target: jax.Array) -> tuple:
    """Target logits, tokens drawn from the parent's row, recorded logits, uniforms."""
    parents = jnp.array(case.parents)
    key, uniforms = jax.random.split(key)
    tokens = jax.random.categorical(key, recorded[:, parents]).astype(jnp.int32)
    uniforms = jax.random.uniform(uniforms, tokens.shape)
    return target.astype(case.logits), tokens, recorded.astype(case.draft), uniforms


@functools.partial(jax.jit, static_argnums=(0, 1))
def _judge(case, implementation, rounds, uniform):
    """Run ``STEPS`` verdicts on all rounds in sequence; return length and token in one, [R, B]."""
    count, nodes = rounds[0][1].shape
    parents = np.array([-1, *case.parents[1:]], np.int32)
    tree = trees.broadcast(trees.from_parents(parents, case.depth), count)
    sampled = None if case.drawn is None else jnp.tile(jnp.array(case.drawn), (count, 1))
    valid = jnp.ones((count, nodes), bool)
    full = lambda value: jnp.full((count,), value)
    filters = Sampling(
        dict(temperature=full(0.8), min_p=full(0.01), top_k=full(50), top_p=full(0.9)),
        names=case.filters,
    )

    def judge(logits, draft, uniforms, uniform):
        if implementation == XLA:  # the default
            processed, walk = sampling.process_logits(logits, filters), RULES[case.rule].walk
            _, accepted, log_p = walk(processed, draft, tree, uniforms, case.proposal)
            token = sampling.draw(log_p, uniform)
        else:
            _, accepted, token = ops.rejection_sampling(
                logits,
                filters,
                draft,
                tree,
                uniforms,
                uniform,
                rule=case.rule,
                implementation=implementation,
            )
        return accepted * case.vocab + token

    def step(_, verdicts):
        last, verdicts = verdicts[-1], []
        for logits, tokens, recorded, uniforms in rounds:
            draft = Draft(tokens, parents, valid, recorded, sampled, max_depth=case.depth)
            # Never true, but the compiler cannot see that.
            after = jnp.where(last[:, None] < 0, 0.5, uniform)
            last = judge(logits, draft, uniforms, after)
            verdicts.append(last)
        return jnp.stack(verdicts)

    return jax.lax.fori_loop(0, STEPS, step, jnp.zeros((len(rounds), count), jnp.int32))


def num_rows(settings: argparse.Namespace) -> int:
    """Return the number of rows without a time limit."""
    attention = len(settings.batch) * len(settings.lengths) * len(settings.pages)
    rows_of = {
        "tree_attention": (CASES, attention),
        "rejection_sampling": (DRAFTS, len(settings.batch)),
        "grouped_matmul": (EXPERTS, 1),
        "quantized_matmul": (MATRICES, 1),
    }
    return sum(
        times * len(known.keys() & set(settings.cases))
        for known, times in map(rows_of.get, settings.operations)
    )


OPERATIONS = {
    "tree_attention": tree_attention,
    "rejection_sampling": rejection_sampling,
    "grouped_matmul": grouped_matmul,
    "quantized_matmul": quantized_matmul,
}


def race(contest: Contest, names: Iterable[str], repeats: int) -> dict[str, float]:
    """Return the best seconds per call of the compiled contenders ``names``, run in turn."""
    best = dict.fromkeys(names, float("inf"))
    for _ in range(repeats):
        for name in best:
            begun = time.perf_counter()
            jax.block_until_ready(contest.contenders[name]())
            best[name] = min(best[name], (time.perf_counter() - begun) / contest.calls)
    return best


def results(contest: Contest) -> tuple[dict[str, np.ndarray], dict[str, str]]:
    """Compile and run the contenders; return the results, and the errors of the others."""

    def attempt(once: Callable[[], jax.Array]) -> np.ndarray | str:
        try:
            result = np.asarray(once())
        except Exception as error:  # raised by the compiler or the device
            return f"{type(error).__name__}: {str(error).strip()}".splitlines()[0][:300]
        return result if np.isfinite(result).all() else "returns NaN or infinity"

    with concurrent.futures.ThreadPoolExecutor(len(contest.contenders)) as pool:
        outputs = dict(
            zip(contest.contenders, pool.map(attempt, contest.contenders.values()), strict=True)
        )
    errors = {name: each for name, each in outputs.items() if isinstance(each, str)}
    return {name: each for name, each in outputs.items() if name not in errors}, errors


def difference(operation: str, outputs: dict[str, np.ndarray]) -> float | None:
    """Return the difference of a kernel from XLA; None if one of them is missing."""
    if len(outputs) < 2:
        return None
    expected, other = (each.astype(np.float64) for each in outputs.values())
    if operation == "rejection_sampling":
        return float((expected != other).mean())
    return float(np.abs(expected - other).max() / np.abs(expected).max())


def bandwidth(repeats: int = 10) -> float:
    """Return the bytes per second that matrix-vector products read, in sequence in one program."""
    width = 4096
    matrix = jax.random.normal(jax.random.key(0), (WORKING_SET // width, width)) / width**0.5

    @jax.jit
    def products(matrix, vector):
        return jax.lax.fori_loop(
            0, STEPS, lambda _, vector: (matrix @ vector).reshape(-1, width).sum(0), vector
        )

    best = float("inf")
    for _ in range(repeats + 1):  # the first repeat compiles; it is never the best
        begun = time.perf_counter()
        products(matrix, jnp.ones(width)).block_until_ready()
        best = min(best, time.perf_counter() - begun)
    return STEPS * matrix.nbytes / best


def rows(settings: argparse.Namespace) -> Iterator[dict]:
    """Measure every contest; yield a row for each that begins in time."""
    begun, speed = time.perf_counter(), bandwidth()
    for operation in settings.operations:
        for contest in OPERATIONS[operation](settings):
            if settings.seconds and time.perf_counter() - begun > settings.seconds:
                return
            yield measured(contest, settings.repeats, speed)


def measured(contest: Contest, repeats: int, speed: float) -> dict:
    """Return a row of the results; ``speed`` in bytes per second."""
    outputs, errors = results(contest)
    apart = difference(contest.operation, outputs)
    return dict(
        operation=contest.operation,
        **contest.case,
        floor=contest.num_bytes / speed,
        cached=contest.cached,
        seconds=race(contest, outputs, repeats),
        difference=apart,
        errors=errors,
        well=not errors and (apart or 0.0) <= LIMITS[contest.operation],
        bytes_per_second=speed,
    )


def table(measurements: list[dict]) -> Table:
    """Return the rows as a table for people."""
    speed = measurements[0]["bytes_per_second"] / 1e9
    shown = Table("case", title=f"microseconds a call; the device reads {speed:.0f} GB/s")
    for name in ("size", "floor", "XLA", "/floor", "kernel", "/floor", "x XLA", "differs by"):
        shown.add_column(name, justify="right")
    for row in measurements:
        size = [str(value) for key, value in row.items() if key in SIZES and value]
        size += ["cached"] if row["cached"] else []
        cells = [f"{row['operation']}: {row['case']}", " ".join(size), _microseconds(row["floor"])]
        by_xla = row["seconds"].get(XLA)
        cells += _cells(by_xla, row["floor"])
        for name in [*row["seconds"], *row["errors"]]:
            if name == XLA:
                continue
            seconds, apart = row["seconds"].get(name), row["difference"]
            cells += _cells(seconds, row["floor"])
            cells.append(f"{by_xla / seconds:.2f}" if by_xla and seconds else "-")
            cells.append(row["errors"].get(name) or ("-" if apart is None else f"{apart:.1e}"))
        shown.add_row(*cells)
    return shown


def _cells(seconds: float | None, floor: float) -> list[str]:
    return ["-", "-"] if seconds is None else [_microseconds(seconds), f"{seconds / floor:.2f}"]


def _microseconds(seconds: float) -> str:
    return f"{seconds * 1e6:.1f}"


def main() -> None:
    """Measure, print a table, and write the figures to ``--json``."""
    on_cpu = jax.default_backend() == "cpu"
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.kernels", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--operations", nargs="+", choices=OPERATIONS, default=list(OPERATIONS))
    cases = [*CASES, *DRAFTS, *EXPERTS, *MATRICES]
    least = [*CASES, *DRAFTS] if on_cpu else cases  # XLA multiplies all experts on a CPU.
    parser.add_argument("--cases", nargs="+", choices=cases, default=least, metavar="CASE")
    parser.add_argument("--batch", nargs="+", type=int, default=[1] if on_cpu else [1, 8, 32])
    lengths = [1024] if on_cpu else [1024, 8192, 32768]
    parser.add_argument("--lengths", nargs="+", type=int, default=lengths)
    parser.add_argument("--pages", nargs="+", type=int, default=[0, 64], help="slots; 0 for none")
    parser.add_argument("--dtype", default="float32" if on_cpu else "bfloat16", help="of attention")
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--seconds", type=float, help="after which no row begins")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    programs.keep_compiled_programs()
    facts, measurements = {"no_kernels": no_kernels(), "asked": num_rows(arguments)}, []
    facts = environment.describe() | facts
    for row in rows(arguments):
        measurements.append(row)
        if arguments.json:  # after each row, in case of an interrupt
            files.write_json(facts | {"rows": measurements}, arguments.json)
    Console().print(table(measurements))


if __name__ == "__main__":
    main()

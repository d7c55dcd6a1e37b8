"""The cost of verifying N nodes relative to one, V(N) / V(1), at an 8B model's shape.

    python -m benchmarks.verify_cost [--out benchmarks/results/verify_cost.json]

A pass reads every weight and the whole prefix for any number of nodes, so a few nodes should cost
hardly more than one; speculation depends on that. The bar: 8 nodes at batch 1 cost at most 1.10
times one node. Weights and prefixes are random and made on the device. Contenders of a batch size
take turns. Cases that do not fit into the device's memory are reported and left out.
"""

import argparse
import concurrent.futures
import dataclasses
import functools
import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.kernels import KERNELS, XLA
from jspec.core import kv_cache, trees
from jspec.core.types import Array, Tree
from jspec.drafters.trees import tree_settings
from jspec.models import decoder
from jspec.models.blocks.attention import Attention
from jspec.models.blocks.mlp import GatedMlp
from jspec.models.decoder import DecoderConfig, DecoderParams, Layer
from jspec.tools.bench import environment, files
from jspec.tools.bench.timing import Contender, Sample, race

BAR, BAR_NODES, BAR_BATCH = 1.10, 8, 1
CONFIGS = {
    "Llama-3.1-8B": DecoderConfig(
        vocab_size=128256, hidden_size=4096, max_positions=131072,
        layers=(Layer(Attention(32, 8, head_dim=128), GatedMlp(14336)),) * 32,
    ),
    "tiny": DecoderConfig(
        vocab_size=512, hidden_size=64, max_positions=2048,
        layers=(Layer(Attention(4, 2, head_dim=16), GatedMlp(128)),) * 2,
    ),
}  # fmt: skip
LENGTHS = {"Llama-3.1-8B": (8192, 32768), "tiny": (64, 500)}
_TREE_DEPTH, _TREE_TOP_K = 6, 8
_SLOT_MULTIPLE = 64  # slots of a cache: every kernel reads such blocks in place
_RESULTS = Path(__file__).with_name("results")
_LOG_WIDTH = 160


@dataclasses.dataclass(frozen=True)
class Case:
    """A timed pass."""

    implementation: str  # kernel of attention
    draft: str  # "chain" or "tree"
    batch: int
    length: int  # committed tokens of every row
    nodes: int  # N, the root included

    def over(self, nodes: int) -> "Case":
        """Return the case with so many nodes; one or two nodes are always a chain."""
        draft = self.draft if nodes > 2 else "chain"
        return dataclasses.replace(self, nodes=nodes, draft=draft)


def cases(settings: argparse.Namespace, batch: int, lengths: Sequence[int]) -> Iterator[Case]:
    """Yield the cases of a batch size."""
    for implementation in settings.implementations:
        for length in lengths:
            for nodes in settings.nodes:
                for draft in ("chain", "tree") if nodes > 2 else ("chain",):
                    yield Case(implementation, draft, batch, length, nodes)


def tree_of(case: Case) -> Tree:
    """Return the nodes of a case as arrays, so that chains and trees share one program."""
    parents = trees.chain(case.nodes - 1)
    if case.draft == "tree":
        depth, top_k = (min(limit, case.nodes - 1) for limit in (_TREE_DEPTH, _TREE_TOP_K))
        parents = np.array(tree_settings.best(case.nodes, depth, top_k).parents, np.int32)
    return trees.broadcast(trees.from_parents(parents, case.nodes - 1), case.batch)


def room() -> int:
    """Return the free bytes of the device, or the memory of the machine."""
    if stats := jax.local_devices()[0].memory_stats():
        return stats["bytes_limit"] - stats["bytes_in_use"]
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def size(tree: object) -> int:
    """Return the bytes of the arrays of a pytree, which may be abstract."""
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def cache_like(config: DecoderConfig, batch: int, length: int, most_nodes: int) -> kv_cache.KVCache:
    """Return the abstract cache of ``length`` tokens and a round."""
    slots = -(-(length + most_nodes) // _SLOT_MULTIPLE) * _SLOT_MULTIPLE
    return jax.eval_shape(functools.partial(decoder.init_cache, config, batch, slots))


def random_cache(like: kv_cache.KVCache) -> kv_cache.KVCache:
    """Return a cache of noise, made on the device."""
    leaves, form = jax.tree.flatten(like.layers)
    normal = jax.jit(lambda key: jax.random.normal(key, leaves[0].shape, leaves[0].dtype))
    keys = jax.random.split(jax.random.key(1), len(leaves))
    return kv_cache.KVCache(
        jax.tree.unflatten(form, map(normal, keys)), jnp.zeros_like(like.length)
    )


def skipped(case: dict, reason: str, needed: int | None = None) -> dict:
    """Print a case that is left out, and return it for the results."""
    if needed is not None:
        reason = f"needs {needed / 1e9:.1f} GB, and {reason}"
    facts = ", ".join(f"{name} {value}" for name, value in case.items())
    print(f"left out: {facts}: {reason}", flush=True)
    return case | {"reason": reason}


def trace_passes(
    config: DecoderConfig,
    implementation: str,
    nodes: int,
    passes: int,
    params: DecoderParams,
    like: kv_cache.KVCache,
) -> jax.stages.Traced:
    """Trace ``passes`` passes over ``nodes`` nodes, from a cache, tokens and a tree."""
    config = dataclasses.replace(config, attention=implementation)
    batch = like.length.shape[0]

    @functools.partial(jax.jit, donate_argnames="cache")
    def run(params, cache, tokens, tree):
        return repeated(config, params, cache, tokens, tree, passes)

    tree = jax.eval_shape(lambda: tree_of(Case(implementation, "chain", batch, 0, nodes)))
    tokens = jax.ShapeDtypeStruct((batch, nodes), jnp.int32)
    return run.trace(params, like, tokens, tree)


def repeated(
    config: DecoderConfig,
    params: DecoderParams,
    cache: kv_cache.KVCache,
    tokens: Array,
    tree: Tree,
    count: int,
) -> tuple[kv_cache.KVCache, Array]:
    """Run ``count`` passes over the nodes ``tokens`` [B, N] of ``tree``, each fed by the last.

    Every pass writes the KV of all its nodes, and the prefix keeps its length.
    """
    rows = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    none = jnp.zeros(tokens.shape[:1], jnp.int32)

    def body(_, carry):
        cache, tokens = carry
        out = decoder.forward(params, config, tokens, tree, cache)
        cache = kv_cache.append(cache, out.tree_kv, rows, none)
        return cache, jnp.argmax(out.logits, -1).astype(jnp.int32)

    return jax.lax.fori_loop(0, count, body, (cache, tokens))


def programs(
    config: DecoderConfig,
    settings: argparse.Namespace,
    params: DecoderParams,
    like: kv_cache.KVCache,
) -> tuple[dict[tuple[str, int], jax.stages.Compiled], list[dict]]:
    """Compile programs by (implementation, nodes) in parallel; return them, and those left out."""
    results, left_out = {}, []
    compiled = lambda *case: (
        trace_passes(config, *case, settings.passes, params, like).lower().compile()
    )
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        futures = {
            (name, nodes): pool.submit(compiled, name, nodes)
            for name in settings.implementations
            for nodes in settings.nodes
        }
    for (name, nodes), future in futures.items():
        case = {"implementation": name, "batch": like.length.shape[0], "nodes": nodes}
        if error := future.exception():  # the other programs are measured all the same
            left_out.append(skipped(case, f"{type(error).__name__}: {error}".splitlines()[0]))
            continue
        program = future.result()
        needed = size(like.layers) + program.memory_analysis().temp_size_in_bytes
        if needed > room():
            left_out.append(skipped(case, f"{room() / 1e9:.1f} GB are left", needed))
            continue
        results[name, nodes] = program
    return results, left_out


class Passes:
    """The passes of one batch size, which share a cache and keep its length."""

    def __init__(self, params: DecoderParams, cache: kv_cache.KVCache):
        self.params, self.cache = params, cache

    def run(self, program: jax.stages.Compiled, length: int, tokens: Array, tree: Tree) -> Sample:
        """Time one call of a program."""
        cache = self.cache.replace(length=jnp.full_like(self.cache.length, length))
        jax.block_until_ready(cache.length)
        begun, cpu_begun = time.perf_counter(), time.process_time()
        self.cache, _ = jax.block_until_ready(program(self.params, cache, tokens, tree))
        seconds = time.perf_counter() - begun
        return Sample(seconds, time.process_time() - cpu_begun, tokens=[])


def measure(
    config: DecoderConfig, settings: argparse.Namespace, params: DecoderParams, batch: int
) -> tuple[list[dict], list[dict]]:
    """Return the rows of one batch size, and the cases left out."""
    lengths, left_out = [], []
    for length in settings.lengths:
        needed = size(cache_like(config, batch, length, max(settings.nodes)))
        if needed > room():
            case = {"batch": batch, "length": length}
            left_out.append(skipped(case, f"{room() / 1e9:.1f} GB are left", needed))
        else:
            lengths.append(length)
    if not lengths:
        return [], left_out
    like = cache_like(config, batch, max(lengths), max(settings.nodes))
    compiled, more = programs(config, settings, params, like)
    passes = Passes(params, random_cache(like))
    field = {}
    for case in cases(settings, batch, lengths):
        if program := compiled.get((case.implementation, case.nodes)):
            tokens = jnp.ones((batch, case.nodes), jnp.int32)
            run = functools.partial(passes.run, program, case.length, tokens, tree_of(case))
            run()
            field[case] = Contender(str(case), run, limit=settings.quiet)
    race(list(field.values()), settings.repeats, settings.patience)
    return rows_of(field, settings.passes), left_out + more


def rows_of(field: dict[Case, Contender], passes: int) -> list[dict]:
    """Return best and median milliseconds of a pass of each case, relative to one node's."""
    pick = {"best": min, "median": statistics.median}
    seconds = {
        case: {
            name: of([sample.seconds / passes for sample in contender.usable])
            for name, of in pick.items()
        }
        for case, contender in field.items()
    }
    rows = []
    for case, contender in field.items():
        alone = seconds.get(case.over(1))
        row = dataclasses.asdict(case)
        for name in pick:
            row[f"milliseconds_{name}"] = round(1e3 * seconds[case][name], 4)
            ratio = seconds[case][name] / alone[name] if alone else None
            row[f"ratio_{name}"] = ratio and round(ratio, 4)
        row["seconds"] = [round(sample.seconds / passes, 6) for sample in contender.samples]
        row["foreign_cores"] = [sample.foreign for sample in contender.samples]
        rows.append(row)
    return rows


def bar(rows: list[dict]) -> dict[str, dict]:
    """Return the ratios that the bar limits for each implementation, and whether it is met."""
    verdicts: dict[str, dict] = {}
    for row in rows:
        if (row["nodes"], row["batch"]) == (BAR_NODES, BAR_BATCH) and row["ratio_best"]:
            ratios = verdicts.setdefault(row["implementation"], {"ratios": {}})["ratios"]
            ratios[f"{row['draft']} at {row['length']}"] = row["ratio_best"]
    for each in verdicts.values():
        each["met"] = max(each["ratios"].values()) <= BAR
    return verdicts


def verdict(rows: list[dict]) -> str:
    """Return the bar in a line for each implementation."""
    begin = f"bar V({BAR_NODES})/V(1) <= {BAR:.2f} at batch {BAR_BATCH}"
    lines = [
        f"{begin}, {name}: {'met' if each['met'] else 'not met'} ("
        + ", ".join(f"{ratio:.3f} {case}" for case, ratio in each["ratios"].items())
        + ")"
        for name, each in bar(rows).items()
    ]
    return "\n".join(lines) or f"{begin}: not measured"


def table(rows: list[dict]) -> Table:
    """Return the ratios as a table."""
    nodes = sorted({row["nodes"] for row in rows})
    shown = Table(
        title="V(N) / V(1): best times of a pass over N nodes a row, relative to one node"
    )
    for name in ("attention", "draft", "batch", "context", "V(1) ms", *map(str, nodes)):
        shown.add_column(name, justify="left" if name in ("attention", "draft") else "right")
    ratios = {Case(*(row[field.name] for field in dataclasses.fields(Case))): row for row in rows}
    for first in ratios:
        if first.nodes != nodes[-1]:
            continue
        line = [ratios.get(first.over(count)) for count in nodes]
        alone = ratios.get(first.over(1))
        cells = [f"{row['ratio_best']:.3f}" if row and row["ratio_best"] else "-" for row in line]
        shown.add_row(
            first.implementation,
            first.draft,
            str(first.batch),
            str(first.length),
            f"{alone['milliseconds_best']:.3f}" if alone else "-",
            *cells,
        )
    return shown


def arguments_of(words: Sequence[str] | None) -> argparse.Namespace:
    """Parse the settings, with defaults for the device and the shape."""
    on_cpu = jax.default_backend() == "cpu"
    parser = argparse.ArgumentParser(description="the cost of verifying N nodes relative to one")
    parser.add_argument("--shape", choices=CONFIGS, default="tiny" if on_cpu else "Llama-3.1-8B")
    parser.add_argument("--layers", type=int, help="number of layers, instead of the shape's")
    parser.add_argument(
        "--fit",
        action="store_true",
        help="drop layers until the weights take at most half of the memory",
    )
    parser.add_argument("--nodes", type=int, nargs="+", default=(1, 2, 4, 8, 16, 32, 64))
    parser.add_argument("--batch", type=int, nargs="+", default=(1, 8, 32))
    parser.add_argument("--lengths", type=int, nargs="+", help="committed tokens of a row")
    parser.add_argument(
        "--implementations",
        nargs="+",
        choices=(XLA, "kernel"),
        default=(XLA,) if on_cpu else (XLA, "kernel"),
        help="of attention",
    )
    parser.add_argument("--weights", default="bfloat16", help="dtype")
    parser.add_argument("--passes", type=int, default=8, help="passes in a timed program")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--patience", type=int, default=2)
    parser.add_argument("--quiet", type=float, default=0.1)
    parser.add_argument("--out", type=Path, default=_RESULTS / "verify_cost.json")
    settings = parser.parse_args(words)
    settings.lengths = settings.lengths or LENGTHS[settings.shape]
    if "kernel" in settings.implementations and on_cpu:
        parser.error("no kernel runs on a CPU; leave --implementations out")
    settings.implementations = [
        KERNELS[jax.default_backend()] if name == "kernel" else name
        for name in settings.implementations
    ]
    return settings


def config_of(settings: argparse.Namespace) -> DecoderConfig:
    """Return the model's config, with the activation and cache dtype of the device."""
    config = CONFIGS[settings.shape]
    dtype = "float32" if jax.default_backend() == "cpu" else "bfloat16"
    return dataclasses.replace(
        config,
        layers=config.layers[:1] * (settings.layers or config.num_layers),
        cache_dtype=dtype,
        activation_dtype=dtype,
    )


def weights_of(config: DecoderConfig, dtype: str) -> Callable[[], DecoderParams]:
    """Return a function that makes random weights."""
    return functools.partial(decoder.init_params, jax.random.key(0), config, jnp.dtype(dtype))


def fitting(config: DecoderConfig, dtype: str) -> DecoderConfig:
    """Return the config with few enough layers that weights take half of the free memory."""
    for count in range(config.num_layers, 0, -1):
        fewer = dataclasses.replace(config, layers=config.layers[:count])
        if 2 * size(jax.eval_shape(weights_of(fewer, dtype))) <= room():
            return fewer
    return fewer


def main(words: Sequence[str] | None = None) -> None:
    """Measure, write the results after every batch size, and print a table."""
    settings = arguments_of(words)
    config = config_of(settings)
    if settings.fit:
        config = fitting(config, settings.weights)
    make = weights_of(config, settings.weights)
    needed = size(jax.eval_shape(make))
    if needed > room():
        raise SystemExit(
            f"--shape {settings.shape} has {needed / 1e9:.1f} GB of weights, and "
            f"{room() / 1e9:.1f} GB are left; take fewer --layers."
        )
    params = jax.block_until_ready(make())
    facts = {
        "shape": settings.shape,
        "layers": config.num_layers,
        "weights": settings.weights,
        "cache": config.cache_dtype,
        "weight_bytes": needed,
    }
    rows, left_out = [], []
    for batch in settings.batch:
        more, less = measure(config, settings, params, batch)
        rows, left_out = rows + more, left_out + less
        results = {"model": facts, "rows": rows, "left_out": left_out, "bar": bar(rows)}
        settings.out.parent.mkdir(parents=True, exist_ok=True)
        files.write_json(environment.describe() | results, settings.out)
    console = Console()
    if not console.is_terminal:  # a log or a pipe, in which nothing is cut off
        console = Console(width=_LOG_WIDTH)
    if rows:
        console.print(table(rows))
    print(verdict(rows))


if __name__ == "__main__":
    main()

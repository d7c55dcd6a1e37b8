"""Milliseconds of an engine's round, of each method, with and without pages.

    python -m benchmarks.rounds [--shape Llama-3.1-8B] [--layers N] [--out FILE.json]
    python -m benchmarks.rounds --target MODEL --methods none ngram [--out FILE.json]
    python -m benchmarks.rounds --llm --slots 1 8 32 --prompt-tokens 1000 8000 [--out FILE.json]
    python -m benchmarks.rounds --nodes 1 2 4 8 16 [--attention xla pallas_gpu] [--out FILE.json]

Without ``--target``, weights of the shape are random, so the target accepts hardly any draft. The
time of a round relative to one without a draft is the acceptance length from which on a method
saves time. A round's time is the difference of two runs of different length, so prefills do not
count. Plain decoding over pages also has the seconds to the first token, of a new prompt and of a
cached one.

With ``--nodes`` a row is a pass of the target over so many nodes of a chain, without an engine. A
pass reads every weight and the whole prefix for any number of nodes, so a few nodes should cost
hardly more than one.

With ``--llm`` one ``LLM`` of a method runs all rows with its defaults. ``minimum_ms`` is the time
to read the target's weights and the committed tokens' KV once, at the bandwidth measured in the
same run. The embedding does not count, because a round reads few of its rows.
"""

import argparse
import dataclasses
import functools
import itertools
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.table import Table

import jspec
from benchmarks.contests import XLA, kernels
from benchmarks.kernels import bandwidth
from jspec.api import config
from jspec.api.build import build_plan
from jspec.checkpoints import checkpoint, loading
from jspec.checkpoints.loading import LoadedModel
from jspec.core import kv_cache, trees
from jspec.core.types import Array, Params
from jspec.drafters.eagle import Eagle
from jspec.engine import memory
from jspec.engine.engine import Engine
from jspec.engine.pages import PAGE_SIZE, Pool, page_bytes
from jspec.engine.plan import Plan
from jspec.engine.programs import Programs
from jspec.engine.sequences import SequenceParams
from jspec.models import decoder
from jspec.models.blocks.attention import Attention
from jspec.models.blocks.mlp import GatedMlp
from jspec.models.decoder import DecoderConfig, Layer
from jspec.models.heads import eagle
from jspec.tools.bench import environment, files

SHAPES = {
    "Llama-3.1-8B": DecoderConfig(
        vocab_size=128256,
        hidden_size=4096,
        max_positions=131072,
        layers=(Layer(Attention(32, 8, head_dim=128), GatedMlp(14336)),) * 32,
    ),
    "tiny": DecoderConfig(
        vocab_size=512,
        hidden_size=64,
        max_positions=2048,
        layers=(Layer(Attention(4, 2, head_dim=16), GatedMlp(128)),) * 2,
    ),
}
_METHODS = ("none", "ngram", "eagle3")
_NUM_DRAFTED = 4
_SHORT = 8  # tokens of the run that is subtracted
_PASSES = 8  # passes in a timed program
_SLOT_MULTIPLE = 64  # slots of a cache: every kernel reads such blocks in place


def eagle3(target: LoadedModel) -> tuple[Plan, Params]:
    """Return a plan with an EAGLE-3 head of the published shape and random weights."""
    sizes, layers = target.config, target.config.num_layers
    draft_vocab = min(32000, sizes.vocab_size)
    head = eagle.EagleConfig(
        network=dataclasses.replace(sizes, layers=sizes.layers[:1], vocab_size=draft_vocab),
        generation=3,
        capture_layers=tuple(sorted({min(2, layers - 1), layers // 2, max(0, layers - 3)})),
        target_hidden_size=sizes.hidden_size,
        target_vocab_size=sizes.vocab_size,
        separate_head=True,
    )
    weights = eagle.init_params(jax.random.key(1), head, dtype=target.params.embedding.dtype)
    plan = Plan(target.target, Eagle(head, target.target, _NUM_DRAFTED))
    return plan, Params(target.params, weights)


def plan_of(target: LoadedModel, method: str) -> tuple[Plan, Params]:
    """Return the plan of a method and its weights."""
    if method == "eagle3":
        return eagle3(target)
    made = build_plan(target, config.read(config_of(method)))
    return made.plan, made.params


def config_of(method: str) -> dict | None:
    """Return the speculative_config of a method without weights."""
    return None if method == "none" else {"method": method, "num_speculative_tokens": _NUM_DRAFTED}


def engine_of(
    plan: Plan, params: Params, slots: int, capacity: int, size: int, shares: bool = False
) -> Engine:
    """Return an engine with pages of ``size`` tokens, as many as its slots can fill."""
    pool = None
    if size:
        count = slots * -(-capacity // size) + 1
        pool = Pool(
            plan,
            params,
            num_pages=count,
            page_size=size,
            enable_prefix_caching=shares,
        )
    return Engine(plan, params, num_slots=slots, capacity=capacity, pool=pool)


def prompts(count: int, length: int, most: int, seed: int = 0) -> list[tuple[int, ...]]:
    """Return random prompts of token ids below ``most``."""
    drawn = np.random.default_rng(seed).integers(100, most, (count, length))
    return [tuple(row) for row in drawn.tolist()]


def first_tokens(
    plan: Plan, params: Params, length: int, size: int, repeats: int
) -> dict[str, float]:
    """Return the seconds to the first token of new prompts and of cached ones."""
    engine = engine_of(plan, params, 2 * repeats + 4, length + 1, size, shares=True)
    seconds: dict[str, list[float]] = {"new": [], "cached": []}
    for seed in range(repeats + 1):
        for name in seconds:
            drawn = prompts(1, length, plan.target.vocab_size, seed)
            begin = time.perf_counter()
            engine.run([SequenceParams(each, 1) for each in drawn])
            seconds[name] += [time.perf_counter() - begin] if seed else []
    return {
        f"first_token_{name}": round(statistics.median(each), 4) for name, each in seconds.items()
    }


def seconds_of_round(run: Callable[[int], float], most: int) -> float:
    """Return the seconds of a round; ``run`` maps the tokens of an answer to its rounds."""
    taken, counts = [], []
    for tokens in (_SHORT, most):
        begin = time.perf_counter()
        counts.append(run(tokens))
        taken.append(time.perf_counter() - begin)
    return (taken[1] - taken[0]) / (counts[1] - counts[0])


def rounds_of_engine(engine: Engine, work: Sequence[SequenceParams], tokens: int) -> int:
    """Answer with so many tokens, every slot taken; return the rounds of the slowest row."""
    rows = [dataclasses.replace(each, max_tokens=tokens) for each in work]
    return max(answer.rounds for answer in engine.run(rows))


def rounds_of_llm(
    llm: jspec.LLM, drawn: Sequence[Sequence[int]], temperature: float, tokens: int
) -> float:
    """Answer with so many tokens; return the rounds of the slowest row."""
    params = jspec.SamplingParams(
        temperature=temperature,
        max_tokens=tokens,
        ignore_eos=True,
        detokenize=False,
    )
    outputs = llm.generate([{"prompt_token_ids": ids} for ids in drawn], params)
    slowest = min(each.speculative_decoding_stats["tokens_per_pass"] for each in outputs)
    return tokens / slowest


def minimumsize_of(target: LoadedModel, slots: int, context: int) -> int:
    """Return the bytes of the weights and of the live KV that a round reads at least."""
    plan, params = plan_of(target, "none")
    weights = target.params if target.params.head is None else target.params.replace(embedding=())
    kv = sum(page_bytes(plan, params, PAGE_SIZE, memory.dtype_of_pages(params))) // PAGE_SIZE
    return size_of(weights) + slots * context * kv


def row_of_llm(
    llm: jspec.LLM, method: str, slots: int, length: int, settings: argparse.Namespace, speed: float
) -> dict:
    """Measure so many sequences in an ``LLM``; ``speed`` is in bytes per second."""
    target = llm.build.model
    drawn = prompts(slots, length, target.config.vocab_size)
    run = functools.partial(rounds_of_llm, llm, drawn, settings.temperature)
    begin = time.perf_counter()
    for tokens in (settings.max_tokens, _SHORT):
        run(tokens)
    compiled = time.perf_counter() - begin
    times = [seconds_of_round(run, settings.max_tokens) for _ in range(settings.repeats)]
    context = length + settings.max_tokens // 2
    least = minimumsize_of(target, slots, context)
    return {
        "method": method,
        "page_size": PAGE_SIZE,
        "slots": slots,
        "context": context,
        "ms_per_round": round(1e3 * statistics.median(times), 3),
        "ms_least": round(1e3 * min(times), 3),
        "bytes_per_second": round(speed),
        "minimum_bytes": least,
        "minimum_ms": round(1e3 * least / speed, 3),
        "times_minimum": round(statistics.median(times) * speed / least, 3),
        "compile_seconds": round(compiled, 1),
    }


def row(
    target: LoadedModel,
    method: str,
    size: int,
    slots: int,
    length: int,
    settings: argparse.Namespace,
) -> dict:
    """Measure an engine whose pages have ``size`` tokens; 0 is contiguous caches."""
    plan, params = plan_of(target, method)
    capacity = length + settings.max_tokens
    engine = engine_of(plan, params, slots, capacity, size)
    options = dict(max_tokens=settings.max_tokens, temperature=settings.temperature)
    drawn = prompts(slots, length, target.config.vocab_size)
    work = [SequenceParams(each, seed=1, stream=at, **options) for at, each in enumerate(drawn)]
    begin = time.perf_counter()
    Programs(engine).compile(work)
    engine.run(work)
    compiled = time.perf_counter() - begin
    run = functools.partial(rounds_of_engine, engine, work)
    times = [seconds_of_round(run, settings.max_tokens) for _ in range(settings.repeats)]
    first = {}
    if size and method == "none":
        first = first_tokens(plan, params, length, size, settings.repeats)
    return {
        "method": method,
        "page_size": size,
        "slots": slots,
        "context": capacity,
        "ms_per_round": round(1e3 * statistics.median(times), 3),
        "ms_least": round(1e3 * min(times), 3),
        "compile_seconds": round(compiled, 1),
        **first,
    }


@functools.partial(jax.jit, static_argnames="config", donate_argnames="cache")
def _passes(
    config: DecoderConfig, params: Any, cache: kv_cache.KVCache, tokens: Array
) -> tuple[kv_cache.KVCache, Array]:
    """Run passes over a chain of nodes [B, N], each fed by the last; the prefix stays as it is."""
    nodes = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    none = jnp.zeros(len(tokens), jnp.int32)

    def body(_, carry):
        cache, tokens = carry
        tree = trees.chain_tree(*tokens.shape)
        out = decoder.forward(params, config, tokens, tree, cache)
        cache = kv_cache.append(cache, out.tree_kv, nodes, none)
        return cache, jnp.argmax(out.logits, -1).astype(jnp.int32)

    return jax.lax.fori_loop(0, _PASSES, body, (cache, tokens))


def pass_row(
    target: LoadedModel, attention: str, nodes: int, slots: int, length: int, repeats: int
) -> dict:
    """Time passes over ``nodes`` nodes a row, behind a prefix of ``length`` tokens."""
    config = dataclasses.replace(target.config, attention=attention)
    capacity = -(-(length + nodes) // _SLOT_MULTIPLE) * _SLOT_MULTIPLE
    cache = decoder.init_cache(config, slots, capacity)
    cache = cache.replace(length=jnp.full_like(cache.length, length))
    times = []
    for _ in range(repeats + 1):  # the first run compiles
        begin = time.perf_counter()
        tokens = jnp.ones((slots, nodes), jnp.int32)
        cache, _ = jax.block_until_ready(_passes(config, target.params, cache, tokens))
        times.append(1e3 * (time.perf_counter() - begin) / _PASSES)
    return {
        "attention": attention,
        "nodes": nodes,
        "slots": slots,
        "context": length,
        "ms_per_pass": round(statistics.median(times[1:]), 4),
        "ms_least": round(min(times[1:]), 4),
    }


def rows_of(target: LoadedModel, settings: argparse.Namespace) -> Iterator[dict]:
    """Measure passes over ``--nodes``, or rounds of an ``LLM`` or of engines."""
    lengths = settings.prompt_tokens
    if settings.nodes:
        for name, slots, length, nodes in itertools.product(
            settings.attention, settings.slots, lengths, settings.nodes
        ):
            yield pass_row(target, name, nodes, slots, length, settings.repeats)
        return
    if settings.llm:
        speed = bandwidth()
        llms = {name: jspec.LLM(target, config_of(name)) for name in settings.methods}
        for slots, name, length in itertools.product(settings.slots, llms, lengths):
            yield row_of_llm(llms[name], name, slots, length, settings, speed)
        return
    for slots, size, method, length in itertools.product(
        settings.slots, settings.page_sizes, settings.methods, lengths
    ):
        yield row(target, method, size, slots, length, settings)


def table(rows: Sequence[dict]) -> Table:
    """Return the rows as a table."""
    columns = list(dict.fromkeys(name for row in rows for name in row))
    shown = Table(*columns)
    for row in rows:
        shown.add_row(*(str(row.get(name, "")) for name in columns))
    return shown


def target_of(settings: argparse.Namespace, folder: str) -> LoadedModel:
    """Return the model of ``--target``, or one of the shape with random weights.

    ``folder`` gets the config.json of the shape.
    """
    if settings.target is not None:
        return loading.load(settings.target, settings.weights)
    shape = SHAPES[settings.shape]
    raw = checkpoint.hf_config(shape)
    Path(folder, "config.json").write_text(json.dumps(raw), encoding="utf-8")
    dtype = "float32" if jax.default_backend() == "cpu" else "bfloat16"
    shape = dataclasses.replace(shape, cache_dtype=dtype, activation_dtype=dtype)
    init = functools.partial(decoder.init_params, jax.random.key(0), dtype=settings.weights)
    count = settings.layers or shape.num_layers
    while True:
        shape = dataclasses.replace(shape, layers=shape.layers[:1] * count)
        is_small = 2 * size_of(jax.eval_shape(functools.partial(init, shape))) <= room()
        if is_small or not settings.fit or count == 1:
            return LoadedModel(folder, shape, jax.block_until_ready(init(shape)), raw)
        count -= 1


def size_of(tree: Any) -> int:
    """Return the bytes of the arrays of a pytree, which may be abstract."""
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def room() -> int:
    """Return the free bytes of the device, or the memory of the machine."""
    if stats := jax.local_devices()[0].memory_stats():
        return stats["bytes_limit"] - stats["bytes_in_use"]
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def main(words: Sequence[str] | None = None) -> None:
    """Measure, write the results after every engine, and print a table."""
    parser = argparse.ArgumentParser(description="milliseconds of an engine's round")
    on_cpu = jax.default_backend() == "cpu"
    parser.add_argument("--shape", choices=SHAPES, default="tiny" if on_cpu else "Llama-3.1-8B")
    parser.add_argument("--target", help="a model, instead of the shape")
    parser.add_argument("--layers", type=int, help="number of layers, instead of the shape's")
    parser.add_argument("--fit", action="store_true", help="fewer layers, in half of the memory")
    parser.add_argument("--weights", default="bfloat16", help="dtype")
    parser.add_argument("--nodes", type=int, nargs="*", default=[], help="of passes, not rounds")
    names = [XLA, *kernels()]
    parser.add_argument("--attention", nargs="+", default=names, help="back-ends of passes")
    parser.add_argument("--llm", action="store_true", help="LLM with its defaults, not engines")
    parser.add_argument("--methods", nargs="+", choices=_METHODS, default=_METHODS)
    parser.add_argument("--page-sizes", type=int, nargs="+", default=[0, 128], help="0: contiguous")
    parser.add_argument("--slots", type=int, nargs="+", default=[1, 8])
    lengths = [200 if on_cpu else 1000]
    parser.add_argument("--prompt-tokens", type=int, nargs="+", default=lengths)
    parser.add_argument("--max-tokens", type=int, default=72)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no row after")
    parser.add_argument("--out", type=Path)
    settings = parser.parse_args(words)
    if settings.llm and "eagle3" in settings.methods:
        parser.error("--llm has no head of random weights; add --methods none ngram.")
    with tempfile.TemporaryDirectory() as folder:
        measure(target_of(settings, folder), settings)


def measure(target: LoadedModel, settings: argparse.Namespace) -> None:
    """Measure every row that begins in time."""
    end = time.monotonic() + settings.seconds
    facts = {
        "shape": settings.shape if settings.target is None else str(target.path),
        "layers": target.config.num_layers,
        "weights": settings.weights,
        "weight_bytes": size_of(target.params),
    }
    results = environment.describe("benchmarks.rounds") | facts | {"rows": []}
    for measured in rows_of(target, settings):
        results["rows"].append(measured)
        print(measured, flush=True)
        if settings.out is not None:
            files.write_json(results, settings.out)
        if time.monotonic() > end:
            break
    Console(width=160).print(table(results["rows"]))


if __name__ == "__main__":
    main()

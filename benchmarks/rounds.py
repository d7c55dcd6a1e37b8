"""Milliseconds of an engine's round, of each method, with and without pages.

    python -m benchmarks.rounds [--shape Llama-3.1-8B] [--layers N] [--out FILE.json]
    python -m benchmarks.rounds --target MODEL --methods none ngram [--out FILE.json]

Without ``--target``, weights of the shape are random, so the target accepts hardly any draft. The
time of a round relative to one without a draft is the acceptance length from which on a method
saves time. A round's time is the difference of two runs of different length, so prefills do not
count. Plain decoding over pages also has the seconds to the first token, of a new prompt and of a
cached one.
"""

import argparse
import dataclasses
import itertools
import statistics
import time
from collections.abc import Sequence
from pathlib import Path

import jax
import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks import verify_cost
from jspec.api import config
from jspec.api.build import build_plan
from jspec.checkpoints import loading
from jspec.checkpoints.loading import LoadedModel
from jspec.core.types import Params
from jspec.drafters.eagle import Eagle
from jspec.engine.engine import Engine
from jspec.engine.pages import Pool
from jspec.engine.plan import Plan
from jspec.engine.programs import Programs
from jspec.engine.sequences import SequenceParams
from jspec.models.heads import eagle
from jspec.tools.bench import environment, files

_METHODS = ("none", "ngram", "eagle3")
_NUM_DRAFTED = 4
_SHORT = 8  # tokens of the run that is subtracted


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
    asked = {"method": method, "num_speculative_tokens": _NUM_DRAFTED} if method != "none" else None
    made = build_plan(target, config.read(asked))
    return made.plan, made.params


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


def seconds_of_round(engine: Engine, work: Sequence[SequenceParams]) -> float:
    """Return the seconds of a round while every slot is taken."""
    taken, counts = [], []
    for tokens in (_SHORT, None):
        rows = [dataclasses.replace(each, max_tokens=tokens or each.max_tokens) for each in work]
        begin = time.perf_counter()
        answers = engine.run(rows)
        taken.append(time.perf_counter() - begin)
        counts.append(max(answer.rounds for answer in answers))
    return (taken[1] - taken[0]) / (counts[1] - counts[0])


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
    times = [seconds_of_round(engine, work) for _ in range(settings.repeats)]
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


def table(rows: Sequence[dict]) -> Table:
    """Return the rows as a table."""
    columns = list(dict.fromkeys(name for row in rows for name in row))
    shown = Table(*columns)
    for row in rows:
        shown.add_row(*(str(row.get(name, "")) for name in columns))
    return shown


def target_of(settings: argparse.Namespace) -> LoadedModel:
    """Return the model of ``--target``, or one of the shape with random weights."""
    if settings.target is not None:
        return loading.load(settings.target, settings.weights)
    shape = verify_cost.config_of(settings)
    params = jax.block_until_ready(verify_cost.weights_of(shape, settings.weights)())
    return LoadedModel(settings.shape, shape, params, {})


def main(words: Sequence[str] | None = None) -> None:
    """Measure, write the results after every engine, and print a table."""
    parser = argparse.ArgumentParser(description="milliseconds of an engine's round")
    on_cpu = jax.default_backend() == "cpu"
    shapes = verify_cost.CONFIGS
    parser.add_argument("--shape", choices=shapes, default="tiny" if on_cpu else "Llama-3.1-8B")
    parser.add_argument("--target", help="a model, instead of the shape")
    parser.add_argument("--layers", type=int, help="number of layers, instead of the shape's")
    parser.add_argument("--weights", default="bfloat16", help="dtype")
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
    end = time.monotonic() + settings.seconds
    target = target_of(settings)
    facts = {
        "shape": settings.shape if settings.target is None else str(target.path),
        "layers": target.config.num_layers,
        "weights": settings.weights,
        "weight_bytes": verify_cost.size(target.params),
    }
    results = environment.describe("benchmarks.rounds") | facts | {"rows": []}
    combinations = itertools.product(
        settings.slots,
        settings.page_sizes,
        settings.methods,
        settings.prompt_tokens,
    )
    for slots, size, method, length in combinations:
        if time.monotonic() > end:
            break
        results["rows"].append(row(target, method, size, slots, length, settings))
        print(results["rows"][-1], flush=True)
        if settings.out is not None:
            files.write_json(results, settings.out)
    Console(width=160).print(table(results["rows"]))


if __name__ == "__main__":
    main()

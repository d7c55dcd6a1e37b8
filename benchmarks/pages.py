"""Caches of pages against contiguous ones, and prompts whose beginning is cached against new ones.

    python -m benchmarks.pages [--target MODEL] [--methods none ngram] [--out FILE.json]

A round's milliseconds are those of an engine whose slots are all taken by sequences of one length,
prefill included. The contenders take turns; a run before the first turn compiles. Then prompts of
``--prompt-tokens`` run to their first token, each with another beginning (cold) or again (warm).
"""

import argparse
import statistics
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

import jspec
from jspec.api import config
from jspec.api.build import Build, build_plan
from jspec.checkpoints import loading
from jspec.core.types import Params
from jspec.engine import programs
from jspec.engine.engine import Engine
from jspec.engine.pages import Pool
from jspec.engine.plan import Plan
from jspec.engine.sequences import SequenceParams
from jspec.tools.bench import environment, files

_DEMO = Path(jspec.__file__).with_name("assets") / "demo"
_METHODS = {"none": None, "ngram": {"method": "ngram", "num_speculative_tokens": 4}}
_SIZES = (0, 64, 128)  # tokens of a page; 0 is contiguous


def engine_of(
    plan: Plan, params: Params, slots: int, capacity: int, size: int, shares: bool = False
) -> Engine:
    """Return an engine with pages of ``size`` tokens, as many as its slots can fill."""
    pool = None
    if size:
        count = slots * -(-capacity // size) + 1
        options = dict(num_pages=count, page_size=size, enable_prefix_caching=shares)
        pool = Pool(plan, params, **options)
    options = dict(num_slots=slots, capacity=capacity, pool=pool)
    return Engine(plan, params, **options)


def prompts(count: int, length: int, seed: int = 0, most: int = 4000) -> list[tuple[int, ...]]:
    """Return random prompts of token ids below ``most``."""
    drawn = np.random.default_rng(seed).integers(100, most, (count, length))
    return [tuple(row) for row in drawn.tolist()]


def rounds(made: Build, slots: int, length: int, tokens: int, repeats: int) -> list[dict]:
    """Return the milliseconds of a round for each size of pages."""
    work = [SequenceParams(each, tokens) for each in prompts(slots, length)]
    engines = {
        size: engine_of(made.plan, made.params, slots, length + tokens, size) for size in _SIZES
    }
    seconds: dict[int, list[float]] = {size: [] for size in _SIZES}
    for turn in range(repeats + 1):
        for size, engine in engines.items():
            begin = time.perf_counter()
            answers = engine.run(work)
            seconds[size] += [time.perf_counter() - begin] if turn else []
    count = max(answer.rounds for answer in answers)
    ratios = {
        size: statistics.median(a / b for a, b in zip(each, seconds[0], strict=True))
        for size, each in seconds.items()
    }
    return [
        {
            "slots": slots,
            "context": length + tokens,
            "page_size": size,
            "ms_per_round": round(1e3 * statistics.median(each) / count, 3),
            "ratio_to_contiguous": round(ratios[size], 3),
        }
        for size, each in seconds.items()
    ]


def first_tokens(made: Build, length: int, repeats: int) -> dict:
    """Return the seconds to the first token of new prompts and of cached ones."""
    engine = engine_of(made.plan, made.params, 2 * repeats + 4, length + 1, 64, shares=True)
    seconds: dict[str, list[float]] = {"cold": [], "warm": []}
    for seed in range(repeats + 1):
        for name in seconds:
            work = [SequenceParams(each, 1) for each in prompts(1, length, seed)]
            begin = time.perf_counter()
            engine.run(work)
            seconds[name] += [time.perf_counter() - begin] if seed else []
    cold, warm = (statistics.median(each) for each in seconds.values())
    return {"prompt_tokens": length, "cold_seconds": round(cold, 4), "warm_seconds": round(warm, 4)}


def table(rows: Sequence[dict]) -> Table:
    """Return rows of one form as a table."""
    shown = Table(*rows[0])
    for row in rows:
        shown.add_row(*map(str, row.values()))
    return shown


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description="pages against contiguous caches")
    parser.add_argument("--target", default=str(_DEMO / "target"))
    parser.add_argument("--methods", nargs="+", choices=_METHODS, default=["none", "ngram"])
    parser.add_argument("--slots", type=int, nargs="+", default=[1, 4, 8])
    parser.add_argument("--prompt-tokens", type=int, nargs="+", default=[150, 700])
    parser.add_argument("--max-tokens", type=int, default=100)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", type=Path, default=None)
    arguments = parser.parse_args()
    programs.keep_compiled_programs()
    target = loading.load(arguments.target, arguments.dtype)
    results = environment.describe() | {"rounds": [], "first_tokens": []}
    console = Console()

    def add(name: str, *rows: dict) -> None:
        results[name] += rows
        for row in rows:
            print(row, flush=True)
        if arguments.out is not None:
            files.write_json(results, arguments.out)

    for method in arguments.methods:
        made = build_plan(target, config.read(_METHODS[method]), dtype=arguments.dtype)
        for length in arguments.prompt_tokens:
            for slots in arguments.slots:
                measured = rounds(made, slots, length, arguments.max_tokens, arguments.repeats)
                add("rounds", *({"method": method} | row for row in measured))
            if method == arguments.methods[0]:
                add("first_tokens", first_tokens(made, length, arguments.repeats))
    for rows in (results["rounds"], results["first_tokens"]):
        console.print(table(rows))


if __name__ == "__main__":
    main()

"""Slots that sequences join and leave, against groups that start and end together.

    python -m benchmarks.engine [--target DIR] [--methods none ngram eagle3] [--out FILE.json]

All requests have unlike prompts and lengths. At rate 0 they are there at once, and groups are of
similar lengths. At other rates they arrive at random (Poisson), and a group is whoever waits when
the group before it has ended. Contenders take turns; a run before the first turn compiles.
"""

import argparse
import collections
import dataclasses
import functools
import json
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

import jspec
from jspec.api import config
from jspec.api.build import build_plan
from jspec.checkpoints import loading
from jspec.core.types import Params
from jspec.engine import programs
from jspec.engine.engine import Engine
from jspec.engine.functional import advance, start
from jspec.engine.loop import init_shared
from jspec.engine.pages import PAGE_SIZE, Pool
from jspec.engine.plan import Plan
from jspec.engine.sequences import SequenceParams
from jspec.tools.bench import environment

_RESULTS = Path(__file__).with_name("results")
_DEMO = Path(jspec.__file__).with_name("assets") / "demo"
_METHODS = {
    "none": None,
    "ngram": {
        "method": "ngram",
        "num_speculative_tokens": 5,
        "prompt_lookup_min": 2,
        "prompt_lookup_max": 4,
    },
    # The models are folders in --heads.
    "eagle3": {"method": "eagle3", "num_speculative_tokens": 5, "model": "eagle3"},
    "draft_model": {"method": "draft_model", "num_speculative_tokens": 5, "model": "draft"},
}
_ROUNDS = 8  # of a launch: an answer is read every few tokens, as a server does


@dataclasses.dataclass(frozen=True)
class Arrival:
    """A sequence, and the second at which it arrives."""

    sequence: SequenceParams
    second: float


@dataclasses.dataclass
class Run:
    """The seconds of a run, and from the arrival of each sequence to its end."""

    seconds: float
    latencies: list[float]
    num_tokens: int


def arrivals(ids: Sequence[int], count: int, rate: float, temperature: float) -> list[Arrival]:
    """Return requests with prompts of 20 to 200 and answers of 8 to 192 tokens."""
    random, now, result = np.random.default_rng(3), 0.0, []
    for stream in range(count):
        length, begin = random.integers(20, 200), random.integers(0, 200)
        tokens = int(np.clip(random.geometric(1 / 64), 8, 192))
        now += random.exponential(1 / rate) if rate else 0.0
        prompt = tuple(ids[begin : begin + length])
        sequence = SequenceParams(prompt, tokens, temperature=temperature, seed=7, stream=stream)
        result.append(Arrival(sequence, now))
    return result


def in_groups(plan: Plan, params: Params, work: Sequence[Arrival], size: int) -> Run:
    """Run whoever waits, up to ``size`` sequences at a time; by length if all wait at once."""
    length = lambda each: len(each.sequence.prompt) + each.sequence.max_tokens
    todo = collections.deque(work if work[-1].second else sorted(work, key=length))
    waiting, latencies, tokens = collections.deque(), [], 0
    begin = time.perf_counter()
    while todo or waiting:
        while todo and todo[0].second <= time.perf_counter() - begin:
            waiting.append(todo.popleft())
        if not waiting:
            time.sleep(max(0.0, todo[0].second - (time.perf_counter() - begin)))
            continue
        group = [waiting.popleft() for _ in range(min(size, len(waiting)))]
        batch = start(plan, params, [each.sequence for each in group])
        batch = advance(plan, params, batch.replace(shared=init_shared(plan)))
        end = time.perf_counter() - begin
        latencies += [end - each.second for each in group]
        tokens += sum(len(answer.tokens) for answer in batch.answers)
    return Run(time.perf_counter() - begin, latencies, tokens)


def in_slots(
    plan: Plan, params: Params, work: Sequence[Arrival], size: int, *, pages: bool = False
) -> Run:
    """Run the sequences in an engine with ``size`` slots, with contiguous caches or pages."""
    longest = max(len(each.sequence.prompt) + each.sequence.max_tokens for each in work)
    pool = None
    if pages:
        pool = Pool(plan, params, num_pages=size * -(-longest // PAGE_SIZE) + 1)
    engine = Engine(plan, params, num_slots=size, capacity=longest, pool=pool)
    todo, running, latencies, tokens = collections.deque(work), {}, [], 0
    begin = time.perf_counter()
    while todo or running:
        now = time.perf_counter() - begin
        while todo and todo[0].second <= now:
            each = todo.popleft()
            running[engine.submit(each.sequence, rounds=_ROUNDS)] = each.second
        if not running:
            time.sleep(max(0.0, todo[0].second - now))
            continue
        engine.step()
        for ticket in [ticket for ticket in running if ticket.finished]:
            latencies.append(time.perf_counter() - begin - running.pop(ticket))
            tokens += len(ticket.answer.tokens)
    return Run(time.perf_counter() - begin, latencies, tokens)


def measure(
    arguments: argparse.Namespace, method: str, rate: float, ids: Sequence[int]
) -> list[dict]:
    """Return a row for groups, for slots, and for slots over pages."""
    target = loading.load(arguments.target, arguments.dtype)
    asked = _METHODS[method]
    if asked and "model" in asked:
        asked = asked | {"model": str(arguments.heads / asked["model"])}
    made = build_plan(target, config.read(asked), dtype=arguments.dtype)
    work = arrivals(ids, arguments.requests, rate, arguments.temperature)
    kinds: dict[str, Callable] = {"groups": in_groups, "slots": in_slots}
    kinds["pages"] = functools.partial(in_slots, pages=True)
    runs: dict[str, list[Run]] = {name: [] for name in kinds}
    for turn in range(arguments.repeats + 1):
        for name, run in kinds.items():
            result = run(made.plan, made.params, work, arguments.slots)
            runs[name] += [result] if turn else []
    median = lambda values: round(statistics.median(values), 4)
    return [
        {
            "method": method,
            "rate": rate,
            "contender": name,
            "tokens_per_second": median(run.num_tokens / run.seconds for run in results),
            "mean_latency": median(statistics.mean(run.latencies) for run in results),
            "p95_latency": median(float(np.percentile(run.latencies, 95)) for run in results),
            "ratio_to_groups": median(
                (run.num_tokens / run.seconds) / (other.num_tokens / other.seconds)
                for run, other in zip(results, runs["groups"], strict=True)
            ),
            "latency_ratio_to_groups": median(
                statistics.mean(run.latencies) / statistics.mean(other.latencies)
                for run, other in zip(results, runs["groups"], strict=True)
            ),
        }
        for name, results in runs.items()
    ]


def table(rows: Sequence[dict]) -> Table:
    """Return the rows as a table; rate 0 is all requests at once."""
    shown = Table()
    columns = ("method", "rate", "contender", "tokens/s", "x groups", "mean s", "p95 s", "x groups")
    for index, name in enumerate(columns):
        shown.add_column(name, justify="left" if index in (0, 2) else "right")
    for row in rows:
        shown.add_row(
            row["method"],
            f"{row['rate']:g}",
            row["contender"],
            f"{row['tokens_per_second']:.0f}",
            f"{row['ratio_to_groups']:.2f}",
            f"{row['mean_latency']:.2f}",
            f"{row['p95_latency']:.2f}",
            f"{row['latency_ratio_to_groups']:.2f}",
        )
    return shown


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description="slots against groups")
    parser.add_argument("--target", type=Path, default=_DEMO / "target")
    parser.add_argument("--heads", type=Path, default=_DEMO, help="folder with draft/ and eagle3/")
    parser.add_argument(
        "--methods", nargs="+", choices=_METHODS, default=["none", "ngram", "eagle3"]
    )
    parser.add_argument("--rates", type=float, nargs="+", default=[0, 12, 20], help="per second")
    parser.add_argument("--requests", type=int, default=48)
    parser.add_argument("--slots", type=int, default=8)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument(
        "--out", type=Path, default=Path(__file__).with_name("results") / "engine.json"
    )
    arguments = parser.parse_args()
    programs.keep_compiled_programs()
    text = (_DEMO / "prompt.txt").read_text(encoding="utf-8")
    ids = (loading.load(arguments.target, arguments.dtype).tokenizer.encode(text) * 8)[:500]
    results = environment.describe() | {"rows": []}
    console = Console()
    for method in arguments.methods:
        for rate in arguments.rates:
            results["rows"] += measure(arguments, method, rate, ids)
            console.print(table(results["rows"][-3:]))
            arguments.out.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    console.print(table(results["rows"]))


if __name__ == "__main__":
    main()

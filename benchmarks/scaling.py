"""Weak scaling of replicas under Ray: each replica more has as many requests more.

    pip install ray
    python -m benchmarks.scaling [--replicas 2] [--out FILE.json]

A replica is an actor with an ``LLM`` of the embedded model, on cores of its own. Each gets the same
number of prompts, first one replica alone and then all at once, in turns. Efficiency is the time of
one relative to that of all: 1 if replicas do not disturb each other.

The machine itself allows less, because cores share memory and clock. ``machine`` is the same
efficiency for processes that only multiply matrices, without jspec and Ray's calls. One replica on
the cores of all is measured too: it is what replicas compete with on one machine. A turn in which
other processes used more than a tenth of a core is noisy, and is counted as such.
"""

import argparse
import os
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

import jspec
from jspec.tools.bench import environment, files, timing
from jspec.tools.bench.timing import Contender, Sample

_TARGET = str(Path(jspec.__file__).with_name("assets") / "demo" / "target")
_DRAFTS = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 3}
_WIDTH, _PRODUCTS = 768, 30  # size and number of the products that measure the machine


class Replica:
    """An actor with an ``LLM`` on given cores."""

    def __init__(self, cores: Sequence[int]):
        os.sched_setaffinity(0, cores)  # before JAX counts them for its threads
        self._llm = jspec.LLM(_TARGET, _DRAFTS, max_num_seqs=8)

    def generate(self, count: int, tokens: int, seed: int) -> tuple[float, list[list[int]]]:
        """Answer so many prompts; return the seconds of processors and the answers."""
        begin = time.process_time()
        prompts = [f"def function_{seed}_{index}(x):\n    return" for index in range(count)]
        params = jspec.SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
        outputs = self._llm.generate(prompts, params)
        answers = [list(output.outputs[0].token_ids) for output in outputs]
        return time.process_time() - begin, answers


class Multiplier:
    """An actor that multiplies matrices on given cores."""

    def __init__(self, cores: Sequence[int]):
        os.sched_setaffinity(0, cores)
        self._matrix = np.random.default_rng(0).standard_normal((_WIDTH, _WIDTH), np.float32)

    def generate(self, count: int, tokens: int, seed: int) -> tuple[float, list[list[int]]]:
        """Multiply; the arguments are those of a replica. Return as a replica does."""
        begin = time.process_time()
        for _ in range(_PRODUCTS):
            self._matrix @ self._matrix
        return time.process_time() - begin, [[0] * _PRODUCTS]


def shares(cores: Sequence[int], replicas: int) -> list[list[int]]:
    """Return the cores of each replica, as many for each.

    Raises:
      ValueError: there are fewer cores than replicas.
    """
    each = len(cores) // replicas
    if not each:
        raise ValueError(
            f"replicas={replicas} must be at most the {len(cores)} cores; take fewer --replicas."
        )
    return [list(cores[at * each : (at + 1) * each]) for at in range(replicas)]


def contenders(
    start: Callable[[type, list[int]], Callable[..., Any]],
    wait: Callable[[list[Any]], list[Any]],
    cores: Sequence[int],
    settings: argparse.Namespace,
) -> dict[str, Contender]:
    """Return the contenders by name.

    Args:
      start: starts an actor of a class on cores; returns the function that calls it at once.
      wait: maps calls to their results.
      cores: of the machine.
      settings: of the command line.
    """
    parts = shares(cores, settings.replicas)
    replicas = [start(Replica, part) for part in parts]
    multipliers = [start(Multiplier, part) for part in parts]
    whole = start(Replica, [core for part in parts for core in part])
    turns = dict.fromkeys(("one", "all", "whole", "machine, one", "machine, all"), 0)

    def run(name: str, actors: list[Callable[..., Any]], count: int) -> Sample:
        turns[name] += 1
        begin = time.perf_counter()
        results = wait([call(count, settings.max_tokens, turns[name]) for call in actors])
        seconds = time.perf_counter() - begin
        tokens = [answer for _, answers in results for answer in answers]
        return Sample(seconds, sum(cpu for cpu, _ in results), tokens)

    count, every = settings.prompts, settings.replicas
    works = {
        "one": (replicas[:1], count),
        "all": (replicas, count),
        "whole": ([whole], count * every),
        "machine, one": (multipliers[:1], count),
        "machine, all": (multipliers, count),
    }
    made = {}
    for name, (actors, each) in works.items():
        made[name] = Contender(name, lambda name=name, a=actors, each=each: run(name, a, each))
        made[name].run()  # compiles
    return made


def summary(made: dict[str, Contender], replicas: int) -> dict[str, Any]:
    """Return the figures of all contenders and the efficiencies turn by turn."""
    efficiency = lambda one, every: {
        name: round(value / replicas, 3)
        for name, value in timing.spread(timing.ratios(made[every], made[one])).items()
    }
    return {
        "replicas": replicas,
        "tokens_per_second": {
            name: round(made[name].median, 1) for name in ("one", "all", "whole")
        },
        "efficiency": efficiency("one", "all"),
        "machine": efficiency("machine, one", "machine, all"),
        "all_by_whole": round(statistics.median(timing.ratios(made["all"], made["whole"])), 3),
        "noisy_turns": sum(
            not sample.quiet(each.limit) for each in made.values() for sample in each.samples
        ),
        "turns": sum(len(each.samples) for each in made.values()),
        "contenders": [each.summary() for each in made.values()],
    }


def table(results: dict[str, Any]) -> Table:
    """Return the results as a table."""
    noise = f"{results['noisy_turns']} of {results['turns']} turns noisy"
    shown = Table(
        "figure", "value", title=f"{results['replicas']} replicas, {noise}", title_justify="left"
    )
    speeds = results["tokens_per_second"]
    shown.add_row("one replica, tokens/s", f"{speeds['one']:.0f}")
    shown.add_row("all replicas, tokens/s", f"{speeds['all']:.0f}")
    shown.add_row("one on the cores of all, tokens/s", f"{speeds['whole']:.0f}")
    for name, words in (("efficiency", "efficiency"), ("machine", "the machine allows")):
        median, least, most = results[name].values()
        shown.add_row(words, f"{median:.2f} ({least:.2f} to {most:.2f})")
    return shown


def main(words: Sequence[str] | None = None) -> None:
    """Measure, print a table, and write the results."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.scaling", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--prompts", type=int, default=8, help="of each replica")
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--patience", type=int, default=5, help="turns more in place of noisy ones")
    parser.add_argument("--out", type=Path)
    settings = parser.parse_args(words)
    cores = sorted(os.sched_getaffinity(0))
    try:
        shares(cores, settings.replicas)
    except ValueError as error:
        parser.error(str(error))
    try:
        import ray
    except ImportError:
        raise SystemExit("benchmarks.scaling needs Ray: pip install ray") from None

    def start(kind: type, share: list[int]) -> Callable[..., Any]:
        # Cores are shared between contenders, which take turns, so Ray counts none.
        return ray.remote(kind).options(num_cpus=0).remote(share).generate.remote

    ray.init(include_dashboard=False, log_to_driver=False)
    try:
        made = contenders(start, ray.get, cores, settings)
        timing.race(list(made.values()), settings.repeats, settings.patience)
    finally:
        ray.shutdown()
    results = environment.describe("benchmarks.scaling") | {"ray": ray.__version__}
    results |= summary(made, settings.replicas)
    if settings.out is not None:
        files.write_json(results, settings.out)
    Console().print(table(results))


if __name__ == "__main__":
    main()

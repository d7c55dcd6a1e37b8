"""The best two and plain decoding, run in turns: what was predicted beside what is."""

import dataclasses
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jspec.api.llm import LLM
from jspec.tools.bench.contenders import Ours
from jspec.tools.bench.names import portable
from jspec.tools.bench.timing import Contender, race, ratios, spread
from jspec.tools.tune.clocks import Clock, median_seconds
from jspec.tools.tune.families import Family
from jspec.tools.tune.requests import Workload
from jspec.tools.tune.search import Entry
from jspec.tools.tune.settings import Settings


@dataclasses.dataclass(frozen=True, eq=False)
class Race:
    """What was run in turns.

    Attributes:
      field: of the entries, in their order, with the samples that count.
      seconds: median of each clock.
      turns: how many there were.
      quiet_turns: those during which no other process was busy.
      interrupted: whether Ctrl-C ended it early.
    """

    field: Sequence[Contender]
    seconds: Sequence[float]
    turns: int
    quiet_turns: int
    interrupted: bool


def run_in_turns(
    entries: Sequence[Entry],
    families: Sequence[Family],
    work: Workload,
    settings: Settings,
    clocks: Sequence[Clock],
    on_step: Callable[[str], None],
) -> Race:
    """Runs all prompts with each of the entries, and in the same turns the clocks.

    Ctrl-C ends the race early; without a sample of everyone it is passed on.
    """
    field: list[Contender] = []
    timed = [Contender(f"clock {index}", clock) for index, clock in enumerate(clocks)]
    for entry in entries:
        on_step(f"{work.case.words}: compiling {entry.candidate.name}")
        run = _served(entry, families, work)
        run()
        field.append(Contender(entry.candidate.name, run))
    on_step(f"{work.case.words}: running the best two in turns")
    interrupted = False
    try:
        race([*field, *timed], settings.repeats, settings.patience)
    except KeyboardInterrupt:
        if not all(each.samples for each in (*field, *timed)):
            raise
        interrupted = True
    return _race_of(field, timed, interrupted)


def _race_of(field: Sequence[Contender], timed: Sequence[Contender], interrupted: bool) -> Race:
    """What the undisturbed turns say, or all where there is none: the same ones for everybody."""
    turns = list(zip(*(each.samples for each in (*field, *timed)), strict=False))
    quiet = [turn for turn in turns if all(sample.quiet(field[0].limit) for sample in turn)]
    columns = [list(samples) for samples in zip(*(quiet or turns), strict=True)]
    chosen = [
        dataclasses.replace(each, samples=samples, limit=math.inf)
        for each, samples in zip((*field, *timed), columns, strict=True)
    ]
    seconds = [median_seconds(each) for each in chosen[len(field) :]]
    return Race(chosen[: len(field)], seconds, len(turns), len(quiet), interrupted)


def rows_of(
    entries: Sequence[Entry],
    ran: Race,
    predicted: Callable[[Entry], float],
    configs: Sequence[Mapping[str, Any]],
) -> list[dict[str, Any]]:
    """A row for each entry, the fastest first; ``configs`` are all that were given."""
    pairs = list(zip(entries, ran.field, strict=True))
    plain, own = next((entry, each) for entry, each in pairs if entry.candidate.family == 0)
    rows = [_row(entry, each, own, predicted(entry)) for entry, each in pairs]
    for row in rows:
        row["config"] = portable(row["speculative_config"], configs)
        row["predicted_speedup"] = row["predicted_tokens_per_second"] / predicted(plain)
    return sorted(rows, key=lambda row: -row["tokens_per_second"]["median"])


def _served(entry: Entry, families: Sequence[Family], work: Workload) -> Ours:
    """The entry through the front door."""
    family = families[entry.candidate.family]
    llm = LLM(
        family.target,
        family.runnable(entry.candidate.config),
        dtype=family.dtype,
        max_num_seqs=work.case.batch_size,
    )
    return Ours(llm, work.case, {"all": work.requests})


def _row(entry: Entry, each: Contender, plain: Contender, predicted: float) -> dict[str, Any]:
    speeds = [sample.num_tokens / sample.seconds for sample in each.kept]
    passes = [sample.num_tokens / sample.passes for sample in each.kept]
    return {
        "name": each.name,
        "speculative_config": dict(entry.candidate.config),
        "tokens_per_second": spread(speeds),
        "speedup": spread(ratios(each, plain)),
        "acceptance_length": statistics.median(passes),
        "predicted_tokens_per_second": predicted,
        "predicted_acceptance_length": entry.passes.tokens_per_pass,
        "error": predicted / statistics.median(speeds) - 1,
        "seconds": [sample.seconds for sample in each.samples],
    }

"""The verification: the best candidates and plain decoding, run in turns."""

import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jspec.api.llm import LLM
from jspec.tools.bench.contenders import Ours
from jspec.tools.bench.names import portable
from jspec.tools.bench.timing import Contender, race, ratios, spread
from jspec.tools.tune.families import Candidate, Family
from jspec.tools.tune.search import Search
from jspec.tools.tune.settings import Settings
from jspec.tools.tune.workload import Workload


def run_in_turns(
    candidates: Sequence[Candidate],
    families: Sequence[Family],
    work: Workload,
    settings: Settings,
    on_step: Callable[[str], None],
) -> tuple[list[Contender], bool]:
    """Run all prompts with each candidate; return their samples, and whether Ctrl-C ended it early.

    Raises:
      KeyboardInterrupt: some candidate has no sample yet.
    """
    field = []
    for candidate in candidates:
        on_step(f"{work.case.title}: compiling {candidate.name}")
        run = _contender(candidate, families[candidate.family], work)
        run()
        field.append(Contender(candidate.name, run))
    on_step(f"{work.case.title}: running the best two in turns")
    try:
        race(field, settings.repeats, settings.patience)
    except KeyboardInterrupt:
        if not all(each.samples for each in field):
            raise
        return field, True
    return field, False


def rows_of(
    candidates: Sequence[Candidate],
    field: Sequence[Contender],
    search: Search,
    configs: Sequence[Mapping[str, Any]],
) -> list[dict[str, Any]]:
    """Return a row for each candidate, the fastest first; ``configs`` are all that were given."""
    plain = field[candidates.index(search.plain)]
    plain_speed = search.prediction(search.plain)["predicted_tokens_per_second"]
    rows = []
    for candidate, each in zip(candidates, field, strict=True):
        predicted = search.prediction(candidate)
        speed = predicted["predicted_tokens_per_second"]
        lengths = [sample.num_tokens / sample.passes for sample in each.usable]
        row = {
            "name": candidate.name,
            "speculative_config": dict(candidate.config),
            "config": portable(candidate.config, configs),
            "tokens_per_second": spread(each.speeds),
            "speedup": spread(ratios(each, plain)),
            "acceptance_length": statistics.median(lengths),
            "predicted_speedup": speed / plain_speed,
            "error": speed / each.median - 1,
            "seconds": [sample.seconds for sample in each.samples],
        }
        rows.append(row | predicted)
    return sorted(rows, key=lambda row: -row["tokens_per_second"]["median"])


def quiet_turns(field: Sequence[Contender]) -> tuple[int, int]:
    """Return the number of turns, and of those in which no sample was disturbed."""
    turns = list(zip(*(each.samples for each in field), strict=False))
    quiet = [all(sample.quiet(field[0].limit) for sample in turn) for turn in turns]
    return len(turns), sum(quiet)


def _contender(candidate: Candidate, family: Family, work: Workload) -> Ours:
    """Return the candidate as an ``LLM`` that runs all prompts."""
    llm = LLM(
        family.target,
        {**candidate.config, **family.opened},
        dtype=family.dtype,
        max_num_seqs=work.case.batch_size,
    )
    return Ours(llm, work.case, {"all": work.requests})

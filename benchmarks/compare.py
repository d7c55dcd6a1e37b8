"""One case of ``benchmarks.latency``: contenders, speeds and equality of texts."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from benchmarks.contenders import Ours, Theirs
from benchmarks.workload import Case
from jspec.tools.bench.timing import Contender, Sample, race


@dataclasses.dataclass(frozen=True)
class Setting:
    """The settings that all cases share.

    Attributes:
      prompts: token ids.
      max_new_tokens: of every row.
      repeats: quiet samples of each contender.
      patience: further rounds to wait for quiet samples.
      limit: cores that others may use during a quiet sample.
      seed: of sampling.
    """

    prompts: list[list[int]]
    max_new_tokens: int
    repeats: int
    patience: int
    limit: float
    seed: int = 0


@dataclasses.dataclass(frozen=True)
class Reference:
    """Plain greedy text at batch 1, by jspec and by transformers."""

    ours: list[list[int]]
    theirs: list[list[int]]


def autoregression(case: Case) -> Case:
    """Return the case without speculation."""
    return dataclasses.replace(case, method="autoregressive", num_speculative_tokens=0)


def references(ours: Ours, theirs: Theirs, setting: Setting, dtype: str) -> Reference:
    """Run plain greedy generation on both sides."""
    case = Case("autoregressive", 1, 0.0, dtype, 0)
    limits = setting.prompts, setting.max_new_tokens, setting.seed
    return Reference(
        ours.generate(case, *limits).tokens, theirs.generate(case, "eager", 1, *limits).tokens
    )


def run_case(
    case: Case, ours: Ours, theirs: Theirs | None, setting: Setting, reference: Reference | None
) -> dict[str, Any]:
    """Race jspec against its own plain decoding and the peer's modes; return a row."""
    limits = setting.prompts, setting.max_new_tokens, setting.seed
    plain = autoregression(case)
    racers = {"jspec": lambda: ours.generate(case, *limits)}
    if plain != case:
        racers["jspec autoregressive"] = lambda: ours.generate(plain, *limits)
    modes = case.peer_modes if theirs else ()
    for mode in modes:
        for threads in theirs.threads:
            racers[f"{mode}/{threads}"] = _bind(theirs, case, mode, threads, limits)
    warm = {name: _warm_up(run) for name, run in racers.items()}
    field = [Contender(name, run, limit=setting.limit) for name, run in racers.items()]
    race(field, setting.repeats, setting.patience)
    by_name = {contender.name: contender for contender in field}
    row = {
        "case": dataclasses.asdict(case),
        "ours": by_name["jspec"].summary() | _text(warm["jspec"], case, reference),
        "peers": [
            _against(by_name, mode, theirs.threads, _acceptance(theirs, case, mode, limits))
            for mode in modes
        ],
    }
    if plain != case:
        row["own_autoregression"] = _ratios(by_name["jspec"], by_name["jspec autoregressive"])
    return row


def _bind(theirs: Theirs, case: Case, mode: str, threads: int, limits) -> Callable[[], Sample]:
    return lambda: theirs.generate(case, mode, threads, *limits)


def _warm_up(run: Callable[[], Sample]) -> Sample:
    """Compile and warm up; the second sample is like any later one."""
    run()
    return run()


def _acceptance(theirs: Theirs, case: Case, mode: str, limits) -> float | None:
    """Return the peer's acceptance length; a compiled model cannot be hooked and has none."""
    if mode not in ("assisted", "prompt_lookup"):
        return None
    sample = theirs.generate(case, mode, 1, *limits, count_passes=True)
    return sample.num_tokens / sample.passes


def _text(sample: Sample, case: Case, reference: Reference | None) -> dict:
    """Return acceptance, variety, and equality with the plain greedy text."""
    facts = {
        "acceptance_length": sample.num_tokens / sample.passes,
        "distinct_tokens": sum(len(set(row)) for row in sample.tokens) / len(sample.tokens),
    }
    if case.temperature == 0 and reference:
        facts["equal_to_own_greedy"] = difference(sample.tokens, reference.ours)
        facts["equal_to_peer_greedy"] = difference(sample.tokens, reference.theirs)
    return facts


def difference(rows: Sequence[list[int]], expected: Sequence[list[int]]) -> dict:
    """Return the number of equal rows, and the position of the first difference."""
    equal = [row == other for row, other in zip(rows, expected, strict=True)]
    facts: dict[str, Any] = {"equal": all(equal), "rows_equal": sum(equal), "rows": len(equal)}
    if not all(equal):
        row = equal.index(False)
        pairs = enumerate(zip(rows[row], expected[row], strict=True))
        facts |= {"row": row, "position": next(i for i, (a, b) in pairs if a != b)}
    return facts


def _against(
    by_name: dict[str, Contender], mode: str, tried: Sequence[int], acceptance: float | None
) -> dict:
    """Ratio to the peer at its better number of threads."""
    rivals = {count: by_name[f"{mode}/{count}"] for count in tried}
    threads = max(rivals, key=lambda count: rivals[count].best)
    return {
        "mode": mode,
        "threads": threads,
        "acceptance_length": acceptance,
        **_ratios(by_name["jspec"], rivals[threads]),
        "by_threads": {str(count): rival.summary() for count, rival in rivals.items()},
    }


def _ratios(ours: Contender, other: Contender) -> dict:
    return {
        "tokens_per_second_best": round(other.best, 2),
        "tokens_per_second_median": round(other.median, 2),
        "ratio_best": round(ours.best / other.best, 3),
        "ratio_median": round(ours.median / other.median, 3),
        "disturbed": not (ours.num_quiet and other.num_quiet),
    }

"""``jspec tune``: record acceptance, then search and verify at each batch size."""

import dataclasses
import os
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jspec.api.llm import LLM
from jspec.engine import loading
from jspec.engine.loading import LoadedModel
from jspec.tools.bench.contenders import Ours
from jspec.tools.bench.names import portable
from jspec.tools.bench.questions import Question, Request, answered_by
from jspec.tools.bench.timing import Contender, race, ratios, spread
from jspec.tools.tune.acceptance import Recording, Round, record
from jspec.tools.tune.families import Candidate, Family, check, families_of
from jspec.tools.tune.search import Search
from jspec.tools.tune.settings import Settings
from jspec.tools.tune.workload import Workload, workload

DEFINITION = (
    "tokens/s: LLM.generate on all prompts, prefill and host included; predicted from recorded "
    "acceptance and measured seconds of rounds, and measured in turns, median (least to most). "
    "speed-up: relative to plain decoding in the same turn. acceptance length: tokens emitted by a "
    "pass of the target, the bonus token and passes without a draft included."
)
TOLERANCE = 0.1  # of predictions


def tune(
    model: str | os.PathLike | LoadedModel,
    questions: Sequence[Question],
    settings: Settings,
    *,
    on_batch: Callable[[dict[str, Any]], None] = lambda _: None,
    on_step: Callable[[str], None] = lambda _: None,
) -> dict[str, Any]:
    """Find the fastest ``speculative_config`` for each batch size; return the results for JSON.

    ``results["batches"]`` has an entry for each batch size. Its ``speculative_config`` is the
    winner's, as ``LLM`` takes it, and its ``rows`` are the candidates that ran, the fastest first.

    Args:
      model: the target, as in ``LLM``.
      questions: from ``jspec.tools.bench.questions.read``.
      settings: the space to search.
      on_batch: called with the results so far after each batch size.
      on_step: called with the words of a progress line.

    Raises:
      ValueError: the model, a config and the questions do not fit together, or answers are too
        short for the drafts of every method.
    """
    for given in settings.configs:  # before weights are loaded
        check(given, settings)
    on_step("loading")
    target = loading.load(model, settings.dtype)
    families = families_of(target, settings)
    requests, left_out = answered_by(
        LLM(target), questions, max_tokens=settings.max_tokens, prompt_tokens=settings.prompt_tokens
    )
    configs = [portable(given, settings.configs) for given in settings.configs]
    results: dict[str, Any] = {
        "definition": DEFINITION,
        "setting": dataclasses.asdict(settings) | {"configs": configs},
        "questions": len(requests),
        "left_out": left_out,
        "left_out_methods": [],
        "interrupted": False,
        "acceptance": [],
        "batches": [],
    }
    try:
        recordings = _record_all(families, requests, settings, results, on_step)
        for size in settings.batch_sizes:
            batch = _batch(size, families, recordings, requests, settings, on_step)
            results["batches"].append(batch)
            results["interrupted"] = batch["interrupted"]
            on_batch(results)
            if batch["interrupted"]:
                break
    except KeyboardInterrupt:
        results["interrupted"] = True
    return results


def _record_all(
    families: Sequence[Family],
    requests: Sequence[Request],
    settings: Settings,
    results: dict[str, Any],
    on_step: Callable[[str], None],
) -> list[Recording]:
    """Record the acceptance of each family, on the prompts of all batch sizes.

    Raises:
      ValueError: answers are too short for the drafts of every method.
    """
    works = [workload(settings.case(n), requests, families[0].target) for n in settings.batch_sizes]
    most, case = max(len(work.prompts) for work in works), settings.case(max(settings.batch_sizes))
    work = workload(case, requests, families[0].target, most)
    recordings = [Recording([[Round((), drafted=False)]] * len(work.prompts), False)]
    for family in families[1:]:
        on_step(f"recording the acceptance of {family.name}")
        recording = record(family, work, len(requests), settings)
        recordings.append(recording)
        if recording.is_empty:
            results["left_out_methods"].append(family.name)
        elif recording.acceptance is not None:
            line = {"name": family.name, **recording.acceptance.as_dict()}
            results["acceptance"].append(line)
    if all(recording.is_empty for recording in recordings[1:]):
        raise ValueError(
            f"answers of max_tokens={settings.max_tokens} or fewer are too short for the drafts of "
            f"{', '.join(results['left_out_methods'])}: raise --max-tokens, or lower "
            "--max-speculative-tokens."
        )
    return recordings


def _batch(
    size: int,
    families: Sequence[Family],
    recordings: Sequence[Recording],
    requests: Sequence[Request],
    settings: Settings,
    on_step: Callable[[str], None],
) -> dict[str, Any]:
    """Search and verify at one batch size."""
    work = workload(settings.case(size), requests, families[0].target)
    on_step_of_size = lambda words: on_step(f"{work.case.title}: {words}")
    search = Search(families, recordings, work, settings, on_step_of_size)
    best = search.run()
    field, interrupted = _run_in_turns(best, families, work, settings, on_step_of_size)
    rows = _rows(best, field, search, settings.configs)
    turns = list(zip(*(each.samples for each in field), strict=False))
    quiet = [all(sample.quiet(field[0].limit) for sample in turn) for turn in turns]
    return {
        "batch_size": size,
        "temperature": settings.temperature,
        "speculative_config": rows[0]["speculative_config"],
        "winner": rows[0]["name"],
        "predicted_winner": max(rows, key=lambda row: row["predicted_tokens_per_second"])["name"],
        "within_tolerance": all(abs(row["error"]) <= TOLERANCE for row in rows),
        "rows": rows,
        "turns": len(turns),
        "quiet_turns": sum(quiet),
        "interrupted": interrupted,
    } | search.report()


def _run_in_turns(
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
        on_step(f"compiling {candidate.name}")
        family = families[candidate.family]
        config, size = {**candidate.config, **family.opened}, work.case.batch_size
        llm = LLM(family.target, config, dtype=family.dtype, max_num_seqs=size)
        run = Ours(llm, work.case, {"all": work.requests})
        run()
        field.append(Contender(candidate.name, run))
    on_step("running the best two in turns")
    try:
        race(field, settings.repeats, settings.patience)
    except KeyboardInterrupt:
        if not all(each.samples for each in field):
            raise
        return field, True
    return field, False


def _rows(
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

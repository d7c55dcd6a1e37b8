"""The whole of ``jspec tune``: acceptance, then costs, search and verification by batch size."""

import dataclasses
import os
from collections.abc import Callable, Sequence
from typing import Any

from jspec.api.llm import LLM
from jspec.engine import loading
from jspec.engine.loading import LoadedModel
from jspec.tools.bench import questions as reading
from jspec.tools.bench.names import portable
from jspec.tools.bench.questions import Question, Request
from jspec.tools.tune import acceptance
from jspec.tools.tune.acceptance import Recorded
from jspec.tools.tune.families import Family, check, families_of
from jspec.tools.tune.requests import Workload, generate, workload
from jspec.tools.tune.search import Known, Search
from jspec.tools.tune.settings import Settings
from jspec.tools.tune.verification import rows_of, run_in_turns
from jspec.util.buckets import bucket

DEFINITION = (
    "tokens/s: of LLM.generate on all prompts, prompts and host included, predicted from recorded "
    "acceptance and measured seconds of rounds, and measured in turns, median (least to most). "
    "speed-up: beside plain decoding in the same turn. acceptance length: tokens a pass of the "
    "target emits, the bonus token and passes without a draft included."
)
TOLERANCE = 0.1  # of predictions


def tune(
    model: str | os.PathLike | LoadedModel,
    asked: Sequence[Question],
    settings: Settings,
    *,
    on_batch: Callable[[dict[str, Any]], None] = lambda _: None,
    on_step: Callable[[str], None] = lambda _: None,
) -> dict[str, Any]:
    """Finds the fastest ``speculative_config`` for each batch size; the results as JSON has them.

    ``results["batches"]`` has an entry for each: its ``speculative_config`` is the winner's, as
    ``LLM`` takes it, and ``rows`` are those that were run, the fastest first.

    Args:
      model: the target, as in ``LLM``.
      asked: questions, from ``jspec.tools.bench.questions.read``.
      settings: what is searched.
      on_batch: called with the results so far after each batch size.
      on_step: called with words for a progress line.

    Raises:
      ValueError: the model, a config or the questions do not go together, or answers are too
        short for every method's drafts.
    """
    for given in settings.configs:  # before weights are loaded
        check(given, settings)
    on_step("loading")
    target = loading.load(model, settings.dtype)
    families = families_of(target, settings)
    made, left_out = reading.answered_by(
        LLM(target), asked, max_tokens=settings.max_tokens, prompt_tokens=settings.prompt_tokens
    )
    results: dict[str, Any] = {
        "definition": DEFINITION,
        "setting": dataclasses.asdict(settings)
        | {"configs": [portable(each, settings.configs) for each in settings.configs]},
        "questions": len(made),
        "left_out": left_out,
        "left_out_methods": [],
        "interrupted": False,
        "acceptance": [],
        "batches": [],
    }
    try:
        known = _recorded(families, made, settings, results, on_step)
        for size in settings.batch_sizes:
            results["batches"].append(_batch(size, families, known, made, settings, on_step))
            results["interrupted"] = results["batches"][-1]["interrupted"]
            on_batch(results)
            if results["interrupted"]:
                break
    except KeyboardInterrupt:
        results["interrupted"] = True
    return results


def _recorded(
    families: Sequence[Family],
    made: Sequence[Request],
    settings: Settings,
    results: dict[str, Any],
    on_step: Callable[[str], None],
) -> list[Known]:
    """What each family accepts, of drafts as wide as any that will be looked at.

    Raises:
      ValueError: answers are too short for the drafts of every method.
    """
    target = families[0].target
    works = [workload(settings.case(size), made, target) for size in settings.batch_sizes]
    most = max(len(work.prompts) for work in works)
    work = workload(settings.case(max(settings.batch_sizes)), made, target, most)
    found = [Known([], None)]
    for family in families[1:]:
        on_step(f"recording what is accepted of {family.name}")
        known = _record(family, work, len(made), settings)
        if not known.is_enough:
            results["left_out_methods"].append(family.name)
        elif known.acceptance is not None:
            results["acceptance"].append({"name": family.name, **known.acceptance.as_dict()})
        found.append(known)
    if not any(known.is_enough for known in found[1:]):
        raise ValueError(
            f"answers of max_tokens={settings.max_tokens} or fewer are too short for the drafts of "
            f"{', '.join(results['left_out_methods'])}: raise --max-tokens, or lower "
            "--max-speculative-tokens."
        )
    return found


def _record(family: Family, work: Workload, num_prompts: int, settings: Settings) -> Known:
    """What is accepted of a family's drafts, row by row."""
    build, tree = family.made(family.probe.config), family.probe.tree
    every = acceptance.by_position(build.plan, settings.temperature)
    plan = acceptance.one_by_one(build.plan) if every else build.plan
    plan = dataclasses.replace(plan, record_rounds=bucket(settings.max_tokens))
    answers, _ = generate(plan, build.params, work)
    rounds = [acceptance.rounds_of(answer, tree, every) for answer in answers]
    counts = None
    if tree is not None:
        counts = acceptance.count([one for some in rounds for one in some], tree)
    if not every:  # what was drawn for a prompt is a sample of all its answers
        rounds = [
            [one for some in rounds[row % num_prompts :: num_prompts] for one in some]
            for row in range(len(rounds))
        ]
    return Known([Recorded(some, every) for some in rounds], counts)


def _batch(
    size: int,
    families: Sequence[Family],
    known: Sequence[Known],
    made: Sequence[Request],
    settings: Settings,
    on_step: Callable[[str], None],
) -> dict[str, Any]:
    """The winner of a batch size, and how it was found."""
    work = workload(settings.case(size), made, families[0].target)
    search = Search(families, known, work, settings, on_step)
    entries = search.run()
    ran = run_in_turns(entries, families, work, settings, search.clocks(entries), on_step)
    search.settle(entries, ran.seconds)
    rows = rows_of(entries, ran, search.tokens_per_second, settings.configs)
    predicted = max(rows, key=lambda row: row["predicted_tokens_per_second"])
    return {
        "batch_size": size,
        "temperature": settings.temperature,
        "speculative_config": rows[0]["speculative_config"],
        "winner": rows[0]["name"],
        "predicted_winner": predicted["name"],
        "within_tolerance": all(abs(row["error"]) <= TOLERANCE for row in rows),
        "rows": rows,
        "turns": ran.turns,
        "quiet_turns": ran.quiet_turns,
        "interrupted": ran.interrupted,
    } | search.report()

"""``jspec tune``: record acceptance, then search and verify at each batch size."""

import dataclasses
import os
from collections.abc import Callable, Sequence
from typing import Any

from jspec.api.llm import LLM
from jspec.checkpoints import loading
from jspec.checkpoints.loading import LoadedModel
from jspec.tools.bench.names import portable
from jspec.tools.bench.questions import Question, Request, answered_by
from jspec.tools.tune.acceptance import Recording, Round, record
from jspec.tools.tune.families import Family, check, families_of
from jspec.tools.tune.search import Search
from jspec.tools.tune.settings import Settings
from jspec.tools.tune.workload import workload

DEFINITION = (
    "tokens/s: LLM.generate on all prompts, prefill and host included; predicted from recorded "
    "acceptance and measured seconds of rounds, and measured in turns, median (least to most). "
    "speed-up: relative to plain decoding in the same turn. acceptance length: tokens emitted by a "
    "pass of the target, the bonus token and passes without a draft included."
)


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
            work = workload(settings.case(size), requests, target)
            batch = Search(families, recordings, work, settings, on_step).run()
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

"""``jspec tune``: record acceptance, then search at each batch size."""

import dataclasses
import os
from collections.abc import Callable, Sequence
from typing import Any

from jspec.api.llm import LLM
from jspec.checkpoints.loading import LoadedModel
from jspec.tools.bench.names import portable
from jspec.tools.bench.questions import Question, answered_by
from jspec.tools.bench.run import loaded
from jspec.tools.tune.acceptance import record
from jspec.tools.tune.families import check, families_of
from jspec.tools.tune.search import Search, prompts_of
from jspec.tools.tune.settings import Settings

DEFINITION = (
    "tokens/s: LLM.generate on all prompts, prefill and host included, median (least to most). "
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
    winner's, as ``LLM`` takes it. Its ``rows`` are the best two and plain decoding in turns, the
    fastest first, and its ``candidates`` all that were measured.

    Args:
      model: the target, as in ``LLM``.
      questions: from ``jspec.tools.bench.questions.read``.
      settings: the space to search.
      on_batch: called with the results so far after each batch size.
      on_step: called with the words of a progress line.

    Raises:
      ValueError: the model, a config and the questions do not fit together.
    """
    for given in settings.configs:  # before weights are loaded
        check(given)
    on_step("loading")
    target = loaded(model, settings, settings.quantization)
    families = families_of(target, settings)
    requests, left_out = answered_by(
        LLM(target, **settings.split),
        questions,
        max_tokens=settings.max_tokens,
        prompt_tokens=settings.prompt_tokens,
    )
    configs = [portable(given, settings.configs) for given in settings.configs]
    results: dict[str, Any] = {
        "definition": DEFINITION,
        "setting": dataclasses.asdict(settings) | {"configs": configs},
        "questions": len(requests),
        "left_out": left_out,
        "interrupted": False,
        "acceptance": [],
        "batches": [],
    }
    chances, most = {}, settings.case(max(settings.batch_sizes))
    try:
        for family in (each for each in families if each.takes_trees):
            on_step(f"recording the acceptance of {family.name}")
            acceptance = record(family, prompts_of(requests, most), most)
            chances[family] = acceptance.chances
            results["acceptance"].append({"name": family.name, **acceptance.as_dict()})
        for size in settings.batch_sizes:
            case = settings.case(size)
            batch = Search(families, chances, requests, case, settings, on_step).run()
            results["batches"].append(batch)
            results["interrupted"] = batch["interrupted"]
            on_batch(results)
            if batch["interrupted"]:
                break
    except KeyboardInterrupt:
        results["interrupted"] = True
    return results

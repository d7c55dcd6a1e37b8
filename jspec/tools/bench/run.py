"""The measurement: every method beside plain decoding, in turns, case by case."""

import contextlib
import dataclasses
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from jspec.api import config
from jspec.api.build import build_plan
from jspec.api.llm import LLM
from jspec.engine import loading
from jspec.engine.loading import LoadedModel
from jspec.tools.bench import questions as reading
from jspec.tools.bench.contenders import by_category, peer_refusal
from jspec.tools.bench.names import portable
from jspec.tools.bench.peer import Peer, PeerError
from jspec.tools.bench.questions import Question
from jspec.tools.bench.settings import Settings
from jspec.tools.bench.table import CaseTable

DEFINITION = (
    "acceptance length: tokens a pass of the target emits, the bonus token and passes without a "
    "draft included; 1 is no gain. per position: of all drafts, the share whose i-th token was "
    "accepted. speed-up: tokens/s beside plain decoding in the same turn, median (least to most); "
    "prompts, host and all."
)


def bench(
    model: str | os.PathLike | LoadedModel,
    asked: Sequence[Question],
    settings: Settings,
    *,
    on_case: Callable[[dict[str, Any]], None] = lambda _: None,
    on_step: Callable[[str], None] = lambda _: None,
) -> dict[str, Any]:
    """Measures; the results as JSON has them.

    Args:
      model: the target, as in ``LLM``.
      asked: questions, from ``questions.read``.
      settings: what is measured.
      on_case: called with the results so far after each case.
      on_step: called with words for a progress line.

    Raises:
      ValueError: the model, a config or the questions do not go together.
    """
    on_step("loading")
    target = loading.load(model, settings.dtype)
    plain = LLM(target)
    for each in settings.configs:  # what is wrong with the last is not found out after hours
        build_plan(target, config.read(each), dtype=settings.dtype)
    made, left_out = reading.answered_by(
        plain, asked, max_tokens=settings.max_tokens, prompt_tokens=settings.prompt_tokens
    )
    requests = by_category(made)
    results: dict[str, Any] = {
        "definition": DEFINITION,
        "setting": dataclasses.asdict(settings)
        | {"configs": [portable(each, settings.configs) for each in settings.configs]},
        "questions": {name: len(some) for name, some in requests.items()},
        "left_out": left_out,
        "peer": None,
        "interrupted": False,
        "rows": [],
    }
    dtype = target.params.embedding.dtype.name
    with _peer(model, dtype, settings, results) as peer:
        for case in settings.cases:
            table = CaseTable(target, settings, case, requests, peer)
            try:
                table.run(on_step)
            except KeyboardInterrupt:
                results["interrupted"] = True
            except PeerError as error:  # while it was measured; what there is stays
                table.failed["the peer"] = str(error)
            results["rows"] += table.rows()
            for name, reason in table.failed.items():
                results["peer"] += f"; {case.words}: {name} failed ({reason})"
            if results["rows"]:  # none, where Ctrl-C comes before the first sample
                on_case(results)
            if results["interrupted"]:
                break
    return results


@contextlib.contextmanager
def _peer(model: Any, dtype: str, settings: Settings, results: dict) -> Iterator[Peer | None]:
    """transformers with the model loaded, or None; the results say which."""
    refusal = peer_refusal(model, dtype) if settings.peers else "not asked for"
    draft = settings.draft_folder
    try:
        peer = None if refusal else Peer(model, draft, dtype)
    except PeerError as error:
        peer, refusal = None, f"transformers cannot load the models ({error})"
    if peer is None:
        results["peer"] = refusal
        yield None
        return
    with peer:
        versions = "transformers {transformers}, torch {torch}".format_map(peer.info)
        results["peer"] = f"{versions}, {dtype}"
        if draft is None:
            results["peer"] += "; assisted generation needs a draft_model in a local directory"
        yield peer

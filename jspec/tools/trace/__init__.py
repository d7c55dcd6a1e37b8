"""A record of one generation: drafts, their probabilities and the end of each round.

`jspec.trace` and the command `jspec trace` return a `Trace`, a plain value. Requests that are not
traced run the same programs as without this package.
"""

from collections.abc import Sequence
from typing import Any

from jspec.api.llm import LLM
from jspec.api.metrics import Counts
from jspec.api.outputs import Transcript
from jspec.api.requests import GenerationRequest
from jspec.api.sampling_params import SamplingParams
from jspec.core.types import Params, Shared
from jspec.engine.loop import init_shared
from jspec.engine.plan import Plan
from jspec.engine.sequences import SequenceParams
from jspec.tools.trace.page import frame, html, save
from jspec.tools.trace.recording import record
from jspec.tools.trace.rounds import Node, Piece, Round, Trace, trace_of
from jspec.util.messages import shown

__all__ = ["Node", "Piece", "Round", "Trace", "frame", "html", "of_row", "save", "trace"]


def trace(llm: LLM, prompt: Any, sampling_params: SamplingParams | None = None) -> Trace:
    """Continue one prompt as `LLM.generate` does, and return a record of every round.

    The tokens are those of `generate`. `html` renders the trace as a page, `terminal.page` as text.

    Raises:
      ValueError: as `LLM.generate`, or the request is for more than one text.
    """
    return llm.run_one(prompt, sampling_params, _run)


def _run(
    requests: Sequence[GenerationRequest],
    plan: Plan,
    params: Params,
    shared: Shared,
    *,
    tokenizer: Any,
    model: str,
) -> tuple[Trace, Counts, Shared]:
    if len(requests) != 1:
        raise ValueError(
            f"a trace is of one prompt, but {len(requests)} were given; call it for each."
        )
    [request] = requests
    _check(request.params)
    [row], [transcript] = request.sequences, request.transcripts
    tokenizer = tokenizer if request.params.detokenize else None
    records, shared = record(plan, params, row, transcript, shared)
    traced = trace_of(
        records,
        transcript,
        tokenizer,
        request.prompt.text,
        request.prompt.token_ids,
        {"model": model} | _setting(plan, row),
        rule=_asked(plan),
        skip_special_tokens=request.params.skip_special_tokens,
    )
    return traced, traced.counts, shared


def of_row(plan: Plan, params: Params, row: SequenceParams, *, tokenizer: Any = None) -> Trace:
    """Return the trace of one sequence in the functional layer; without a tokenizer, with ids.

    Raises:
      ValueError: the row does not fit the model.
    """
    settings = SamplingParams(detokenize=tokenizer is not None)
    transcript = Transcript(settings, row.prompt, tokenizer, frozenset(row.stop_token_ids))
    records, _ = record(plan, params, row, transcript, init_shared(plan))
    setting = _setting(plan, row)
    return trace_of(records, transcript, tokenizer, None, row.prompt, setting, rule=_asked(plan))


def _check(params: SamplingParams) -> None:
    asked = {"n": params.n if params.n > 1 else None, "best_of": params.best_of}
    asked |= {"logprobs": params.logprobs, "prompt_logprobs": params.prompt_logprobs}
    for name, value in asked.items():
        if value is not None:
            raise ValueError(
                f"{name}={shown(value)} is not for a trace, which is of one text and has "
                "probabilities of its own; leave it out."
            )


def _setting(plan: Plan, row: SequenceParams) -> dict[str, str]:
    asked, runs = _asked(plan), plan.effective_rule.name
    return {
        "drafter": type(plan.drafter).__name__,
        "rule": asked if runs == asked else f"{asked} (on deterministic drafts: {runs})",
        "temperature": f"{row.temperature:g}" if row.temperature else "0 (greedy)",
    }


def _asked(plan: Plan) -> str:
    return plan.rule if isinstance(plan.rule, str) else plan.rule.name

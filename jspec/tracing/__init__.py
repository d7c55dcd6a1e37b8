"""One generation, round by round: what was drafted, how likely it was, and why each round stopped.

``LLM.trace`` and ``jspec trace`` make a ``Trace``; what does not ask for one runs the programs that
it always ran.
"""

from collections.abc import Callable, Sequence
from typing import Any

from jspec.generate import Batch
from jspec.jobs import Job
from jspec.naming import shown
from jspec.plan import Plan
from jspec.tracing.recording import record
from jspec.tracing.rounds import Node, Piece, Round, Trace, trace_of
from jspec.types import Params, Shared

__all__ = ["Node", "Piece", "Round", "Trace", "check", "run"]


def check(params: Any) -> None:
    """Raises ValueError where settings ask for what one trace cannot hold."""
    for name, least in (("n", 1), ("best_of", None), ("logprobs", None), ("prompt_logprobs", None)):
        value = getattr(params, name, least)
        if value not in (least, None, 1 if name == "best_of" else None):
            raise ValueError(
                f"{name}={shown(value)} is not for a trace, which is of one text and has "
                "probabilities of its own; leave it out."
            )


def run(
    todo: Sequence[Job], plan: Plan, params: Params, shared: Shared,
    price: Callable[[Plan, Params, Batch], Shared], *, tokenizer: Any, model: str,
) -> tuple[Trace, Shared]:  # fmt: skip
    """Generates the text of the one job in ``todo``; the same tokens as without looking.

    Args:
      todo: what to continue.
      plan: target, drafter and rule.
      params: weights.
      shared: what the drafter keeps for all calls; consumed.
      price: gives ``shared`` the costs of a batch's rounds where the plan chooses by costs.
      tokenizer: names the tokens; None shows their ids.
      model: as it is shown.

    Raises:
      ValueError: there are several prompts, or none.
    """
    if len(todo) != 1:
        raise ValueError(f"a trace is of one prompt, but {len(todo)} were given; call it for each.")
    [job] = todo
    [row], [transcript] = job.rows, job.transcripts
    if not job.params.detokenize:
        tokenizer = None
    seen, shared = record(plan, params, row, transcript, shared, price)
    setting = {
        "model": model,
        "drafter": type(plan.drafter).__name__,
        "rule": _rule(plan),
        "temperature": f"{row.temperature:g}" + ("" if row.temperature else ", greedy"),
    }
    trace = trace_of(
        seen, transcript, tokenizer, job.prompt.text, job.prompt.token_ids, setting,
        skip_special_tokens=job.params.skip_special_tokens,
    )  # fmt: skip
    return trace, shared


def _rule(plan: Plan) -> str:
    """The rule that was asked for, and what it comes to on these drafts."""
    asked = plan.rule if isinstance(plan.rule, str) else plan.rule.name
    runs = plan.effective_rule.name
    return asked if runs == asked else f"{asked} (on drafts chosen without chance: {runs})"

"""One generation, round by round: what was drafted, how likely it was, and why each round stopped.

``LLM.trace`` and ``jspec trace`` make a ``Trace``; what does not ask for one runs the programs that
it always ran.
"""

from collections.abc import Callable, Sequence
from typing import Any

from jspec.calibration import CostTable
from jspec.decode import init_shared
from jspec.generate import Batch
from jspec.jobs import Job
from jspec.naming import shown
from jspec.outputs import Transcript
from jspec.params import SamplingParams
from jspec.plan import Plan
from jspec.rows import Row
from jspec.tracing.recording import record
from jspec.tracing.rounds import Node, Piece, Round, Trace, trace_of
from jspec.types import Params, Shared

__all__ = ["Node", "Piece", "Round", "Trace", "of_row", "run"]


def run(
    todo: Sequence[Job], plan: Plan, params: Params, shared: Shared,
    price: Callable[[Plan, Params, Batch], Shared], *, tokenizer: Any, model: str,
) -> tuple[Trace, Shared]:  # fmt: skip
    """Generates the text of the one job in ``todo``; the same tokens as without looking.

    Args:
      todo: what to continue.
      plan: target, drafter and rule.
      params: weights.
      shared: what the drafter keeps for all calls; it stays as it is.
      price: gives ``shared`` the costs of a batch's rounds where the plan chooses by costs.
      tokenizer: names the tokens; None shows their ids.
      model: as it is shown.

    Raises:
      ValueError: more is asked for than one text of one prompt.
    """
    if len(todo) != 1:
        raise ValueError(f"a trace is of one prompt, but {len(todo)} were given; call it for each.")
    [job] = todo
    _check(job.params)
    [row], [transcript] = job.rows, job.transcripts
    tokenizer = tokenizer if job.params.detokenize else None
    seen, shared = record(plan, params, row, transcript, shared, price)
    trace = trace_of(
        seen, transcript, tokenizer, job.prompt.text, job.prompt.token_ids,
        {"model": model} | _setting(plan, row), rule=_asked(plan),
        skip_special_tokens=job.params.skip_special_tokens,
    )  # fmt: skip
    return trace, shared


def of_row(plan: Plan, params: Params, row: Row, *, tokenizer: Any = None) -> Trace:
    """The trace of one row of the functional layer: of targets, drafters and rules of your own.

    Args:
      plan: target, drafter and rule.
      params: weights.
      row: what to continue, as ``jspec.generate.generate_rows`` takes it.
      tokenizer: names the tokens; None shows their ids.

    Raises:
      ValueError: the row does not fit the model.
    """
    settings = SamplingParams(detokenize=tokenizer is not None)
    transcript = Transcript(settings, row.prompt, tokenizer, frozenset(row.stop_token_ids))
    price = CostTable().price
    seen, _ = record(plan, params, row, transcript, init_shared(plan), price)
    setting = _setting(plan, row)
    return trace_of(seen, transcript, tokenizer, None, row.prompt, setting, rule=_asked(plan))


def _check(params: SamplingParams) -> None:
    asked = {"n": params.n if params.n > 1 else None, "best_of": params.best_of}
    asked |= {"logprobs": params.logprobs, "prompt_logprobs": params.prompt_logprobs}
    for name, value in asked.items():
        if value is not None:
            raise ValueError(
                f"{name}={shown(value)} is not for a trace, which is of one text and has "
                "probabilities of its own; leave it out."
            )


def _setting(plan: Plan, row: Row) -> dict[str, str]:
    """What ran, as it is shown."""
    return {
        "drafter": type(plan.drafter).__name__,
        "rule": _rule(plan),
        "temperature": f"{row.temperature:g}" if row.temperature else "0 (greedy)",
    }


def _rule(plan: Plan) -> str:
    """The rule that was asked for, and what it comes to on these drafts."""
    asked, runs = _asked(plan), plan.effective_rule.name
    return asked if runs == asked else f"{asked} (on drafts chosen without chance: {runs})"


def _asked(plan: Plan) -> str:
    return plan.rule if isinstance(plan.rule, str) else plan.rule.name

"""Answers on the host."""

import dataclasses

import jax
import numpy as np

from jspec.core.logprobs import Logprobs


@dataclasses.dataclass(frozen=True)
class Answer:
    """The tokens that one sequence generated, and their statistics.

    Attributes:
      tokens: int32 [n], the generated ids, a stop token included.
      finish_reason: ``"stop"``, ``"length"``, None while the sequence runs, or ``"error"`` if every
        token had probability 0 (NaN or fully masked logits) after ``tokens``.
      stop_token: the stop token that ended the sequence, or None.
      rounds: passes of the target.
      drafts: rounds with at least one drafted token.
      drafted: drafted tokens.
      accepted: int [K+1], the number of drafts with 0..K accepted tokens.
      trace: (accepted, tokens, parents) of each recorded round, or None.
      logprobs: of ``tokens``, or None.
      prompt_logprobs: of the prompt's tokens except the first, or None.
      steps: numbers of (accepted, drafted) tokens of each recorded round, or None.
    """

    tokens: np.ndarray
    finish_reason: str | None
    stop_token: int | None
    rounds: int
    drafts: int
    drafted: int
    accepted: np.ndarray
    trace: tuple[np.ndarray, np.ndarray, np.ndarray] | None = None
    logprobs: Logprobs | None = None
    prompt_logprobs: Logprobs | None = None
    steps: tuple[np.ndarray, np.ndarray] | None = None

    @property
    def acceptance_length(self) -> float:
        """Mean tokens per pass of the target, bonus token included: 1.0 is no gain."""
        return len(self.tokens) / max(self.rounds, 1)


def answer_of(host: tuple, index: int, prompt_length: int, has_prompt: bool) -> Answer:
    """Return the answer of one sequence, from the arrays that ``batch.read`` brings to the host."""
    history, done, stats, stop_tokens, max_length, scores = host
    length = history.length[index]
    scores_of = lambda first, end: jax.tree.map(lambda x: x[index, first:end].copy(), scores)
    tokens = history.tokens[index, prompt_length:length].copy()
    stops = set(stop_tokens[index].tolist()) - {-1}
    stop_token = int(tokens[-1]) if len(tokens) and int(tokens[-1]) in stops else None
    reason = None
    if done[index]:
        is_full = length >= max_length[index]
        reason = "stop" if stop_token is not None else "length" if is_full else "error"
    steps = nodes = None
    if stats.trace is not None:
        ran = stats.trace.accepted[:, index] >= 0
        trace = jax.tree.map(lambda x: x[ran, index], stats.trace)
        steps = trace.accepted, trace.drafted
        nodes = None if trace.tokens is None else (trace.accepted, trace.tokens, trace.parents)
    return Answer(
        tokens=tokens,
        finish_reason=reason,
        stop_token=stop_token,
        rounds=int(stats.rounds[index]),
        drafts=int(stats.drafts[index]),
        drafted=int(stats.drafted[index]),
        accepted=stats.accepted[index].copy(),
        trace=nodes,
        logprobs=None if scores is None else scores_of(prompt_length, length),
        prompt_logprobs=scores_of(1, prompt_length) if has_prompt else None,
        steps=steps,
    )

"""Answers on the host."""

import dataclasses

import jax
import numpy as np

from jspec.core.logprobs import Logprobs


@dataclasses.dataclass(frozen=True)
class Answer:
    """The tokens that one sequence generated, and their statistics.

    ``finish_reason`` is ``"stop"``, ``"length"``, None while the sequence runs, or ``"error"`` if
    every token had probability 0 (NaN or fully masked logits) after ``tokens``.
    """

    tokens: np.ndarray  # int32 [n], the generated ids, a stop token included
    finish_reason: str | None
    stop_token: int | None  # that ended the sequence
    rounds: int  # passes of the target
    drafts: int  # rounds with at least one drafted token
    drafted: int  # drafted tokens
    accepted: np.ndarray  # int [K+1], the number of drafts with 0..K accepted tokens
    # (accepted, tokens, parents) of each recorded round
    trace: tuple[np.ndarray, np.ndarray, np.ndarray] | None = None
    logprobs: Logprobs | None = None  # of ``tokens``
    prompt_logprobs: Logprobs | None = None  # of the prompt's tokens except the first
    steps: tuple[np.ndarray, np.ndarray] | None = None  # (accepted, drafted) of each recorded round

    @property
    def acceptance_length(self) -> float:
        """Mean tokens per pass of the target, bonus token included: 1.0 is no gain."""
        return len(self.tokens) / max(self.rounds, 1)


def answer_of(host: tuple, index: int, prompt_length: int, has_prompt: bool) -> Answer:
    """Return the answer of one sequence, from the arrays that ``batch.read`` brings to the host."""
    history, done, stats, stop_tokens, max_length, scores = host
    length = history.length[index]
    # Without scores, ``scores`` is the empty pytree None, and so is the result.
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
    counts = (int(count[index]) for count in (stats.rounds, stats.drafts, stats.drafted))
    answer = Answer(tokens, reason, stop_token, *counts, stats.accepted[index].copy(), nodes)
    return dataclasses.replace(
        answer,
        logprobs=scores_of(prompt_length, length),
        prompt_logprobs=scores_of(1, prompt_length) if has_prompt else None,
        steps=steps,
    )

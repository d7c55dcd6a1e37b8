"""Answers on the host, added up from the results of launches."""

import dataclasses
from collections.abc import Collection, Sequence
from typing import Any

import jax
import numpy as np

from jspec.core.logprobs import Logprobs, Scoring
from jspec.engine.launches import Launch


@dataclasses.dataclass(frozen=True)
class Answer:
    """The tokens that one sequence generated, and their statistics.

    ``finish_reason`` is ``"stop"``, ``"length"``, None while the sequence runs, or ``"error"`` if
    every token had probability 0 (NaN or fully masked logits) after ``tokens``.
    """

    tokens: np.ndarray  # int32 [n], the generated ids, a stop token included
    steps: tuple[np.ndarray, np.ndarray]  # (accepted, drafted) tokens of each round, int32
    max_depth: int  # K
    finish_reason: str | None = None
    stop_token: int | None = None  # the stop token that ended the sequence
    nodes: tuple[np.ndarray, np.ndarray] | None = None  # (tokens, parents) of each round, [r, N]
    logprobs: Logprobs | None = None  # scores of ``tokens``
    prompt_logprobs: Logprobs | None = None  # scores of the prompt's tokens but the first
    # Hidden states [n, D] of each of the profile's ``capture_layers``, from which the model
    # predicted ``tokens``; None unless they were asked for.
    features: tuple[np.ndarray, ...] | None = None
    num_cached_tokens: int = 0  # tokens of the prompt that the prefix cache held

    @property
    def rounds(self) -> int:
        """Passes of the target."""
        return len(self.steps[0])

    @property
    def drafts(self) -> int:
        """Rounds with at least one drafted token."""
        return int((self.steps[1] > 0).sum())

    @property
    def drafted(self) -> int:
        """Drafted tokens."""
        return int(self.steps[1].sum())

    @property
    def accepted(self) -> np.ndarray:
        """The number of drafts with 0..K accepted tokens, int [K+1]."""
        accepted, drafted = self.steps
        return np.bincount(accepted[drafted > 0], minlength=self.max_depth + 1)

    @property
    def trace(self) -> tuple[np.ndarray, np.ndarray, np.ndarray] | None:
        """(accepted, tokens, parents) of each round; None without ``nodes``."""
        return None if self.nodes is None else (self.steps[0], *self.nodes)

    @property
    def acceptance_length(self) -> float:
        """Mean tokens per pass of the target, bonus token included: 1.0 is no gain."""
        return len(self.tokens) / max(self.rounds, 1)


def empty(max_depth: int) -> Answer:
    """Return the answer of a sequence before its first round."""
    none = np.zeros((0,), np.int32)
    return Answer(none, (none, none), max_depth)


def prompt_scores(scoring: Scoring, parts: Sequence[Logprobs], row: int = 0) -> Logprobs:
    """Return the scores of a row's prompt, from those of its chunks [Q, C]."""
    parts = [scoring.empty(row + 1, 0), *parts]
    return jax.tree.map(
        lambda *parts: np.concatenate([part[row] for part in parts]), *jax.device_get(parts)
    )


def extended(
    answer: Answer, launch: Launch, row: int, stop_token_ids: Collection[int], max_tokens: int
) -> Answer:
    """Return the answer with what a launch, brought to the host, did in a row."""
    count = launch.length[row] - launch.start[row]
    ran = launch.accepted[:, row] >= 0
    of_rounds = lambda part: part[ran, row]
    tokens = np.concatenate([answer.tokens, launch.tokens[row, :count]])
    # The empty pytree None stays None.
    scores = jax.tree.map(lambda part: part[row, :count], launch.logprobs)
    nodes = None if launch.nodes is None else (launch.nodes.tokens, launch.nodes.parents)
    nodes = jax.tree.map(of_rounds, nodes)
    stopped = len(tokens) > 0 and int(tokens[-1]) in stop_token_ids
    reason = "stop" if stopped else "length" if len(tokens) >= max_tokens else "error"
    return dataclasses.replace(
        answer,
        tokens=tokens,
        steps=_joined(answer.steps, (of_rounds(launch.accepted), of_rounds(launch.drafted))),
        finish_reason=reason if launch.done[row] else None,
        stop_token=int(tokens[-1]) if stopped else None,
        nodes=_joined(*_of_one_width(answer.nodes, nodes)),
        logprobs=_joined(answer.logprobs, scores),
        features=_joined(answer.features, _accepted(launch, row)),
    )


def _accepted(launch: Launch, row: int) -> tuple[np.ndarray, ...] | None:
    """Return the features [n, D] of a row's emitted tokens; None if the launch has none."""
    if not launch.features:
        return None
    is_valid = np.arange(launch.features[0].shape[2]) <= launch.accepted[:, row, None]  # [R, K+1]
    return tuple(each[:, row][is_valid] for each in launch.features)


def cut(answer: Answer, num_tokens: int) -> Answer:
    """Cut an answer after ``num_tokens`` tokens, as if the sequence had ended there.

    The last round counts as clipped, as at a stop token.
    """
    accepted, drafted = answer.steps
    ends = np.cumsum(accepted + 1)  # tokens emitted by the end of each round
    rounds = int(np.searchsorted(ends, num_tokens)) + 1
    accepted = accepted[:rounds].copy()
    accepted[-1] -= ends[rounds - 1] - num_tokens
    return dataclasses.replace(
        answer,
        tokens=answer.tokens[:num_tokens],
        steps=(accepted, drafted[:rounds]),
        nodes=jax.tree.map(lambda part: part[:rounds], answer.nodes),
        logprobs=jax.tree.map(lambda part: part[:num_tokens], answer.logprobs),
        features=jax.tree.map(lambda part: part[:num_tokens], answer.features),
    )


def _of_one_width(*nodes: Any) -> Any:
    """Pad the nodes [r, N] of launches with -1: their drafts may have different lengths."""
    most = max((leaf.shape[1] for leaf in jax.tree.leaves(nodes)), default=0)
    return jax.tree.map(
        lambda leaf: np.pad(leaf, ((0, 0), (0, most - leaf.shape[1])), constant_values=-1), nodes
    )


def _joined(old: Any, new: Any) -> Any:
    """Concatenate two pytrees of arrays along axis 0; None before the first."""
    return new if old is None else jax.tree.map(lambda *pair: np.concatenate(pair), old, new)

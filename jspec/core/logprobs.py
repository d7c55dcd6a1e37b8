"""Scores of generated tokens and of the likeliest tokens beside them.

The logits are those of the verifying pass, at the nodes of the accepted path. So a text has the
scores of plain decoding, up to rounding.
"""

import dataclasses
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
from flax import struct

from jspec.core import logits_processors, sampling
from jspec.core.branches import Branches
from jspec.core.history import emitted_tokens
from jspec.core.types import Array, Draft, History, Sampling, Tree, Verdict
from jspec.util.messages import shown
from jspec.util.values import is_whole

# Before or after logits processors and sampling filters, normalised or not.
Mode = Literal["raw_logprobs", "processed_logprobs", "raw_logits", "processed_logits"]
MODES = get_args(Mode)


@struct.dataclass
class Logprobs:
    """Scores of tokens [B, T] (on the host: [n]), with the k likeliest tokens beside each."""

    chosen: Array  # [B, T] float32, of the token itself
    rank: Array  # [B, T] int32, 1 for the likeliest; ties share a rank
    top_ids: Array  # [B, T, k] int32, likeliest first
    top: Array  # [B, T, k] float32
    mode: Mode = struct.field(pytree_node=False, default="raw_logprobs")

    @property
    def count(self) -> int:
        """k."""
        return self.top.shape[-1]

    def likeliest(self, count: int) -> "Logprobs":
        """Return the scores with the first ``count`` of the likeliest tokens."""
        return self.replace(top_ids=self.top_ids[..., :count], top=self.top[..., :count])

    def __getitem__(self, index: Any) -> "Logprobs":
        """Return the scores at an index or slice of the first axis."""
        return jax.tree.map(lambda part: part[index], self)


@dataclasses.dataclass(frozen=True)
class Scoring:
    """The scores that a batch computes of its tokens; invalid values raise ValueError."""

    count: int = 0  # k, likeliest tokens beside each; 0 for the token alone
    prompt: bool = False  # whether to score prompts too, by raw logits, since they were not drawn
    mode: Mode = "raw_logprobs"

    def __post_init__(self):
        if not is_whole(self.count, 0):
            raise ValueError(f"count={shown(self.count)} must be a whole number, 0 or more.")
        check_mode(self.mode)

    def check_fit(self, vocab_size: int) -> None:
        """Raise ValueError if ``count`` exceeds the vocabulary."""
        if self.count > vocab_size:
            raise ValueError(
                f"count={self.count} of Scoring must be at most {vocab_size}, the vocabulary."
            )

    def empty(self, batch: int, size: int) -> Logprobs:
        """Allocate the scores of ``size`` tokens per sequence."""
        flat, deep = (batch, size), (batch, size, self.count)
        ranks, top_ids = jnp.zeros(flat, jnp.int32), jnp.zeros(deep, jnp.int32)
        return Logprobs(jnp.zeros(flat), ranks, top_ids, jnp.zeros(deep), self.mode)


def check_mode(mode: str) -> None:
    """Raise ValueError if the mode is unknown."""
    if mode not in MODES:
        raise ValueError(
            f"logprobs_mode={shown(mode)} must be one of {', '.join(map(repr, MODES))}."
        )


def score(logits: Array, tokens: Array, count: int, mode: Mode) -> Logprobs:
    """Score tokens, int32 [B, M], and list ``count`` likeliest ones, under logits [B, M, V].

    The logits are raw or processed, as ``mode`` requires.
    """
    logits = logits.astype(jnp.float32)
    logits = jnp.where(jnp.isnan(logits), -jnp.inf, logits)  # as in process_logits
    values = sampling.log_probs(logits) if mode.endswith("logprobs") else logits
    chosen = jnp.take_along_axis(values, tokens[..., None], -1)
    rank = 1 + (values > chosen).sum(-1, dtype=jnp.int32)
    if count:
        top, top_ids = sampling.top_k(values, count)
    else:
        top, top_ids = jnp.zeros((*tokens.shape, 0)), jnp.zeros((*tokens.shape, 0), jnp.int32)
    return Logprobs(chosen[..., 0], rank, top_ids.astype(jnp.int32), top, mode)


def of_emitted(
    scoring: Scoring,
    settings: Sampling,
    history: History,
    draft: Draft,
    tree: Tree,
    verdict: Verdict,
    logits: Array,
) -> Logprobs:
    """Score the tokens [B, K+1] that a verdict emits after ``history``.

    ``logits`` [B, N, V] are the target's raw logits of all nodes.
    """
    take = lambda x: jnp.take_along_axis(x, verdict.path[..., None], 1)
    at_path = take(logits)
    if scoring.mode.startswith("processed"):
        branches = Branches.of_draft(history, draft, tree)
        branches = branches.replace(drafted=take(branches.drafted))
        at_path = logits_processors.apply(at_path, settings.processors, branches)
        at_path = sampling.process_logits(at_path, sampling.greedy_at_one(settings))
    return score(at_path, emitted_tokens(draft, verdict), scoring.count, scoring.mode)


def write(scores: Logprobs, new: Logprobs, start: Array) -> Logprobs:
    """Write new scores [B, M] from position ``start`` [B] on."""
    rows = jnp.arange(len(start))[:, None]
    positions = start[:, None] + jnp.arange(new.rank.shape[1])
    return jax.tree.map(
        lambda old, new: old.at[rows, positions].set(new.astype(old.dtype), mode="drop"),
        scores,
        new,
    )

"""How likely the target found each token that was generated, and which others it found likelier.

The logits are those that the verifying pass computed anyway, at the nodes of the accepted path: so
a text has the numbers that plain decoding would have given it, up to rounding.
"""

import dataclasses
from typing import Literal, get_args

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax

from jspec.core import logits_processors, sampling
from jspec.core.branches import Branches
from jspec.core.history import emitted_tokens
from jspec.core.types import Array, Draft, History, Sampling, Tree, Verdict
from jspec.util.messages import shown
from jspec.util.values import is_whole

# Before or after the request has changed them, as log-probabilities or as they come.
Mode = Literal["raw_logprobs", "processed_logprobs", "raw_logits", "processed_logits"]
MODES = get_args(Mode)


@struct.dataclass
class Logprobs:
    """Of tokens [B, T] (on the host: [n]), with the k likeliest beside each."""

    chosen: Array  # [B, T] float32, of the token itself
    rank: Array  # [B, T] int32, 1 for the likeliest; of tokens that tie, the same
    top_ids: Array  # [B, T, k] int32, likeliest first
    top: Array  # [B, T, k] float32
    mode: Mode = struct.field(pytree_node=False, default="raw_logprobs")

    @property
    def count(self) -> int:
        """k."""
        return self.top.shape[-1]

    def first(self, count: int) -> "Logprobs":
        """Of the first tokens of one row [n]."""
        return jax.tree.map(lambda part: part[:count], self)

    def behind(self, count: int) -> "Logprobs":
        """Of the tokens of one row [n] but the first."""
        return jax.tree.map(lambda part: part[count:], self)


@dataclasses.dataclass(frozen=True)
class Scoring:
    """What a batch is to be told about its tokens.

    Attributes:
      count: k, tokens beside each; 0 for the token alone.
      prompt: whether tokens of the prompt are scored too, by the raw logits: they were not drawn.
      mode: which numbers.

    Raises:
      ValueError: a value is out of range.
    """

    count: int = 0
    prompt: bool = False
    mode: Mode = "raw_logprobs"

    def __post_init__(self):
        if not is_whole(self.count, 0):
            raise ValueError(f"count={shown(self.count)} must be a whole number, 0 or more.")
        check_mode(self.mode)

    def check_fit(self, vocab_size: int) -> None:
        """Raises ValueError if more tokens are wanted beside each than there are."""
        if self.count > vocab_size:
            raise ValueError(
                f"count={self.count} of Scoring must be at most {vocab_size}, the vocabulary."
            )

    def empty(self, batch: int, size: int) -> Logprobs:
        """Room for ``size`` tokens a row."""
        flat, deep = (batch, size), (batch, size, self.count)
        return Logprobs(
            jnp.zeros(flat),
            jnp.zeros(flat, jnp.int32),
            jnp.zeros(deep, jnp.int32),
            jnp.zeros(deep),
            self.mode,
        )


def check_mode(mode: str) -> None:
    """Raises ValueError if there is no such mode."""
    if mode not in MODES:
        raise ValueError(
            f"logprobs_mode={shown(mode)} must be one of {', '.join(map(repr, MODES))}."
        )


def score(logits: Array, said: Array, count: int, mode: Mode) -> Logprobs:
    """Of tokens ``said`` [B, M] under logits [B, M, V], with the ``count`` likeliest.

    Args:
      logits: one row for each token, processed already if they are to be.
      said: int32 ids.
      count: static; 0 for the tokens alone.
      mode: whether log-probabilities are wanted, or logits.
    """
    logits = logits.astype(jnp.float32)
    logits = jnp.where(jnp.isnan(logits), -jnp.inf, logits)  # as tokens are drawn
    values = sampling.log_probs(logits) if mode.endswith("logprobs") else logits
    chosen = jnp.take_along_axis(values, said[..., None], -1)
    rank = 1 + (values > chosen).sum(-1, dtype=jnp.int32)
    if count:
        top, top_ids = lax.top_k(values, count)
    else:
        top, top_ids = jnp.zeros((*said.shape, 0)), jnp.zeros((*said.shape, 0), jnp.int32)
    return Logprobs(chosen[..., 0], rank, top_ids.astype(jnp.int32), top, mode)


def record(
    kept: Logprobs,
    settings: Sampling,
    history: History,
    draft: Draft,
    tree: Tree,
    verdict: Verdict,
    logits: Array,
) -> Logprobs:
    """``kept`` with the tokens that a verdict emits behind ``history``.

    ``logits`` [B, N, V] are the target's raw ones of all nodes.
    """
    take = lambda x: jnp.take_along_axis(x, verdict.path[..., None], 1)
    at_path = take(logits)
    if kept.mode.startswith("processed"):
        branches = Branches.of_draft(history, draft, tree)
        branches = branches.replace(drafted=take(branches.drafted))
        at_path = logits_processors.apply(at_path, settings.processors, branches)
        at_path = sampling.process_logits(at_path, sampling.greedy_at_one(settings))
    emitted = emitted_tokens(draft, verdict)
    return write(kept, score(at_path, emitted, kept.count, kept.mode), history.length)


def write(kept: Logprobs, fresh: Logprobs, start: Array) -> Logprobs:
    """``kept`` with ``fresh`` ones [B, M] from position ``start`` [B] on."""
    rows = jnp.arange(len(start))[:, None]
    places = start[:, None] + jnp.arange(fresh.rank.shape[1])
    put = lambda old, new: old.at[rows, places].set(new.astype(old.dtype), mode="drop")
    return jax.tree.map(put, kept, fresh)

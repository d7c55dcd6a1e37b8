"""What DSpark heads have on top of DFlash's: a word with the token before, and a guess at success.

The slots of a DFlash block do not see what the others say. DSpark (arXiv 2607.05147) adds to the
logits of a slot a bias by the token before it, of low rank, so that drafting one token after the
other costs two thin matrices a token and no pass of the blocks: ::

    vanilla  bias = W2 w                  w = W1[token before]
    gated    bias = W2 (g * w)            g = sigmoid (G [h; w])      h: what the slot's blocks gave
    rnn      bias = W2 tanh (o)           s' = g * s + (1 - g) * tanh (c), from s = 0 at the root
                                          [g; c; o] = J [s; w; h], g through a sigmoid

And from h, and w if it was so trained, a guess at the chance that the slot's token will be
accepted. It does not depend on that token, so a draft may end where chances are poor and what is
kept of it still follows the recorded law.
"""

import dataclasses
from typing import Literal

import jax
import jax.numpy as jnp
from flax import struct

from jspec import ops
from jspec.core.types import Array
from jspec.models.decoder import Linear, affine

MARKOV = ("vanilla", "gated", "rnn")


@dataclasses.dataclass(frozen=True)
class SparkConfig:
    """Sizes and switches; static and hashable.

    Attributes:
      rank: R, width of the token before; 0 for no bias.
      markov: how the bias is made.
      confidence: whether chances of acceptance are guessed.
      confidence_sees_token: whether that guess reads the token before, too.

    Raises:
      ValueError: the settings contradict each other.
    """

    rank: int = 256
    markov: Literal["vanilla", "gated", "rnn"] = "vanilla"
    confidence: bool = False
    confidence_sees_token: bool = False

    def __post_init__(self):
        if self.markov not in MARKOV:
            raise ValueError(f"markov={self.markov!r} must be one of {', '.join(MARKOV)}.")
        if self.rank < 0:
            raise ValueError(f"rank={self.rank} must be at least 0.")
        if self.confidence_sees_token and not (self.rank and self.confidence):
            raise ValueError(
                "confidence_sees_token=True needs confidence=True and a rank of at least 1."
            )

    def sizes(self, hidden: int) -> dict[str, tuple[int, int]]:
        """Inputs and outputs of the matrices with a bias, by their fields."""
        found, rank = {}, self.rank
        if rank and self.markov != "vanilla":
            gated = self.markov == "gated"
            found["mix"] = (hidden + rank, rank) if gated else (2 * rank + hidden, 3 * rank)
        if self.confidence:
            found["confidence"] = (hidden + rank * self.confidence_sees_token, 1)
        return found


@struct.dataclass
class SparkParams:
    """Weights; None where the head has no such tensor."""

    before: Array | None = None  # W1 [V, R]
    bias: Array | None = None  # W2 [R, Vd]
    mix: Array | None = None  # G [D + R, R] or J [2R + D, 3R]
    mix_bias: Array | None = None  # [R] or [3R]
    confidence: Array | None = None  # [D, 1] or [D + R, 1]
    confidence_bias: Array | None = None  # [1]


def init_params(
    key: Array,
    config: SparkConfig,
    hidden: int,
    target_vocab: int,
    vocab: int,
    dtype: jnp.dtype = jnp.float32,
) -> SparkParams:
    """Random weights, but that no bias is added and all chances are even at first."""
    before_key, mix_key = jax.random.split(key)
    made = {}
    if config.rank:
        made["before"] = 0.02 * jax.random.normal(before_key, (target_vocab, config.rank))
        made["bias"] = jnp.zeros((config.rank, vocab))
    for name, (inputs, outputs) in config.sizes(hidden).items():
        weight = 0.02 * jax.random.normal(mix_key, (inputs, outputs))
        made[name] = weight * (name == "mix")
        made[f"{name}_bias"] = jnp.zeros((outputs,))
    return SparkParams(**{name: weight.astype(dtype) for name, weight in made.items()})


def start(config: SparkConfig, batch: int, dtype: jnp.dtype) -> Array:
    """The state before the root, [B, 1, R] (rnn) or [B, 1, 0]."""
    recurrent = config.rank and config.markov == "rnn"
    return jnp.zeros((batch, 1, config.rank if recurrent else 0), dtype)


def advance(
    params: SparkParams,
    config: SparkConfig,
    state: Array,
    hidden: Array,
    before: Array,
    *,
    linear: Linear = ops.linear,
) -> tuple[Array, Array]:
    """One slot further.

    Args:
      params: weights.
      config: sizes.
      state: [..., R] (rnn) or [..., 0], what ``start`` or the slot before gave.
      hidden: h [..., D] of the slot.
      before: int32 [...], target ids of the token before it.
      linear: the product of matrices.

    Returns:
      The new state, and the bias [..., Vd] in float32; [..., 1] of zeros where there is none.
    """
    if not config.rank:
        return state, jnp.zeros((*hidden.shape[:-1], 1))
    w = params.before[before].astype(hidden.dtype)
    if config.markov == "gated":
        joined = jnp.concatenate([hidden, w], -1)
        gate = affine(joined, params.mix, params.mix_bias, linear)
        w = jax.nn.sigmoid(gate).astype(w.dtype) * w
    elif config.markov == "rnn":
        joined = jnp.concatenate([state, w, hidden], -1)
        mixed = affine(joined, params.mix, params.mix_bias, linear)
        gate, candidate, out = jnp.split(mixed, 3, -1)
        gate = jax.nn.sigmoid(gate)
        state = (gate * state + (1 - gate) * jnp.tanh(candidate)).astype(state.dtype)
        w = jnp.tanh(out).astype(w.dtype)
    return state, linear(w, params.bias)


def confidence(
    params: SparkParams,
    config: SparkConfig,
    hidden: Array,
    before: Array,
    *,
    linear: Linear = ops.linear,
) -> Array:
    """Logits [...] of the chance that a slot's token is accepted; arguments as for ``advance``."""
    if config.confidence_sees_token:
        hidden = jnp.concatenate([hidden, params.before[before].astype(hidden.dtype)], -1)
    return affine(hidden, params.confidence, params.confidence_bias, linear)[..., 0]

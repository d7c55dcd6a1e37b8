"""The extension of DSpark heads over DFlash: a bias by the previous token, and a confidence.

The slots of a DFlash block do not see the tokens drawn in other slots. DSpark (arXiv 2607.05147)
adds a low-rank bias by the previous token to the logits of a slot. So sequential drafting costs two
thin matrices per token, and no pass of the blocks: ::

    vanilla  bias = W2 w                  w = W1[token before]
    gated    bias = W2 (g * w)            g = sigmoid (G [h; w])      h: output of the blocks
    rnn      bias = W2 tanh (o)           s' = g * s + (1 - g) * tanh (c), from s = 0 at the root
                                          [g; c; o] = J [s; w; h], g through a sigmoid

The confidence estimates the acceptance probability of the slot's token from h, and from w if it was
trained so. It does not depend on the token itself. So a draft may end where it is low, and the
remaining tokens still follow the recorded distributions. Drafter: ``jspec.drafters.dflash``.
"""

import dataclasses
from typing import Literal

import jax
import jax.numpy as jnp
from flax import struct

from jspec import ops
from jspec.core.types import Array
from jspec.models.blocks.arithmetic import Linear, affine

MARKOV = ("vanilla", "gated", "rnn")


@dataclasses.dataclass(frozen=True)
class SparkConfig:
    """Sizes and switches; static and hashable."""

    rank: int = 256  # R, width of the previous token's vector; 0 for no bias
    markov: Literal["vanilla", "gated", "rnn"] = "vanilla"  # how the bias is computed
    confidence: bool = False
    confidence_sees_token: bool = False  # the confidence reads the previous token too

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
        """Return the shapes of the matrices that have a bias, by field name."""
        shapes, rank = {}, self.rank
        if rank and self.markov != "vanilla":
            gated = self.markov == "gated"
            shapes["mix"] = (hidden + rank, rank) if gated else (2 * rank + hidden, 3 * rank)
        if self.confidence:
            shapes["confidence"] = (hidden + rank * self.confidence_sees_token, 1)
        return shapes


@struct.dataclass
class SparkParams:
    """Weights; None for tensors that the head lacks."""

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
    """Return random weights with which the bias is 0 and the confidence 0.5."""
    before_key, mix_key = jax.random.split(key)
    weights = {}
    if config.rank:
        weights["before"] = 0.02 * jax.random.normal(before_key, (target_vocab, config.rank))
        weights["bias"] = jnp.zeros((config.rank, vocab))
    for name, (inputs, outputs) in config.sizes(hidden).items():
        weight = 0.02 * jax.random.normal(mix_key, (inputs, outputs))
        weights[name] = weight * (name == "mix")
        weights[f"{name}_bias"] = jnp.zeros((outputs,))
    return SparkParams(**{name: weight.astype(dtype) for name, weight in weights.items()})


def start(config: SparkConfig, batch: int, dtype: jnp.dtype) -> Array:
    """Return the state before the root, [B, 1, R] (rnn) or [B, 1, 0]."""
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
    """Return the state after a slot, and its bias float32 [..., Vd] (zeros [..., 1] without one).

    ``state`` [..., R] (rnn) or [..., 0] is from ``start`` or the slot before, ``hidden`` [..., D]
    is h, and ``before`` int32 [...] are target ids of the previous token.
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
    """Return logits [...] of the acceptance probability of a slot; arguments as for ``advance``."""
    if config.confidence_sees_token:
        hidden = jnp.concatenate([hidden, params.before[before].astype(hidden.dtype)], -1)
    return affine(hidden, params.confidence, params.confidence_bias, linear)[..., 0]

"""Multi-head latent attention (arXiv 2405.04434, section 2.1): DeepSeek's kind of attention.

Keys and values of all heads are made from one latent of ``kv_rank`` numbers a token, and all heads
share one key of ``rope_dim`` numbers that is rotated: ::

    c = norm(W_c x)      k_h = [W_uk_h c; rotate(W_kr x)]      v_h = W_uv_h c

Only [c; rotated key] is cached, once for all heads. It stays latent here: a query moves to the
latent's side instead (q W_uk), and what attention mixes is latents, of which W_uv makes the values
after. So to attention this is one key head whose keys are the cache and whose values are the same
buffer, the rotated part of the mixture being dropped: at DeepSeek-V3's sizes that mixes 576 numbers
where 512 would do, in return for a cache that is stored and read as it is. For a few tokens, where
reading the cache is what costs, this is the cheap form; over a long prompt it takes 3.4 times the
products of the expanded one.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp
from flax import struct

from jspec.core.types import Array
from jspec.models import rope as rope_lib
from jspec.models.layers import normal, product, rms_norm, rows_at

_NORM_EPS = 1e-6  # of the latents' norms, whatever config.json says of the others


@dataclasses.dataclass(frozen=True)
class MlaConfig:
    """Sizes of latent attention; static and hashable.

    Attributes:
      kv_rank: width of the latent.
      q_rank: width of the queries' latent; None where they are projected at once.
      nope_dim: features of a head's query and key that are not rotated.
      rope_dim: those that are.
      value_dim: features of a head's value.
      interleaved: whether the files pair neighbours, 2j and 2j + 1, for the rotation.
      mscale: YaRN's ``mscale_all_dim``, which scales the scores; 0 for none.
    """

    kv_rank: int
    q_rank: int | None
    nope_dim: int
    rope_dim: int
    value_dim: int
    interleaved: bool = True
    mscale: float = 0.0

    @property
    def head_dim(self) -> int:
        """Features of a head's query."""
        return self.nope_dim + self.rope_dim

    @property
    def width(self) -> int:
        """Numbers that are cached a token."""
        return self.kv_rank + self.rope_dim


@struct.dataclass
class MlaParams:
    """Weights of latent attention, but for its output projection."""

    down: Array  # [D, q_rank + kv_rank + rope_dim]; without q_rank where there is none
    q_up: Array  # [q_rank or D, H * (nope_dim + rope_dim)]
    kv_norm: Array  # [kv_rank]
    kv_up: Array  # [H * (nope_dim + value_dim), kv_rank], as the files have it
    q_norm: Array | None = None  # [q_rank]


def init_params(
    key: Array, mla: MlaConfig, hidden: int, num_heads: int, dtype: jnp.dtype
) -> MlaParams:
    """Random weights, as in ``decoder.init_params``."""
    keys, rank = jax.random.split(key, 3), mla.q_rank or 0
    return MlaParams(
        down=normal(keys[0], (hidden, rank + mla.width), dtype),
        q_up=normal(keys[1], (rank or hidden, num_heads * mla.head_dim), dtype),
        kv_norm=jnp.ones((mla.kv_rank,), dtype),
        kv_up=normal(keys[2], (num_heads * (mla.nope_dim + mla.value_dim), mla.kv_rank), dtype),
        q_norm=jnp.ones((rank,), dtype) if rank else None,
    )


def attention(layer, config, x, cos, sin, index, attend, linear, wanted=None) -> Array:
    """A block's attention [B, T, D] for its normed input x [B, T, D].

    Of the rows ``wanted`` [B, M] alone, if they are given: [B, M, D].
    """
    mla, weights = config.mla, layer.mla
    query, key = _latent_heads(mla, weights, x, cos, sin, linear)
    query = rows_at(query, wanted)
    up = weights.kv_up.reshape(config.num_heads, -1, mla.kv_rank)
    moved = product("bthn,hnr->bthr", query[..., : mla.nope_dim], up[:, : mla.nope_dim])
    query = jnp.concatenate([moved, query[..., mla.nope_dim :].astype(moved.dtype)], -1)
    # ``attend`` divides by the root of the width that it sees.
    query = query * (_score_scale(config) * mla.width**0.5)
    key = key.swapaxes(1, 2)
    mixed = attend(index, query.swapaxes(1, 2), key, key)[..., : mla.kv_rank]
    values = product("bhtr,hvr->bthv", mixed, up[:, mla.nope_dim :])
    return linear(values.reshape(*query.shape[:2], -1), layer.output).astype(x.dtype)


def _latent_heads(mla, weights, x, cos, sin, linear) -> tuple[Array, Array]:
    """Queries [B, T, H, head_dim] and the one key [B, T, 1, width], rotated parts last."""
    low = linear(x, weights.down).astype(x.dtype)
    rank = mla.q_rank or 0
    q_low, latent, turned = jnp.split(low, [rank, rank + mla.kv_rank], axis=-1)
    q_low = rms_norm(q_low, weights.q_norm, _NORM_EPS) if rank else x
    q = linear(q_low, weights.q_up)
    q = q.reshape(*q.shape[:2], -1, mla.head_dim)
    q, q_turned = q[..., : mla.nope_dim], q[..., mla.nope_dim :]
    turn = lambda part: rope_lib.rotate(_paired(part, mla.interleaved), cos, sin)
    latent = rms_norm(latent, weights.kv_norm, _NORM_EPS)[:, :, None]
    key = jnp.concatenate([latent, turn(turned[:, :, None]).astype(latent.dtype)], -1)
    return jnp.concatenate([q, turn(q_turned)], -1), key


def _paired(x: Array, interleaved: bool) -> Array:
    """Features in the order that ``rope.rotate`` pairs; queries and keys change alike."""
    return jnp.concatenate([x[..., 0::2], x[..., 1::2]], -1) if interleaved else x


def _score_scale(config) -> float:
    """Factor on the scores: YaRN's temperature is squared, being that of query and key."""
    mla, factor = config.mla, config.rope.factor
    growth = 1.0
    if mla.mscale and config.rope.kind != "default" and factor > 1:
        growth = 0.1 * mla.mscale * math.log(factor) + 1.0
    return mla.head_dim**-0.5 * growth * growth

"""Multi-head latent attention of DeepSeek (arXiv 2405.04434, section 2.1).

The keys and values of all heads are projections of one latent with ``kv_rank`` features per token.
All heads share one rotated key of ``rope_dim`` features: ::

    c = norm(W_c x)      k_h = [W_uk_h c; rotate(W_kr x)]      v_h = W_uv_h c

Only [c; rotated key] is cached, once for all heads. Queries are projected to the latent space
(q W_uk), attention mixes latents, and W_uv then projects the mixture to values. So attention sees
one key head whose keys and values are the same buffer; the rotated part of the mixture is dropped.
At DeepSeek-V3's sizes this mixes 576 features instead of 512, but needs no copy of the cache. For a
few tokens, reading the cache dominates and this form is cheap. Over a long prompt it takes 3.4
times the multiplications of the expanded form.
"""

import dataclasses
import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import struct

from jspec.core.packing import Packing
from jspec.core.types import Array
from jspec.core.weights import as_array
from jspec.models.blocks import rope as rope_lib
from jspec.models.blocks.arithmetic import normal, product, rows_at
from jspec.models.blocks.norms import rms_norm

_NORM_EPS = 1e-6  # of the latents' norms; config.json's value is for the others


@dataclasses.dataclass(frozen=True)
class MlaConfig:
    """Sizes of latent attention; static and hashable."""

    kv_rank: int  # width of the latent
    q_rank: int | None  # width of the queries' latent; None for queries without one
    nope_dim: int  # features of a head's query and key that are not rotated
    rope_dim: int  # features of a head's query and key that are rotated
    value_dim: int  # features of a head's value
    interleaved: bool = True  # the rotation pairs features 2j and 2j + 1 in the checkpoint
    mscale: float = 0.0  # YaRN's ``mscale_all_dim``, which scales the scores; 0 for none

    @property
    def head_dim(self) -> int:
        """Number of features of a head's query."""
        return self.nope_dim + self.rope_dim

    @property
    def width(self) -> int:
        """Number of features cached per token."""
        return self.kv_rank + self.rope_dim


@struct.dataclass
class MlaParams:
    """Weights of latent attention without its output projection."""

    down: Array  # [D, q_rank + kv_rank + rope_dim]; q_rank counts 0 if None
    q_up: Array  # [q_rank or D, H * (nope_dim + rope_dim)]
    kv_norm: Array  # [kv_rank]
    kv_up: Array  # [H * (nope_dim + value_dim), kv_rank], the layout of checkpoints
    q_norm: Array | None = None  # [q_rank]


def init_params(
    key: Array, mla: MlaConfig, hidden: int, num_heads: int, dtype: jnp.dtype
) -> MlaParams:
    """Return random weights, as in ``decoder.init_params``."""
    keys, rank = jax.random.split(key, 3), mla.q_rank or 0
    return MlaParams(
        down=normal(keys[0], (hidden, rank + mla.width), dtype),
        q_up=normal(keys[1], (rank or hidden, num_heads * mla.head_dim), dtype),
        kv_norm=jnp.ones((mla.kv_rank,), dtype),
        kv_up=normal(keys[2], (num_heads * (mla.nope_dim + mla.value_dim), mla.kv_rank), dtype),
        q_norm=jnp.ones((rank,), dtype) if rank else None,
    )


def attention(
    layer, config, x, cos, sin, index, attend, linear, rows=None, packing: Packing | None = None
) -> Array:
    """Return the attention output [B, T, D] of a block for its normed input x [B, T, D].

    ``rows`` [B, M] restricts the queries, and the output to [B, M, D].
    """
    mla, weights = config.mla, layer.mla
    over = _over_all if packing is None else packing.over
    query, key = _latent_heads(mla, weights, x, cos, sin, linear)
    query = rows_at(query, rows)
    up = as_array(weights.kv_up).reshape(config.num_heads, -1, mla.kv_rank)
    to_latent = functools.partial(product, "bthn,hnr->bthr", weights=up[:, : mla.nope_dim])
    latent = over(to_latent, query[..., : mla.nope_dim])
    query = jnp.concatenate([latent, query[..., mla.nope_dim :].astype(latent.dtype)], -1)
    # Undo the scale of ``attend``, which divides by the square root of the width of its queries.
    query = query * (_score_scale(config) * mla.width**0.5)
    key = key.swapaxes(1, 2)
    mixed = attend(index, query.swapaxes(1, 2), key, key)[..., : mla.kv_rank]
    to_values = functools.partial(product, "bthr,hvr->bthv", weights=up[:, mla.nope_dim :])
    values = over(to_values, mixed.swapaxes(1, 2))
    return linear(values.reshape(*query.shape[:2], -1), layer.output).astype(x.dtype)


def _over_all(function: Callable[[Array], Array], x: Array) -> Array:
    return function(x)


def _latent_heads(mla, weights, x, cos, sin, linear) -> tuple[Array, Array]:
    """Return queries [B, T, H, head_dim] and the key [B, T, 1, width], rotated parts last."""
    low = linear(x, weights.down).astype(x.dtype)
    rank = mla.q_rank or 0
    q_low, latent, k_rope = jnp.split(low, [rank, rank + mla.kv_rank], axis=-1)
    q_low = rms_norm(q_low, weights.q_norm, _NORM_EPS) if rank else x
    q = linear(q_low, weights.q_up)
    q = q.reshape(*q.shape[:2], -1, mla.head_dim)
    q, q_rope = q[..., : mla.nope_dim], q[..., mla.nope_dim :]
    rotate = lambda part: rope_lib.rotate(_paired(part, mla.interleaved), cos, sin)
    latent = rms_norm(latent, weights.kv_norm, _NORM_EPS)[:, :, None]
    key = jnp.concatenate([latent, rotate(k_rope[:, :, None]).astype(latent.dtype)], -1)
    return jnp.concatenate([q, rotate(q_rope)], -1), key


def _paired(x: Array, interleaved: bool) -> Array:
    """Reorder features to the pairs of ``rope.rotate``, for queries and keys alike."""
    return jnp.concatenate([x[..., 0::2], x[..., 1::2]], -1) if interleaved else x


def _score_scale(config) -> float:
    """Return the factor on the scores; YaRN's is squared because it scales query and key."""
    mla, factor = config.mla, config.rope.factor
    growth = 1.0
    if mla.mscale and config.rope.kind != "default" and factor > 1:
        growth = 0.1 * mla.mscale * math.log(factor) + 1.0
    return mla.head_dim**-0.5 * growth * growth

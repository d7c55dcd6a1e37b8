"""Standard attention."""

import jax.numpy as jnp

from jspec.core.types import Array
from jspec.models.blocks import rope as rope_lib
from jspec.models.blocks.arithmetic import affine, rows_at


def attention(layer, config, x, cos, sin, index, attend, linear, rows=None) -> Array:
    """Return the attention output [B, T, D] of a block for its normed input x.

    x is [B, T, rows of ``layer.qkv``], which is wider than D in some drafters.

    ``rows`` [B, M] restricts the queries, and the output to [B, M, D].
    """
    batch, length, _ = x.shape
    fused = affine(x, layer.qkv, layer.qkv_bias, linear)
    heads = fused.reshape(batch, length, -1, config.head_dim)
    queries = config.qkv_sizes[0] // config.head_dim
    q, k, v = jnp.split(heads, [queries, queries + config.num_kv_heads], axis=2)
    if config.qk_norm:
        q, k = config.norm(q, layer.q_norm), config.norm(k, layer.k_norm)
    q, k = rope_lib.rotate(q, cos, sin), rope_lib.rotate(k, cos, sin)
    q = rows_at(q, rows)
    mixed = attend(index, *(part.swapaxes(1, 2) for part in (q, k, v)))
    mixed = mixed.swapaxes(1, 2).reshape(batch, q.shape[1], -1)
    return affine(mixed, layer.output, layer.output_bias, linear).astype(x.dtype)

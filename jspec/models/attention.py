"""Attention of the usual kind, and what every kind attends to: a committed prefix and new nodes."""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from jspec import ops
from jspec.core import kv_cache, trees
from jspec.core.types import Array, Tree
from jspec.models import rope as rope_lib
from jspec.models.layers import affine, rows_at

# attend(layer, q [B, H, M, head_dim], k and v [B, Hkv, T, head_dim]) -> [B, H, M, head_dim]
#
# M is T, or fewer where only some rows are wanted of a layer. The scores are divided by the root of
# head_dim. Of a layer whose cache keeps one buffer, k is v.
Attend = Callable[[int, Array, Array, Array], Array]


def attention(layer, config, x, cos, sin, index, attend, linear, wanted=None) -> Array:
    """A block's attention [B, T, D] for its normed input x [B, T, inputs of ``layer.qkv``].

    Of the rows ``wanted`` [B, M] alone, if they are given: [B, M, D].
    """
    batch, length, _ = x.shape
    fused = affine(x, layer.qkv, layer.qkv_bias, linear)
    heads = fused.reshape(batch, length, -1, config.head_dim)
    queries = config.qkv_sizes[0] // config.head_dim
    q, k, v = jnp.split(heads, [queries, queries + config.num_kv_heads], axis=2)
    if config.qk_norm:
        q, k = config.norm(q, layer.q_norm), config.norm(k, layer.k_norm)
    q, k = rope_lib.rotate(q, cos, sin), rope_lib.rotate(k, cos, sin)
    q = rows_at(q, wanted)
    mixed = attend(index, *(part.swapaxes(1, 2) for part in (q, k, v)))
    mixed = mixed.swapaxes(1, 2).reshape(batch, q.shape[1], -1)
    return affine(mixed, layer.output, layer.output_bias, linear).astype(x.dtype)


def attention_over(
    cache: kv_cache.KVCache,
    tree: Tree,
    *,
    scale: float | None = None,
    windows: tuple[int | None, ...] = (),
    implementation: str | None = None,
    wanted: Array | None = None,
) -> tuple[Attend, list[kv_cache.Entry]]:
    """Attention over a committed prefix and a tree, for any network that calls it once a layer.

    Args:
      cache: the committed prefix, read only.
      tree: shape of the nodes, with a batch axis.
      scale: factor on the scores; None for ``head_dim ** -0.5``.
      windows: sliding window of each layer; () for none.
      implementation: of ``ops.attention``; None for the device's default.
      wanted: int32 [B, M], the nodes that the last layer has queries of; None for all.

    Returns:
      ``attend``, and the list of entries, N slots each, one a layer, that it fills.
    """
    positions = cache.length[:, None] + tree.depth
    fresh = list(cache.layers)  # replaced one by one
    last = len(fresh) - 1

    def attend(index: int, q: Array, k: Array, v: Array) -> Array:
        entry = cache.layers[index]
        # As the cache will hold them: a token's logits must not depend on what is committed yet.
        fresh[index] = new = entry.holding(k, v)
        window = windows[index] if windows else None
        near = tree.ancestors if window is None else trees.within(tree, window)
        asking = wanted if index == last else None
        return ops.attention(
            q,
            new.k,
            new.v,
            rows_at(near, asking),
            entry.k,
            entry.v,
            cache.length,
            scale=q.shape[-1] ** -0.5 if scale is None else scale,
            window=window,
            positions=rows_at(positions, asking),
            implementation=implementation,
        )

    return attend, fresh


def attention_beside(
    cache: kv_cache.KVCache,
    side: tuple[kv_cache.Entry, ...],
    slot: Array,
    mask: Array,
    positions: Array,
    *,
    windows: tuple[int | None, ...] = (),
    implementation: str | None = None,
) -> tuple[Attend, list[kv_cache.Entry]]:
    """Attention over a committed prefix and side buffers, for the steps of a drafting network.

    Args:
      cache: the committed prefix, read only.
      side: one entry a layer, M slots each: this round's keys and values so far.
      slot: int32 [], where in ``side`` the n new entries go.
      mask: bool [B, n, M], which side slots each token sees, its own included.
      positions: int32 [B, n].
      windows: as in ``attention_over``.
      implementation: as in ``attention_over``.

    Returns:
      ``attend``, and the list of side buffers that it updates, one a layer.
    """
    side, seen = list(side), trees.pack_bits(mask)

    def attend(index: int, q: Array, k: Array, v: Array) -> Array:
        put = lambda buffer, new: jax.lax.dynamic_update_slice_in_dim(buffer, new, slot, axis=2)
        near = side[index] = jax.tree.map(put, side[index], side[index].holding(k, v))
        window = windows[index] if windows else None
        entry = cache.layers[index]
        return ops.attention(
            q,
            near.k,
            near.v,
            seen,
            entry.k,
            entry.v,
            cache.length,
            scale=q.shape[-1] ** -0.5,
            window=window,
            positions=positions,
            implementation=implementation,
        )

    return attend, side

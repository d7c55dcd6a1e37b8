"""The specification of tree attention: one dense softmax over ``[prefix, tree]``."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jspec.core.entries import numbers
from jspec.core.narrow import Narrow

Array = jax.Array


def tree_attention(
    q: Array,
    tree_k: Array,
    tree_v: Array,
    ancestors: Array,
    cache_k: Array | Narrow | None,
    cache_v: Array | Narrow | None,
    length: Array,
    positions: Array | None = None,
    table: Array | None = None,
    first_only: Array | None = None,
    sinks: Array | None = None,
    *,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
) -> Array:
    """Attend with N nodes to a committed prefix and to M nodes, in float32 or wider.

    Args:
      q: queries [B, H, N, D].
      tree_k: keys of the nodes [B, Hkv, M, D]; M differs from N if earlier nodes are in the block.
      tree_v: their values.
      ancestors: uint32 [B, N, W]; node n sees node m if bit ``m % 32`` of word ``m // 32`` is set.
        Every node sees at least one.
      cache_k: committed keys [B, Hkv, S, D], or None when there is no prefix. With ``table``, a
        pool [P, Hkv, page, D]; uint16 holds the bits of bfloat16, and ``Narrow`` 8 bits a number.
      cache_v: their values.
      length: committed slots of each row, int32 [B].
      positions: positions of the queries, int32 [B, N]; needed with ``window``.
      table: pages of each row, int32 [B, M]; None for a cache without pages.
      first_only: bool [B], rows of which only the result of the first node is used; None for none.
        A back-end may leave the results of their other nodes undefined.
      sinks: [1, H, 1, 1], the score of a key of each head that all nodes see and whose value is 0
        (gpt-oss, after arXiv 2309.17453), unscaled and without a cap; None for none.
      scale: factor on the scores.
      window: a query at position p sees the prefix at positions > p - window. ``ancestors`` must
        apply the window to the tree.
      soft_cap: scores x become ``soft_cap * tanh(x / soft_cap)`` (Gemma 2, arXiv 2408.00118).

    Returns:
      [B, H, N, D] in float32 (or the wider type of q).
    """
    del first_only  # the results of all nodes are computed
    batch, heads, nodes, _ = q.shape
    dtype, group = jnp.promote_types(q.dtype, jnp.float32), heads // tree_k.shape[1]
    bit = np.arange(tree_k.shape[2], dtype=np.uint32)
    seen = (ancestors[..., bit // 32] >> (bit % 32)) & 1 > 0  # [B, N, M]
    keys, values = tree_k.astype(dtype), tree_v.astype(dtype)
    if cache_k is not None:
        prefix_k, prefix_v = (_prefix(cache, table).astype(dtype) for cache in (cache_k, cache_v))
        slot = jnp.arange(prefix_k.shape[2])
        stored = jnp.broadcast_to(slot < length[:, None, None], (batch, nodes, slot.size))
        if window is not None:
            stored &= slot > positions[:, :, None] - window
        seen = jnp.concatenate([stored, seen], axis=2)
        keys = jnp.concatenate([prefix_k, keys], axis=2)
        values = jnp.concatenate([prefix_v, values], axis=2)
    keys, values = (jnp.repeat(x, group, axis=1) for x in (keys, values))
    precise = lax.Precision.HIGHEST
    scores = jnp.einsum("bhnd,bhsd->bhns", q.astype(dtype), keys, precision=precise) * scale
    if soft_cap is not None:
        scores = soft_cap * jnp.tanh(scores / soft_cap)
    scores = jnp.where(seen[:, None], scores, -jnp.inf)
    if sinks is not None:
        sink = jnp.broadcast_to(sinks.astype(dtype), (*scores.shape[:-1], 1))
        scores = jnp.concatenate([scores, sink], axis=3)
    weights = jax.nn.softmax(scores, axis=-1)[..., : keys.shape[2]]
    return jnp.einsum("bhns,bhsd->bhnd", weights, values, precision=precise)


def _prefix(cache: Array | Narrow, table: Array | None) -> Array:
    """Return a cache [B, Hkv, S, D], its pages gathered; what is stored otherwise as numbers."""
    cache = numbers(cache)
    if table is not None:
        pages = jnp.moveaxis(cache[table], 1, 2)  # [B, Hkv, M, page, D]
        cache = pages.reshape(*pages.shape[:2], -1, pages.shape[-1])
    return lax.bitcast_convert_type(cache, jnp.bfloat16) if cache.dtype == jnp.uint16 else cache

"""The KV cache: one head-major buffer per layer, and a length per row.

    slot      0 ........ length-1 | length ...... S-1
              committed, readable | never read

The keys and values of a round's nodes stay outside the cache until the verdict; ``append`` is the
only write. It is one ``dynamic_update_slice`` per row, which XLA keeps in place on CPU, GPU and
TPU. The slice clamps at the end of the buffer, so allocate K + 1 slots more than needed.

With a ``table``, the buffers are pools of pages that all rows share: slot s of a row is slot
``s % page`` of page ``table[row, s // page]``. The host owns the table (``jspec.engine.pages``) and
attaches it for a launch: caches at rest have no table, and pools are kept apart from them.
"""

from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax

from jspec.core.types import Array, Verdict


@struct.dataclass
class AttentionKV:
    """The keys and values of one layer."""

    k: Array  # [B, Hkv, S, D]
    v: Array  # [B, Hkv, S, D]

    def holding(self, k: Array, v: Array) -> "AttentionKV":
        """Return an entry of k and v [B, Hkv, n, D] in this entry's dtypes."""
        return AttentionKV(k.astype(dtype_of(self.k)), v.astype(dtype_of(self.v)))


@struct.dataclass
class LatentKV:
    """The latents of one layer of latent attention, which serve as keys and values."""

    latent: Array  # [B, 1, S, D]

    @property
    def k(self) -> Array:
        """The keys."""
        return self.latent

    @property
    def v(self) -> Array:
        """The values, which are the same buffer."""
        return self.latent

    def holding(self, k: Array, v: Array) -> "LatentKV":
        """Return an entry of k [B, 1, n, D] in this entry's dtype; ``v`` is ``k``."""
        del v
        return LatentKV(k.astype(dtype_of(self.latent)))


Entry = AttentionKV | LatentKV


@struct.dataclass
class KVCache:
    """The entries of all layers, and the number of committed slots of each row.

    An entry is any pytree of buffers [B, Hkv, S, D] that share S. Hkv and D may be 1. With a table,
    they are pools [P, Hkv, page, D].
    """

    layers: tuple[Any, ...]
    length: Array  # [B] int32
    table: Array | None = None  # [B, M] int32, the pages of each row
    # Slots that every layer sees, the query's own included; None for all.
    window: int | None = struct.field(pytree_node=False, default=None)


def allocate(
    num_layers: int, batch: int, num_heads: int, capacity: int, head_dim: int, dtype: jnp.dtype
) -> KVCache:
    """Return an empty cache of ``capacity`` slots per row."""
    shape = (batch, num_heads, capacity, head_dim)
    layers = tuple(
        AttentionKV(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype)) for _ in range(num_layers)
    )
    return KVCache(layers, jnp.zeros((batch,), jnp.int32))


def allocate_latent(
    num_layers: int, batch: int, capacity: int, width: int, dtype: jnp.dtype
) -> KVCache:
    """Return an empty cache of latents with ``width`` features."""
    shape = (batch, 1, capacity, width)
    layers = tuple(LatentKV(jnp.zeros(shape, dtype)) for _ in range(num_layers))
    return KVCache(layers, jnp.zeros((batch,), jnp.int32))


def append(cache: KVCache, new: tuple[Any, ...], rows: Array, count: Array) -> KVCache:
    """Append slots ``rows`` [B, R] of the entries ``new`` to each row's prefix.

    All R slots are written, but only the first ``count`` [B] become readable. Rows with count 0
    write to the end of the buffer. This makes the write address depend on the verdict, so XLA
    schedules the write after every read of the round and does not copy the cache.
    """
    if cache.table is not None:
        return _append_to_pages(cache, new, rows, count)
    buffers = jax.tree.leaves(cache.layers)
    capacity = buffers[0].shape[2] if buffers else 0
    start = jnp.where(count > 0, cache.length, capacity - rows.shape[1])

    @jax.vmap
    def write(buffer: Array, fresh: Array, rows: Array, start: Array) -> Array:
        fresh = fresh[:, rows].astype(buffer.dtype)
        return lax.dynamic_update_slice_in_dim(buffer, fresh, start, axis=1)

    layers = jax.tree.map(lambda *pair: write(*pair, rows, start), cache.layers, new)
    return cache.replace(layers=layers, length=cache.length + count)


def append_prompt(cache: KVCache, new: tuple[Any, ...], count: Array) -> KVCache:
    """Append the first ``count`` [B] slots of ``new``, the entries of a chunk of a prompt.

    There is no verdict that the write address depends on, so it is computed from the last layer's
    entries too. Otherwise XLA writes a layer before its attention has read the cache, and copies
    the cache for that. A barrier does not help: XLA for CPU drops it before it orders operations.
    """
    leaves = jax.tree.leaves(new)
    if not leaves:
        return cache.replace(length=cache.length + count)
    last = leaves[-1]
    late = last[(slice(None), *[0] * (last.ndim - 1))].astype(jnp.float32)
    large = lax.bitcast_convert_type(late, jnp.uint32) >> 2 | 2**29  # more than any count
    rows = jnp.broadcast_to(jnp.arange(last.shape[2]), (len(count), last.shape[2]))
    return append(cache, new, rows, jnp.minimum(count, large.astype(count.dtype)))


def _append_to_pages(cache: KVCache, new: tuple[Any, ...], rows: Array, count: Array) -> KVCache:
    """Write only the first ``count`` slots: one scatter per buffer, of [D] windows.

    The head's index is spelled out. As a window over all heads, XLA for TPU would copy the pool.
    """
    steps = jnp.arange(rows.shape[1])
    slots = cache.length[:, None] + steps

    def write(pool: Array, fresh: Array) -> Array:
        num_pages, heads, page, _ = pool.shape
        ids = jnp.take_along_axis(cache.table, slots // page, 1, mode="clip")
        ids = jnp.where(steps < count[:, None], ids, num_pages)  # outside of the pool: dropped
        fresh = _stored(fresh.astype(dtype_of(pool)), pool)
        fresh = jnp.take_along_axis(fresh, rows[:, None, :, None], 2)
        index = ids[:, None], jnp.arange(heads)[:, None], (slots % page)[:, None]
        return pool.at[index].set(fresh, mode="drop")

    layers = jax.tree.map(write, cache.layers, new)
    return cache.replace(layers=layers, length=cache.length + count)


def dtype_of(buffer: Array) -> jnp.dtype:
    """Return the dtype of the numbers in a buffer; uint16 holds the bits of bfloat16."""
    return jnp.dtype(jnp.bfloat16) if buffer.dtype == jnp.uint16 else buffer.dtype


def numbers(stored: Array) -> Array:
    """Return what was read from a buffer as numbers."""
    return lax.bitcast_convert_type(stored, dtype_of(stored)) if _has_bits(stored) else stored


def _stored(fresh: Array, buffer: Array) -> Array:
    return lax.bitcast_convert_type(fresh, buffer.dtype) if _has_bits(buffer) else fresh


def _has_bits(buffer: Array) -> bool:
    return buffer.dtype == jnp.uint16


def allocate_pool(layers: tuple[Any, ...], num_pages: int, in_bits: bool) -> tuple[Any, ...]:
    """Return empty pools like ``layers``, the entries of a cache whose rows have one page.

    ``in_bits`` stores bfloat16 as uint16: XLA's CPU backend would convert the entire pool in every
    read and write.
    """

    def pool(like: Array) -> Array:
        dtype = jnp.uint16 if in_bits and like.dtype == jnp.bfloat16 else like.dtype
        return jnp.zeros((num_pages, *like.shape[1:]), dtype)

    return jax.tree.map(pool, layers)


def over_caches(function: Callable[..., Any], *trees: Any) -> Any:
    """Map the caches of pytrees of one structure; the other leaves of the first tree stay."""
    is_cache = lambda x: isinstance(x, KVCache)
    apply = lambda x, *others: function(x, *others) if is_cache(x) else x
    return jax.tree.map(apply, *trees, is_leaf=is_cache)


def caches_of(tree: Any) -> list[KVCache]:
    """Return the caches of a pytree, in order."""
    leaves = jax.tree.leaves(tree, is_leaf=lambda x: isinstance(x, KVCache))
    return [leaf for leaf in leaves if isinstance(leaf, KVCache)]


def widest(windows: Iterable[int | None]) -> int | None:
    """Return the widest of the windows; None if one of them is, or if there are none."""
    windows = tuple(windows)
    return max(windows) if windows and None not in windows else None


def detach(tree: Any) -> tuple[Any, tuple[Any, ...]]:
    """Return a pytree whose caches have lengths alone, and the layers of each of them."""
    pools = tuple(cache.layers for cache in caches_of(tree))
    return over_caches(lambda cache: cache.replace(layers=(), table=None), tree), pools


def attach(tree: Any, pools: tuple[Any, ...], table: Array) -> Any:
    """Return a pytree whose caches have the ``pools`` of ``detach``, and the table."""
    pools = iter(pools)
    return over_caches(lambda cache: cache.replace(layers=next(pools), table=table), tree)


def rows_of(tree: Any, rows: Array) -> Any:
    """Return the ``rows`` [Q] of a state with the batch on axis 0; pools of pages stay whole.

    A row beyond the batch is a copy of the last one.
    """

    def take(x: Any) -> Any:
        if isinstance(x, KVCache):
            layers = x.layers if x.table is not None else jax.tree.map(take, x.layers)
            table = None if x.table is None else take(x.table)
            return x.replace(layers=layers, length=take(x.length), table=table)
        return x.at[rows].get(mode="clip") if x.ndim else x

    return jax.tree.map(take, tree, is_leaf=lambda x: isinstance(x, KVCache))


def with_rows(tree: Any, rows: Array, part: Any) -> Any:
    """Return ``tree`` with ``part``, as of ``rows_of``, in its distinct ``rows`` [Q].

    Rows beyond the batch are dropped.
    """

    def put(x: Any, new: Any) -> Any:
        if isinstance(x, KVCache):
            is_pool = x.table is not None
            layers = new.layers if is_pool else jax.tree.map(put, x.layers, new.layers)
            return x.replace(layers=layers, length=put(x.length, new.length))
        return x.at[rows].set(new, mode="drop") if x.ndim else new

    return jax.tree.map(put, tree, part, is_leaf=lambda x: isinstance(x, KVCache))


def commit(cache: KVCache, tree_kv: tuple[Any, ...], verdict: Verdict) -> KVCache:
    """Append the root and the accepted nodes. Rejected nodes are never readable."""
    return append(cache, tree_kv, verdict.path, verdict.num_emitted)

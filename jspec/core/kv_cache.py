"""The KV cache: one buffer a layer, head-major, every row with its own length.

    slot      0 ........ length-1 | length ...... S-1
              committed, readable | never read

Keys and values of a round's nodes live outside the cache until the verdict; ``append`` is the only
write. It is a ``dynamic_update_slice`` a row, the one idiom that XLA keeps in place on CPU, GPU
and TPU alike, and it clamps at the end of the buffer: allocate K + 1 slots more than needed.
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax

from jspec.core.types import Array, Verdict


@struct.dataclass
class AttentionKV:
    """Keys and values of one layer."""

    k: Array  # [B, Hkv, S, D]
    v: Array  # [B, Hkv, S, D]

    def holding(self, k: Array, v: Array) -> "AttentionKV":
        """An entry of other slots, as this one would hold them."""
        return AttentionKV(k.astype(self.k.dtype), v.astype(self.v.dtype))


@struct.dataclass
class LatentKV:
    """What latent attention keeps of one layer: keys that are their own values."""

    latent: Array  # [B, 1, S, D]

    @property
    def k(self) -> Array:
        """Keys."""
        return self.latent

    @property
    def v(self) -> Array:
        """Values, the same buffer."""
        return self.latent

    def holding(self, k: Array, v: Array) -> "LatentKV":
        """An entry of other slots, as this one would hold them; ``v`` is ``k``."""
        del v
        return LatentKV(k.astype(self.latent.dtype))


Entry = AttentionKV | LatentKV


@struct.dataclass
class KVCache:
    """A layer-wise tuple of entries and the number of committed slots of each row.

    An entry is any pytree of buffers [B, Hkv, S, D] that share S; ``Hkv`` and ``D`` may be 1.
    """

    layers: tuple[Any, ...]
    length: Array  # [B] int32


def allocate(
    num_layers: int, batch: int, num_heads: int, capacity: int, head_dim: int, dtype: jnp.dtype
) -> KVCache:
    """An empty cache of ``capacity`` slots a row."""
    shape = (batch, num_heads, capacity, head_dim)
    layers = tuple(
        AttentionKV(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype)) for _ in range(num_layers)
    )
    return KVCache(layers, jnp.zeros((batch,), jnp.int32))


def allocate_latent(
    num_layers: int, batch: int, capacity: int, width: int, dtype: jnp.dtype
) -> KVCache:
    """An empty cache of latents of ``width`` numbers."""
    shape = (batch, 1, capacity, width)
    layers = tuple(LatentKV(jnp.zeros(shape, dtype)) for _ in range(num_layers))
    return KVCache(layers, jnp.zeros((batch,), jnp.int32))


def append(cache: KVCache, new: tuple[Any, ...], rows: Array, count: Array) -> KVCache:
    """Writes ``rows`` [B, R] of ``new`` after each row's prefix; the first ``count`` [B] are kept.

    All R rows are written, but only ``count`` of them become readable. Rows that keep nothing write
    to the end of the buffer: where the write goes then depends on the verdict, so XLA must put it
    after every read of the round, and need not copy the cache to reorder them.
    """
    buffers = jax.tree.leaves(cache.layers)
    capacity = buffers[0].shape[2] if buffers else 0
    start = jnp.where(count > 0, cache.length, capacity - rows.shape[1])

    def put(buffer: Array, fresh: Array) -> Array:
        def one(buffer: Array, fresh: Array, rows: Array, start: Array) -> Array:
            fresh = fresh[:, rows].astype(buffer.dtype)
            return lax.dynamic_update_slice_in_dim(buffer, fresh, start, axis=1)

        return jax.vmap(one)(buffer, fresh, rows, start)

    layers = jax.tree.map(put, cache.layers, new)
    return KVCache(layers, cache.length + count)


def commit(cache: KVCache, tree_kv: tuple[Any, ...], verdict: Verdict) -> KVCache:
    """Keeps the root and the accepted nodes; the other branches are simply never written."""
    return append(cache, tree_kv, verdict.path, verdict.num_emitted)

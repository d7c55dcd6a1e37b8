"""The KV cache: one head-major buffer per layer, and a length per row.

    slot      0 ........ length-1 | length ...... S-1
              committed, readable | never read

The keys and values of a round's nodes stay outside the cache until the verdict; ``append`` is the
only write. It is one ``dynamic_update_slice`` per row, which XLA keeps in place on CPU, GPU and
TPU. The slice clamps at the end of the buffer, so allocate K + 1 slots more than needed.
"""

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
        return AttentionKV(k.astype(self.k.dtype), v.astype(self.v.dtype))


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
        return LatentKV(k.astype(self.latent.dtype))


Entry = AttentionKV | LatentKV


@struct.dataclass
class KVCache:
    """The entries of all layers, and the number of committed slots of each row.

    An entry is any pytree of buffers [B, Hkv, S, D] that share S. Hkv and D may be 1.
    """

    layers: tuple[Any, ...]
    length: Array  # [B] int32


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
    buffers = jax.tree.leaves(cache.layers)
    capacity = buffers[0].shape[2] if buffers else 0
    start = jnp.where(count > 0, cache.length, capacity - rows.shape[1])

    @jax.vmap
    def write(buffer: Array, fresh: Array, rows: Array, start: Array) -> Array:
        fresh = fresh[:, rows].astype(buffer.dtype)
        return lax.dynamic_update_slice_in_dim(buffer, fresh, start, axis=1)

    layers = jax.tree.map(lambda *pair: write(*pair, rows, start), cache.layers, new)
    return KVCache(layers, cache.length + count)


def commit(cache: KVCache, tree_kv: tuple[Any, ...], verdict: Verdict) -> KVCache:
    """Append the root and the accepted nodes. Rejected nodes are never readable."""
    return append(cache, tree_kv, verdict.path, verdict.num_emitted)

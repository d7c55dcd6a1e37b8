"""The KV cache: an entry per layer, and the number of committed tokens of each row.

    slot      0 ........ length-1 | length ...... S-1
              committed, readable | never read

The values of a round's nodes stay outside the cache until the verdict; ``append`` is the only
write. XLA keeps it in place on CPU, GPU and TPU. Slices clamp at the end of a buffer, so allocate
K + 1 slots more than needed.

With ``tables``, the buffers are pools of pages that all rows share: slot s of a row is slot
``s % page`` of page ``table[row, s // page]``. Layers with a sliding window have a table of their
own where others have none, so that their pages come back. The host owns the tables
(``jspec.engine.pages``) and attaches them for a launch: caches at rest have none, and pools are
kept apart from them (``paging``). Entries without pages, the states of rows, stay in the cache.
"""

from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax

from jspec.core.copies import with_copies
from jspec.core.entries import NODE_AXIS, Commit, Entry
from jspec.core.types import Array, Verdict


@struct.dataclass
class KVCache:
    """The entries of all layers, and the number of committed tokens of each row."""

    layers: tuple[Entry | None, ...]  # None for an entry whose pages are kept apart
    length: Array  # [B] int32
    tables: tuple[Array, ...] = ()  # [B, M] int32, the pages of each row, by ``kinds``
    # Slots that a layer sees, the query's own included; None for all. () if all see all.
    windows: tuple[int | None, ...] = struct.field(pytree_node=False, default=())

    def kind_of(self, layer: int) -> int:
        """Return the index of a layer's kind: 0 without a window, and -1 with one."""
        return -1 if self.windows and self.windows[layer] is not None else 0

    def table_of(self, layer: int) -> Array | None:
        """Return the pages of each row for a layer, int32 [B, M]; None without pages."""
        return self.tables[self.kind_of(layer)] if self.tables else None


def empty(batch: int, layers: Iterable[Entry], *, windows: tuple[int | None, ...] = ()) -> KVCache:
    """Return a cache of empty entries of ``batch`` rows."""
    return KVCache(tuple(layers), jnp.zeros((batch,), jnp.int32), windows=windows)


def side_buffers(cache: KVCache, count: int) -> tuple[Any, ...]:
    """Return zeros for the values of ``count`` nodes of each layer, which passes fill in turn."""
    shapes = [entry.of_nodes(len(cache.length), count) for entry in cache.layers]
    return tuple(jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shape) for shape in shapes)


def append(cache: KVCache, new: tuple[Any, ...], rows: Array, count: Array) -> KVCache:
    """Append nodes ``rows`` [B, R] of ``new``, the values of a pass, to each row's prefix.

    Only the first ``count`` [B] are committed, and become readable.
    """
    layers = cache.layers
    if cache.tables and any(entry.copy is not None for entry in layers):
        layers = with_copies(layers, new, Commit(rows, count, cache.length))
    commits = [Commit(rows, count, cache.length, table) for table in cache.tables or (None,)]
    pairs = enumerate(zip(layers, new, strict=True))
    layers = tuple(
        entry.append(values, commits[cache.kind_of(layer)]) for layer, (entry, values) in pairs
    )
    return cache.replace(layers=layers, length=cache.length + count)


def append_prompt(cache: KVCache, new: tuple[Any, ...], count: Array) -> KVCache:
    """Append the first ``count`` [B] nodes of ``new``, the values of a chunk of a prompt.

    There is no verdict that the write address depends on, so it is computed from the last layer's
    values too. Otherwise XLA writes a layer before its attention has read the cache, and copies
    the cache for that. A barrier does not help: XLA for CPU drops it before it orders operations.
    """
    leaves = jax.tree.leaves(new)
    if not leaves:
        return cache.replace(length=cache.length + count)
    last = leaves[-1]
    late = last[(slice(None), *[0] * (last.ndim - 1))].astype(jnp.float32)
    large = lax.bitcast_convert_type(late, jnp.uint32) >> 2 | 2**29  # more than any count
    size = last.shape[NODE_AXIS]
    rows = jnp.broadcast_to(jnp.arange(size), (len(count), size))
    return append(cache, new, rows, jnp.minimum(count, large.astype(count.dtype)))


def commit(cache: KVCache, tree_kv: tuple[Any, ...], verdict: Verdict) -> KVCache:
    """Append the root and the accepted nodes. Rejected nodes are never readable."""
    return append(cache, tree_kv, verdict.path, verdict.num_emitted)

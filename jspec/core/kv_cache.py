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
kept apart from them. Entries without pages, the states of rows, stay in the cache.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax

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

    def is_shared(self, entry: Entry) -> bool:
        """Return whether the rows share an entry of this cache, as a pool of pages."""
        return bool(self.tables) and entry.has_pages

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
    cache = _with_copies(cache, new, rows, count)
    commits = [Commit(rows, count, cache.length, table) for table in cache.tables or (None,)]
    pairs = enumerate(zip(cache.layers, new, strict=True))
    layers = tuple(
        entry.append(values, commits[cache.kind_of(layer)]) for layer, (entry, values) in pairs
    )
    return cache.replace(layers=layers, length=cache.length + count)


def _with_copies(cache: KVCache, new: tuple[Any, ...], rows: Array, count: Array) -> KVCache:
    """Return the cache with a copy of each state behind the last page's end that ``append`` passes.

    Few rows pass one in a round, so it is a loop over these. A branch would copy the states. XLA
    for TPU would move what a loop writes as a whole into its fast memory and back in every round.
    """
    keeping = [layer for layer, entry in enumerate(cache.layers) if entry.copy is not None]
    if not (cache.tables and keeping):
        return cache
    pool = next(entry for entry in cache.layers if entry.has_pages)
    size = jax.tree.leaves(pool)[0].shape[NODE_AXIS]
    passed = (cache.length + count) // size * size - cache.length
    order = jnp.argsort(passed <= 0)  # the rows that pass a page's end come first
    states = [cache.layers[layer].replace(copy=None) for layer in keeping]
    nodes = [new[layer] for layer in keeping]

    def keep(turn: Array, copies: list[Entry]) -> list[Entry]:
        row = order[turn]

        def one(x: Array) -> Array:
            return lax.dynamic_slice_in_dim(x, row, 1)

        def put(copy: Array, fresh: Array) -> Array:
            return lax.dynamic_update_slice_in_dim(copy, fresh, row, 0)

        commit = Commit(one(rows), one(passed), one(cache.length))
        pairs = zip(*jax.tree.map(one, (states, nodes)), strict=True)
        return jax.tree.map(put, copies, [state.append(values, commit) for state, values in pairs])

    copies = [cache.layers[layer].copy for layer in keeping]
    copies = lax.fori_loop(0, (passed > 0).sum(), keep, copies)
    layers = list(cache.layers)
    for layer, copy in zip(keeping, copies, strict=True):
        layers[layer] = layers[layer].replace(copy=copy)
    return cache.replace(layers=tuple(layers))


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


def over_caches(function: Callable[..., Any], *trees: Any) -> Any:
    """Map the caches of pytrees of one structure; the other leaves of the first tree stay."""

    def apply(x: Any, *others: Any) -> Any:
        return function(x, *others) if isinstance(x, KVCache) else x

    return jax.tree.map(apply, *trees, is_leaf=lambda x: isinstance(x, KVCache))


def caches_of(tree: Any) -> list[KVCache]:
    """Return the caches of a pytree, in order."""
    leaves = jax.tree.leaves(tree, is_leaf=lambda x: isinstance(x, KVCache))
    return [leaf for leaf in leaves if isinstance(leaf, KVCache)]


def kinds(caches: Iterable[KVCache]) -> tuple[int | None, ...]:
    """Return the kinds of layers with pages, each by the slots that they see at most.

    One for those without a window (None), and one for those with a window. The first one of the
    two comes first, and there is at least one.
    """
    windows = {
        cache.windows[layer] if cache.windows else None
        for cache in caches
        for layer, entry in enumerate(cache.layers)
        if entry is None or entry.has_pages
    }
    sizes = windows - {None}
    widest = (max(sizes),) if sizes else ()
    return widest if sizes and None not in windows else (None, *widest)


# -------------------------------------------------------------------------------- pools of pages


def allocate_pool(
    cache: KVCache,
    num_pages: Sequence[int],
    page_size: int,
    dtype: jnp.dtype | None = None,
    *,
    in_bits: bool = False,
) -> tuple[Entry | None, ...]:
    """Return empty pools for the layers of ``cache``; None for an entry without pages.

    ``num_pages`` are those of each of the ``kinds``. See ``SlotEntry.pool`` for the other
    arguments. The entries of ``cache`` may be shapes.
    """
    return tuple(
        entry.pool(num_pages[cache.kind_of(layer)], page_size, dtype, in_bits=in_bits)
        if entry.has_pages
        else None
        for layer, entry in enumerate(cache.layers)
    )


def detach(tree: Any) -> tuple[Any, tuple[Any, ...]]:
    """Return a pytree whose caches have no pages, and the pools of each cache by layer.

    A layer is None where its entry is in the other one.
    """

    def part(cache: KVCache, has_pages: bool) -> tuple[Entry | None, ...]:
        return tuple(x if x.has_pages == has_pages else None for x in cache.layers)

    pools = tuple(part(cache, True) for cache in caches_of(tree))
    return over_caches(lambda x: x.replace(layers=part(x, False), tables=()), tree), pools


def attach(tree: Any, pools: tuple[Any, ...], tables: tuple[Array, ...]) -> Any:
    """Return a pytree whose caches have the ``pools`` of ``detach``, and the tables by kind."""
    pools = iter(pools)

    def joined(cache: KVCache) -> KVCache:
        pairs = zip(cache.layers, next(pools), strict=True)
        layers = tuple(state if pool is None else pool for state, pool in pairs)
        return cache.replace(layers=layers, tables=tables)

    return over_caches(joined, tree)


def rows_of(tree: Any, rows: Array) -> Any:
    """Return the ``rows`` [Q] of a state with the batch on axis 0; pools of pages stay whole.

    A row beyond the batch is a copy of the last one.
    """

    def take(x: Any) -> Any:
        if isinstance(x, KVCache):
            layers = tuple(
                entry if x.is_shared(entry) else jax.tree.map(take, entry) for entry in x.layers
            )
            tables = tuple(map(take, x.tables))
            return x.replace(layers=layers, length=take(x.length), tables=tables)
        return x.at[rows].get(mode="clip") if x.ndim else x

    return jax.tree.map(take, tree, is_leaf=lambda x: isinstance(x, KVCache))


def with_rows(tree: Any, rows: Array, part: Any) -> Any:
    """Return ``tree`` with ``part``, as of ``rows_of``, in its distinct ``rows`` [Q].

    Rows beyond the batch are dropped.
    """

    def put(x: Any, new: Any) -> Any:
        if isinstance(x, KVCache):
            layers = tuple(
                fresh if x.is_shared(entry) else jax.tree.map(put, entry, fresh)
                for entry, fresh in zip(x.layers, new.layers, strict=True)
            )
            return x.replace(layers=layers, length=put(x.length, new.length))
        return x.at[rows].set(new, mode="drop") if x.ndim else new

    return jax.tree.map(put, tree, part, is_leaf=lambda x: isinstance(x, KVCache))

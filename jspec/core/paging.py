"""The caches of a state, for an engine: their pools of pages, which are kept apart, and their rows.

A state is a pytree of a batch, with caches among its leaves.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jspec.core.entries import Entry, SlotEntry
from jspec.core.kv_cache import KVCache
from jspec.core.narrow import Narrow
from jspec.core.types import Array


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


def pool_of(
    entry: SlotEntry,
    num_pages: int,
    page_size: int,
    dtype: jnp.dtype | None,
    *,
    in_bits: bool,
) -> SlotEntry:
    """Return an empty pool of pages, in ``dtype`` unless it is None or the entry ``keeps_dtype``.

    ``in_bits`` stores bfloat16 as uint16: XLA's CPU backend would convert the entire pool in every
    read and write.
    """

    def empty(like: Array | Narrow) -> Array | Narrow:
        if isinstance(like, Narrow):
            return like.pool(num_pages, page_size)
        shape = num_pages, like.shape[1], page_size, *like.shape[3:]
        stored = jnp.dtype((None if entry.keeps_dtype else dtype) or like.dtype)
        stored = jnp.uint16 if in_bits and stored == jnp.bfloat16 else stored
        return jnp.zeros(shape, stored)

    return jax.tree.map(empty, entry, is_leaf=lambda x: isinstance(x, Narrow))


def allocate_pool(
    cache: KVCache,
    num_pages: Sequence[int],
    page_size: int,
    dtype: jnp.dtype | None = None,
    *,
    in_bits: bool = False,
) -> tuple[Entry | None, ...]:
    """Return empty pools for the layers of ``cache``; None for an entry without pages.

    ``num_pages`` are those of each of the ``kinds``. See ``pool_of`` for the other
    arguments. The entries of ``cache`` may be shapes.
    """
    return tuple(
        pool_of(entry, num_pages[cache.kind_of(layer)], page_size, dtype, in_bits=in_bits)
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
                entry if _is_pool(x, entry) else jax.tree.map(take, entry) for entry in x.layers
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
                fresh if _is_pool(x, entry) else jax.tree.map(put, entry, fresh)
                for entry, fresh in zip(x.layers, new.layers, strict=True)
            )
            return x.replace(layers=layers, length=put(x.length, new.length))
        return x.at[rows].set(new, mode="drop") if x.ndim else new

    return jax.tree.map(put, tree, part, is_leaf=lambda x: isinstance(x, KVCache))


def _is_pool(cache: KVCache, entry: Entry) -> bool:
    """Return whether the rows share an entry of a cache, as a pool of pages."""
    return bool(cache.tables) and entry.has_pages

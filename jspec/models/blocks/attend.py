"""``attend``: attention of new nodes to a committed prefix and to each other."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jspec import ops
from jspec.core import kv_cache, trees
from jspec.core.entries import NODE_AXIS, Entry, numbers
from jspec.core.packing import Packing
from jspec.core.types import Array, Tree
from jspec.models.blocks.arithmetic import rows_at

# attend(layer, q [B, H, M, head_dim], k and v [B, Hkv, T, head_dim], window=None, **scores) -> as q
#
# M is T, or less if only some rows of a layer are computed. ``window`` is the layer's sliding
# window, and ``scores`` are the arguments ``scale``, ``soft_cap`` and ``sinks`` of
# ``ops.attention``. A layer whose cache has one buffer passes it as k and v. They are None where a
# layer reads those of ``layer``, an earlier one of the pass. With ``chunked=True`` text is cut into
# chunks as long as the window, and a query sees its own; steps of a draft network and training
# refuse that.
Attend = Callable[..., Array]


def attention_over(
    cache: kv_cache.KVCache,
    tree: Tree,
    *,
    implementation: str | None = None,
    rows: Array | None = None,
    packing: Packing | None = None,
) -> tuple[Attend, list[Entry]]:
    """Return an ``attend`` over a committed prefix and a draft tree.

    Args:
      cache: the committed prefix, read only.
      tree: of the nodes, with a batch axis.
      implementation: of ``ops.attention``; None for the device's default.
      rows: int32 [B, M], the nodes that the last layer has queries of; None for all.
      packing: the list of nodes that ``attend`` takes and returns, as [1, heads, M, head_dim].
        It takes no ``rows``.

    Returns:
      ``attend``, and the list of cache entries that it fills: one per layer, with N slots.
    """
    positions = cache.length[:, None] + tree.depth
    # Rows without listed nodes read nothing.
    length = cache.length if packing is None else jnp.where(packing.rows, cache.length, 0)
    entries = list(cache.layers)  # attend replaces them
    last = len(entries) - 1

    def attend(
        index: int,
        q: Array,
        k: Array | None,
        v: Array | None,
        window: int | None = None,
        *,
        chunked: bool = False,
        **scores: Any,
    ) -> Array:
        if packing is not None:
            q, k, v = (x if x is None else _by_tokens(packing.unpack, x) for x in (q, k, v))
        entry = cache.layers[index]
        if k is not None:
            # Round like the cache, so that logits do not depend on which nodes are committed.
            # A GPU would keep the projections in float32 in their place until the commit.
            entries[index] = lax.platform_dependent(
                entry.holding(k, v), cuda=lax.optimization_barrier, default=lambda entry: entry
            )
        new = entries[index]
        visible = tree.ancestors if window is None else trees.within(tree, window)
        seen_from = positions
        if chunked:
            # A window that ends with the chunk begins with it too.
            seen_from = positions // window * window + window - 1
            same = seen_from[:, :, None] == seen_from[:, None, :]
            visible = visible & trees.pack_bits(same)
        queried = rows if index == last else None
        mixed = ops.attention(
            q,
            numbers(new.k),
            numbers(new.v),
            rows_at(visible, queried),
            entry.k,
            entry.v,
            length,
            table=cache.table_of(index),
            window=window,
            positions=rows_at(seen_from, queried),
            first_only=None if packing is None else packing.first_only,
            implementation=implementation,
            is_split=entry.has_split_queries,
            **scores,
        )
        return mixed if packing is None else _by_tokens(packing.pack, mixed)

    return attend, entries


def _by_tokens(arrange: Callable[[Array], Array], x: Array) -> Array:
    """Apply ``arrange``, which takes tokens on axis 1, to x [B, heads, T, head_dim]."""
    return arrange(x.swapaxes(1, 2)).swapaxes(1, 2)


def attention_beside(
    cache: kv_cache.KVCache,
    side: tuple[Any, ...],
    slot: Array | int,
    mask: Array,
    positions: Array,
    *,
    implementation: str | None = None,
) -> tuple[Attend, list[Entry]]:
    """Return an ``attend`` over a committed prefix and side buffers, for steps of a draft network.

    A window bounds the view of the cache only.

    Args:
      cache: the committed prefix, read only.
      side: M slots per layer: this round's keys and values so far, or ``kv_cache.side_buffers``.
      slot: int32 [], the first slot of ``side`` that the n new entries take.
      mask: bool [B, n, M], the side slots that each token sees, its own included.
      positions: int32 [B, n].
      implementation: as in ``attention_over``.

    Returns:
      ``attend``, and the list of side buffers that it updates, one per layer.
    """
    side, visible = list(side), trees.pack_bits(mask)

    def attend(
        index: int,
        q: Array,
        k: Array | None,
        v: Array | None,
        window: int | None = None,
        **scores: Any,
    ) -> Array:
        if "chunked" in scores:
            raise ValueError(
                "a draft network with chunked attention is not supported; take another one."
            )
        if k is not None:
            side[index] = put_nodes(side[index], side[index].holding(k, v), slot)
        entry, new = cache.layers[index], side[index]
        return ops.attention(
            q,
            numbers(new.k),
            numbers(new.v),
            visible,
            entry.k,
            entry.v,
            cache.length,
            table=cache.table_of(index),
            window=window,
            positions=positions,
            implementation=implementation,
            is_split=entry.has_split_queries,
            **scores,
        )

    return attend, side


def put_nodes(side: Any, new: Any, slot: Array | int) -> Any:
    """Return the values of a layer's slots with those of new nodes, the first one at ``slot``."""
    put = functools.partial(lax.dynamic_update_slice_in_dim, start_index=slot, axis=NODE_AXIS)
    return jax.tree.map(put, side, new)

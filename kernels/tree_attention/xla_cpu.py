"""Tree attention for XLA's CPU backend, where it is not the form of ``xla``.

A long contiguous cache is one block if it is half full. Pages are read row by row, so a short row
costs what it holds. A long prompt is cut into parts, of which none attends to those after it.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jspec.kernels.tree_attention import softmax
from jspec.kernels.tree_attention.cpu_sizes import block_of, group_of, parts_of
from jspec.kernels.tree_attention.softmax import Array, Cache, Narrow, Prefix, Rows, Softmax

# An entire cache is read in place. That is faster if it is half full and the scores are small.
WHOLE_SHARE, WHOLE_SCORES = 0.5, 2**22
# A CPU multiplies few queries fastest in float32, and widens a page while it copies it. For many
# it multiplies in bfloat16.
FEW_NODES = 64
# Slots of pages at a time for many nodes, whose scores then fill vectors.
MANY_NODES_SLOTS = 256


# Traced once for all layers of a network, and inlined into their program.
@functools.partial(jax.jit, static_argnames=("scale", "window", "soft_cap"))
def tree_attention(
    q: Array,
    tree_k: Array,
    tree_v: Array,
    ancestors: Array,
    cache_k: Array | Narrow,
    cache_v: Array | Narrow,
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
    """Attend as ``xla`` does.

    Pages of bits are widened a page at a time, for at most ``FEW_NODES`` queries; then nothing is
    rounded. The prefix is not read for the later nodes of ``first_only`` rows.
    """
    if table is None:
        arrays = (q, tree_k, tree_v, ancestors, cache_k, cache_v, length, positions)
        attend = functools.partial(
            _over_cache, sinks=sinks, scale=scale, window=window, soft_cap=soft_cap
        )
        size = group_of(cache_k)
        return attend(*arrays) if size == len(q) else _by_groups(attend, size, arrays)
    nodes, dtype = q.shape[2], jnp.promote_types(q.dtype, jnp.float32)
    widens = cache_k.dtype == jnp.uint16 and nodes <= FEW_NODES
    if widens:
        tree_k, tree_v = tree_k.astype(dtype), tree_v.astype(dtype)
    rows = softmax.rows_of(q, tree_k.shape[1], scale, soft_cap)
    so_far = _begin_in_parts(rows, tree_k, tree_v, ancestors)
    slots = 1 if nodes <= FEW_NODES else MANY_NODES_SLOTS
    count = max(1, min(slots // cache_k.shape[2], table.shape[1]))  # pages at a time
    size = count * cache_k.shape[2]
    first = jnp.zeros_like(length)
    if window is not None:
        first = jnp.maximum(positions.min(1) - window + 1, 0) // size
    last = jnp.maximum(-(-length // size), first)
    steps = _steps_of(table, count, first, last, first_only if nodes > 1 else None)
    view = _View(cache_k, cache_v, length, positions, window, widens)
    so_far = _join_rows(so_far, rows, view, steps, size)
    return softmax.result(so_far, rows.group, sinks)


def _by_groups(attend: Callable[..., Array], size: int, arrays: tuple[Array | None, ...]) -> Array:
    """Attend with ``size`` sequences at a time: all at once exceed a CPU's caches."""
    split = jax.tree.map(lambda x: x.reshape(-1, size, *x.shape[1:]), arrays)
    out = lax.map(lambda group: attend(*group), split)
    return out.reshape(-1, *out.shape[2:])


def _begin_in_parts(rows: Rows, tree_k: Array, tree_v: Array, ancestors: Array) -> Softmax:
    """Return the softmax over the tree; each part of the nodes takes the keys up to its end."""
    mask = softmax.unpack(ancestors, tree_k.shape[2])
    parts = parts_of(*mask.shape[1:])
    nodes, keys = mask.shape[1] // parts, mask.shape[2] // parts
    results = []
    for part, queries in enumerate(jnp.split(rows.queries, parts, axis=2)):
        last = (part + 1) * keys
        mine = rows._replace(queries=queries)
        seen = mine.repeat(mask[:, part * nodes : (part + 1) * nodes, :last])
        scores = mine.scores(tree_k[:, :, :last], seen)
        results.append(softmax.begin(scores, tree_v[:, :, :last]))
    return jax.tree.map(lambda *each: jnp.concatenate(each, axis=2), *results)


# ---------------------------------------------------------------------------- a contiguous cache


def _over_cache(
    q: Array,
    tree_k: Array,
    tree_v: Array,
    ancestors: Array,
    cache_k: Array | Narrow,
    cache_v: Array | Narrow,
    length: Array,
    positions: Array | None,
    *,
    sinks: Array | None,
    scale: float,
    window: int | None,
    soft_cap: float | None,
) -> Array:
    """Attend to a contiguous cache."""
    rows = softmax.rows_of(q, tree_k.shape[1], scale, soft_cap)
    so_far = _begin_in_parts(rows, tree_k, tree_v, ancestors)
    prefix = softmax.prefix_of(length, window, positions)
    so_far = _join_cache(so_far, rows, (cache_k, cache_v), prefix)
    return softmax.result(so_far, rows.group, sinks)


def _join_cache(so_far: Softmax, rows: Rows, cache: Cache, prefix: Prefix) -> Softmax:
    """Add a contiguous cache (k, v) to a softmax, as a whole or in blocks."""
    slots = cache[0].shape[2]
    size = block_of(slots)

    def step(index: Array, so_far: Softmax) -> Softmax:
        return softmax.join_slots(so_far, rows, cache, prefix, size, index)

    def whole(so_far: Softmax) -> Softmax:
        return softmax.join_slots(so_far, rows, cache, prefix, slots, jnp.int32(0))

    def in_blocks(so_far: Softmax) -> Softmax:
        last = (prefix.end + size - 1) // size
        return lax.fori_loop(prefix.first // size, last, step, so_far)

    if size == slots:
        return whole(so_far)
    if so_far.peak.size * slots > WHOLE_SCORES:
        return in_blocks(so_far)
    is_long = prefix.end - prefix.first > int(WHOLE_SHARE * slots)
    return lax.cond(is_long, whole, in_blocks, so_far)


# ----------------------------------------------------------------------------- a cache of pages


class _View(NamedTuple):
    """A cache of pages, and which of its slots the queries see."""

    pool_k: Array | Narrow  # [P, Hkv, page, D]
    pool_v: Array | Narrow
    length: Array  # [B]
    positions: Array | None  # [B, N]
    window: int | None
    widens: bool

    def pages(self, pool: Array | Narrow, ids: Array) -> Array:
        """Return pages ``ids`` [1, n] of a pool side by side, [1, Hkv, n * page, D]."""
        if not self.widens:
            return softmax.pages(pool, ids)
        bits = softmax.stored_pages(pool, ids)
        return lax.bitcast_convert_type(bits.astype(jnp.uint32) << 16, jnp.float32)


class _Steps(NamedTuple):
    """The blocks of pages of all rows, row by row; S is the most that there may be."""

    num_first: Array | None  # Steps of ``first_only`` rows, which come first; None without any.
    count: Array
    row: Array  # [S]
    block: Array  # [S], number of the block in its row
    pages: Array  # [S, n]


def _steps_of(
    table: Array, count: int, first: Array, last: Array, first_only: Array | None
) -> _Steps:
    """Return the steps over blocks ``first`` to ``last`` [B] of ``count`` pages."""
    batch, turns = len(table), -(-table.shape[1] // count)
    table = softmax.in_columns(table, count)
    num_first, order = None, None
    if first_only is not None:
        num_first = jnp.where(first_only, last - first, 0).sum()
        order = jnp.argsort(~first_only)
        table, first, last = table[order], first[order], last[order]
    ends = jnp.cumsum(last - first)
    index = jnp.arange(batch * turns)
    row = jnp.minimum((ends <= index[:, None]).sum(1, dtype=jnp.int32), batch - 1)
    block = jnp.clip(index + (last - ends)[row], 0, turns - 1)
    pages = table.reshape(batch * turns, count)[row * turns + block]
    return _Steps(num_first, ends[-1], row if order is None else order[row], block, pages)


def _join_rows(so_far: Softmax, rows: Rows, view: _View, steps: _Steps, size: int) -> Softmax:
    """Add the pages of all rows to a softmax, a block of ``size`` slots of one row at a time.

    One loop runs over the blocks of all rows, after one over those of ``first_only`` rows. Their
    schedule does not depend on the layer, so XLA computes it once for all layers.
    """
    start_of_step = steps.block * size
    left_of_step = jnp.minimum(view.length[steps.row] - start_of_step, size)
    first_slots = jnp.arange(size) < jnp.arange(size + 1)[:, None]

    def step(nodes: int, index: Array, so_far: Softmax) -> Softmax:
        """Add a block to the softmax of the first ``nodes`` nodes of its row."""
        # Unsigned indices need no test for negative ones.
        at = lambda x: lax.dynamic_index_in_dim(x.astype(jnp.uint32), index, keepdims=False)
        row, left = at(steps.row), at(left_of_step)
        start = lambda x: (row, *[jnp.uint32(0)] * (x.ndim - 1))

        def get(x: Array) -> Array:
            return lax.dynamic_slice(x, start(x), (1, x.shape[1], nodes * rows.group, *x.shape[3:]))

        mask = lax.dynamic_index_in_dim(first_slots, left)[None]
        if view.window is not None:
            slots = at(start_of_step).astype(jnp.int32) + jnp.arange(size)
            mine = lax.dynamic_slice_in_dim(view.positions, row, 1)[:, :nodes]
            mask &= slots > mine[:, :, None] - view.window
        mask = rows.spread(mask)
        ids = at(steps.pages)[None]
        keys, values = (view.pages(pool, ids) for pool in (view.pool_k, view.pool_v))
        scores = rows._replace(queries=get(rows.queries)).scores(keys, mask)
        joined = softmax.join(jax.tree.map(get, so_far), scores, values)
        return jax.tree.map(
            lambda x, new: lax.dynamic_update_slice(x, new, start(x)), so_far, joined
        )

    begin, end = jnp.uint32(0), steps.count.astype(jnp.uint32)
    if steps.num_first is not None:
        middle = steps.num_first.astype(jnp.uint32)
        so_far = lax.fori_loop(begin, middle, functools.partial(step, 1), so_far)
        begin = middle
    every = functools.partial(step, rows.queries.shape[2] // rows.group)
    return lax.fori_loop(begin, end, every, so_far)

"""Tree attention for XLA on any device.

The scores of the tree block begin a running softmax. Then the prefix streams past in blocks up to
the longest committed length, so the cost grows with that length, not with the capacity of the
cache. A cache with few slots is one block. A block of a cache of pages is a few pages of every row.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax

from jspec.kernels.tree_attention import softmax
from jspec.kernels.tree_attention.softmax import Array, Cache, Narrow, Prefix, Rows, Softmax

# Loop steps cost an accelerator more than unused slots (on a GPU each waits for the host): take the
# fewest steps whose scores are small. Computed from bandwidths, not measured.
WHOLE, BLOCK, SCORES = 4608, 4096, 2**25


# Traced once for all layers of a network, and inlined into their program.
@functools.partial(jax.jit, static_argnames=("scale", "window", "soft_cap"))
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
    """Attend as the reference does, with a softmax in float32.

    Keys and values of a narrow dtype are never widened in memory. Queries and weights are rounded
    to that dtype instead, and their products accumulate in float32. ``first_only`` has no effect.
    """
    del first_only
    rows = softmax.rows_of(q, tree_k.shape[1], scale, soft_cap)
    mask = rows.repeat(softmax.unpack(ancestors, tree_k.shape[2]))
    so_far = softmax.begin(rows.scores(tree_k, mask), tree_v)
    if cache_k is not None and cache_k.shape[2] > 0:
        prefix = softmax.prefix_of(length, window, positions)
        if table is None:
            so_far = _join_cache(so_far, rows, (cache_k, cache_v), prefix)
        else:
            so_far = _join_pages(so_far, rows, (cache_k, cache_v), table, prefix)
    return softmax.result(so_far, rows.group, sinks)


def block_of(slots: int, rows: int) -> int:
    """Return the slots at a time, for ``rows`` = B * H * N queries."""
    longest = slots if slots <= WHOLE else BLOCK
    return min(longest, max(128, SCORES // rows))


def _join_cache(so_far: Softmax, rows: Rows, cache: Cache, prefix: Prefix) -> Softmax:
    """Add a contiguous cache (k, v) to a softmax."""
    slots = cache[0].shape[2]
    size = block_of(slots, so_far.peak.size)
    if size == slots:
        # A GPU may copy a cache to pad it. Without queries it would begin before drafting.
        queries, cache = lax.platform_dependent(
            (rows.queries, cache), cuda=lax.optimization_barrier, default=lambda arrays: arrays
        )
        rows = rows._replace(queries=queries)
        return softmax.join_slots(so_far, rows, cache, prefix, size, jnp.int32(0))

    def step(index: Array, so_far: Softmax) -> Softmax:
        return softmax.join_slots(so_far, rows, cache, prefix, size, index)

    return lax.fori_loop(prefix.first // size, (prefix.end + size - 1) // size, step, so_far)


def _join_pages(so_far: Softmax, rows: Rows, pools: Cache, table: Array, prefix: Prefix) -> Softmax:
    """Add the pages of all rows to a softmax, a block of each row at a time."""
    page, most = pools[0].shape[2], table.shape[1]
    count = max(1, min(block_of(most * page, so_far.peak.size) // page, most))
    table = softmax.in_columns(table, count)

    def step(index: Array, so_far: Softmax) -> Softmax:
        ids = lax.dynamic_slice_in_dim(table, index * count, count, axis=1)
        mask = rows.spread(prefix.mask_of(index * count * page + jnp.arange(count * page)))
        keys, values = (softmax.pages(pool, ids) for pool in pools)
        return softmax.join(so_far, rows.scores(keys, mask), values)

    if table.shape[1] == count:
        return step(0, so_far)
    size = count * page
    return lax.fori_loop(prefix.first // size, -(-prefix.end // size), step, so_far)

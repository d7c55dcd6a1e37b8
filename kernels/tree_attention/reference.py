"""Attention of N tree nodes over a committed prefix and over each other, in plain jnp.

The scores of the tree block initialise a running softmax (Milakov and Gimelshein, arXiv
1805.02867). Then the prefix streams past in blocks up to the longest committed length, so the cost
grows with that length, not with the capacity of the cache. A cache with few slots, or few free
ones, is one block. A cache of pages streams past a few pages of every row at a time.
"""

import functools
import math

import jax
import jax.numpy as jnp
from jax import lax

Array = jax.Array
# A CPU copies a block out of the cache before it multiplies, but reads an entire cache in place.
# That is faster for a short cache, and for any cache that is half full, if the scores are small.
WHOLE, WHOLE_SHARE, WHOLE_SCORES = 320, 0.5, 2**22
# XLA's CPU matmul over the keys of 64 sequences, of 26 MB, takes 17 ms, and over 8 at a time 3. One
# sequence at a time is slower than all at once.
WHOLE_BYTES, GROUP_BYTES, LEAST_GROUP = 2**24, 2**22, 2
# Loop steps cost an accelerator more than unused slots (on a GPU each waits for the host): take the
# fewest steps whose scores are small. Computed from bandwidths, not measured.
ACCELERATOR_WHOLE, ACCELERATOR_BLOCK, ACCELERATOR_SCORES = 4608, 4096, 2**25
# A CPU multiplies few queries fastest in float32, and widens a page while it copies it. For many
# it multiplies in bfloat16. Long prompts are cut into parts: none attends to the parts after it.
FEW_NODES, PART_NODES, MOST_PARTS = 64, 128, 4
# Slots of pages at a time for many nodes, whose scores then fill vectors.
MANY_NODES_SLOTS = 256
MASKED = -1e30  # finite, so that a fully masked block gives zeros and not NaN
_WORD = 32


# Traced once for all layers of a network, and inlined into their program.
@functools.partial(
    jax.jit, static_argnames=("scale", "window", "soft_cap", "block", "parts", "by_row")
)
def tree_attention(
    q: Array,
    tree_k: Array,
    tree_v: Array,
    ancestors: Array,
    cache_k: Array | None,
    cache_v: Array | None,
    length: Array,
    positions: Array | None = None,
    table: Array | None = None,
    first_only: Array | None = None,
    *,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
    block: int | None = None,
    parts: int = 1,
    by_row: bool = False,
) -> Array:
    """Attend to ``[prefix, tree]``, with a softmax in float32.

    Keys and values of a narrow dtype are never widened in memory. Queries and weights are rounded
    to that dtype instead, and their products accumulate in float32. Pages of bits are an exception:
    for at most ``FEW_NODES`` queries they are widened, a page at a time, and nothing is rounded.

    Args:
      q: queries [B, H, N, D].
      tree_k: keys of the nodes [B, Hkv, M, D]; M differs from N if earlier nodes are in the block.
      tree_v: their values.
      ancestors: uint32 [B, N, W]; node n sees node m if bit ``m % 32`` of word ``m // 32`` is set.
        Every node sees at least one.
      cache_k: committed keys [B, Hkv, S, D], or None when there is no prefix. With ``table``, a
        pool [P, Hkv, page, D]; uint16 holds the bits of bfloat16.
      cache_v: their values.
      length: committed slots of each row, int32 [B].
      positions: positions of the queries, int32 [B, N]; needed with ``window``.
      table: pages of each row, int32 [B, M]; None for a cache without pages.
      first_only: bool [B], rows of which only the result of the first node is used; None for none.
        With ``by_row``, the prefix is not read for their other nodes.
      scale: factor on the scores.
      window: a query at position p sees the prefix at positions > p - window. ``ancestors`` must
        apply the window to the tree.
      soft_cap: scores x become ``soft_cap * tanh(x / soft_cap)`` (Gemma 2, arXiv 2408.00118).
      block: slots of the prefix at a time; None for the best choice on a CPU. Of pages
        that is one, or ``MANY_NODES_SLOTS`` slots for more than ``FEW_NODES`` nodes.
      parts: of the nodes, a divisor of N = M. With several, no node may see a later one.
      by_row: with ``table``, read the pages of one row at a time, and none that it does not need.

    Returns:
      [B, H, N, D] in float32 (or the wider type of q).
    """
    batch, heads, nodes, dim = q.shape
    kv_heads, groups = tree_k.shape[1], heads // tree_k.shape[1]
    dtype = jnp.promote_types(q.dtype, jnp.float32)
    widens = table is not None and cache_k.dtype == jnp.uint16 and nodes <= FEW_NODES
    if widens:
        tree_k, tree_v = tree_k.astype(dtype), tree_v.astype(dtype)
    # Query heads of one group become rows of one matmul, node by node: [B, Hkv, N*G, D].
    rows = (q.astype(dtype) * scale).reshape(batch, kv_heads, groups, nodes, dim)
    rows = rows.swapaxes(2, 3).reshape(batch, kv_heads, nodes * groups, dim)

    spread = functools.partial(_spread, groups)
    scores_of = functools.partial(_scores, soft_cap)
    mask = unpack(ancestors, tree_k.shape[2])
    carry = _in_parts(scores_of, rows, tree_k, tree_v, mask, spread, parts)
    if cache_k is not None and cache_k.shape[2] > 0:
        visible = _prefix_visibility(length, window, positions)
        scores_of_all = functools.partial(scores_of, rows)
        pools = cache_k, cache_v, table
        slots = block or (1 if nodes <= FEW_NODES else MANY_NODES_SLOTS)  # of pages at a time
        if table is None:
            carry = _stream_prefix(scores_of_all, cache_k, cache_v, visible, spread, carry, block)
        elif by_row:
            seen = length, window, positions, first_only if nodes > 1 else None
            carry = _stream_rows(scores_of, rows, pools, seen, spread, carry, slots, widens, groups)
        else:
            carry = _stream_pages(scores_of_all, pools, visible, spread, carry, slots, widens)
    _, total, mixed = carry
    out = (mixed / total[..., None]).reshape(batch, kv_heads, nodes, groups, dim)
    return out.swapaxes(2, 3).reshape(batch, heads, nodes, dim)


def _spread(groups: int, mask: Array) -> Array:
    """Repeat a mask [B, N, M] for the query heads of a group: [B, 1, N*G, M]."""
    return jnp.repeat(mask, groups, axis=1)[:, None]


def _scores(soft_cap: float | None, rows: Array, keys: Array, mask: Array) -> Array:
    """Return the masked scores [B, Hkv, R, S] of queries [B, Hkv, R, D] and keys [B, Hkv, S, D]."""
    scores = dot("bhrd,bhsd->bhrs", rows, keys)
    if soft_cap is not None:
        scores = soft_cap * jnp.tanh(scores / soft_cap)
    return jnp.where(mask, scores, MASKED)


def cpu_block(slots: int) -> int:
    """Return the slots at a time: short blocks follow the length, long ones save loop steps."""
    return slots if slots <= WHOLE else max(64, slots // 32)


def cpu_group(keys: Array) -> int:
    """Return the sequences at a time: B, halved while it is even and keys [B, ...] too large."""
    size, each = len(keys), math.prod(keys.shape[1:]) * keys.dtype.itemsize
    if size * each <= WHOLE_BYTES:
        return size
    while size % 2 == 0 and size > LEAST_GROUP and size * each > GROUP_BYTES:
        size //= 2
    return size


def cpu_parts(nodes: int, keys: int) -> int:
    """Return the parts of the nodes of a prompt."""
    parts = min(nodes // PART_NODES, MOST_PARTS) if nodes == keys else 1
    return parts if parts > 1 and nodes % parts == 0 else 1


def accelerator_block(slots: int, rows: int) -> int:
    """Return the slots at a time on a GPU or TPU, for ``rows`` = B * H * N queries."""
    longest = slots if slots <= ACCELERATOR_WHOLE else ACCELERATOR_BLOCK
    return min(longest, max(128, ACCELERATOR_SCORES // rows))


def unpack(words: Array, count: int) -> Array:
    """Return the first ``count`` bits of uint32 words [..., W]: bool [..., count]."""
    bits = (words[..., None] >> jnp.arange(_WORD, dtype=jnp.uint32)) & jnp.uint32(1)
    return bits.reshape(*words.shape[:-1], -1)[..., :count] > 0


def dot(equation: str, rows: Array, stored: Array) -> Array:
    """Multiply with keys or values, accumulating in the dtype of ``rows``."""
    if stored.dtype.itemsize >= 4:
        stored = stored.astype(rows.dtype)
    precision = lax.Precision.HIGHEST if stored.dtype == jnp.float32 else None
    options = dict(precision=precision, preferred_element_type=rows.dtype)
    return jnp.einsum(equation, rows.astype(stored.dtype), stored, **options)


def _begin(scores: Array, values: Array):
    """Return the running softmax of scores [B, Hkv, R, S] over values [B, Hkv, S, D]."""
    if values.shape[2] == 1:  # every row sees it
        mixed = jnp.broadcast_to(values, (*scores.shape[:-1], values.shape[-1]))
        return scores[..., 0], jnp.ones_like(scores[..., 0]), mixed.astype(scores.dtype)
    peak = scores.max(-1)
    weights = jnp.exp(scores - peak[..., None])
    return peak, weights.sum(-1), dot("bhrs,bhsd->bhrd", weights, values)


def _in_parts(scores_of, rows, tree_k, tree_v, mask, spread, parts):
    """Return the running softmax of all nodes, each part of them over the keys up to its end.

    ``rows`` are [B, Hkv, N * G, D] and ``mask`` is [B, N, M].
    """
    nodes, keys = mask.shape[1] // parts, mask.shape[2] // parts
    carries = []
    for part, queries in enumerate(jnp.split(rows, parts, axis=2)):
        last = (part + 1) * keys
        seen = spread(mask[:, part * nodes : (part + 1) * nodes, :last])
        carries.append(_begin(scores_of(queries, tree_k[:, :, :last], seen), tree_v[:, :, :last]))
    return jax.tree.map(lambda *each: jnp.concatenate(each, axis=2), *carries)


def _prefix_visibility(length: Array, window: int | None, positions: Array | None):
    """Return the first slot, the end slot, and a function of slots to masks [B, N or 1, slots]."""
    stored = lambda slots: slots < length[:, None, None]
    if window is None:
        return jnp.int32(0), length.max(), stored
    mask = lambda slots: stored(slots) & (slots > positions[:, :, None] - window)
    return jnp.maximum(positions.min() - window + 1, 0), length.max(), mask


def _stream_prefix(scores_of, cache_k, cache_v, visible, spread, carry, block):
    slots = cache_k.shape[2]
    first, end, mask_of = visible
    step = functools.partial(_attend_to_block, scores_of, cache_k, cache_v, mask_of, spread)
    size = min(block or cpu_block(slots), slots)

    def whole(carry):
        return step(slots, jnp.int32(0), carry)

    def in_blocks(carry):
        last = (end + size - 1) // size
        return lax.fori_loop(first // size, last, functools.partial(step, size), carry)

    if size == slots:
        return whole(carry)
    if block is not None or carry[0].size * slots > WHOLE_SCORES:
        return in_blocks(carry)
    return lax.cond(end - first > int(WHOLE_SHARE * slots), whole, in_blocks, carry)


def _stream_pages(scores_of, pools, visible, spread, carry, block, widens):
    """Add the pages of all rows to a running softmax, ``block`` slots of each row at a time."""
    pool_k, pool_v, table = pools
    first, end, mask_of = visible
    page, most = pool_k.shape[2], table.shape[1]
    count = max(1, min(block // page, most))
    turns = -(-most // count)
    table = jnp.pad(table, ((0, 0), (0, turns * count - most)))

    def step(index, carry):
        ids = lax.dynamic_slice_in_dim(table, index * count, count, axis=1)
        mask = mask_of(index * count * page + jnp.arange(count * page))
        mask = spread(mask) if mask.shape[1] > 1 else mask[:, None]
        keys, values = (_pages(pool, ids, widens) for pool in (pool_k, pool_v))
        return _join(scores_of, keys, values, mask, carry)

    if turns == 1:
        return step(0, carry)
    return lax.fori_loop(first // (count * page), -(-end // (count * page)), step, carry)


def _stream_rows(scores_of, rows, pools, seen, spread, carry, block, widens, groups):
    """Add the pages of all rows to a running softmax, ``block`` slots of one row at a time.

    One loop runs over the blocks of all rows, after one over those of ``first_only`` rows. Their
    schedule does not depend on the layer, so XLA computes it once for all layers.
    """
    pool_k, pool_v, table = pools
    length, window, positions, first_only = seen
    page = pool_k.shape[2]
    count = max(1, min(block // page, table.shape[1]))
    size = count * page
    first = jnp.zeros_like(length)
    if window is not None:
        first = jnp.maximum(positions.min(1) - window + 1, 0) // size
    last = jnp.maximum(-(-length // size), first)
    num_first, num_steps, *schedule = _schedule(table, count, first, last, first_only)
    row_of_step, start_of_step, pages_of_step = schedule
    start_of_step *= size
    left_of_step = jnp.minimum(length[row_of_step] - start_of_step, size)
    first_slots = jnp.arange(size) < jnp.arange(size + 1)[:, None]

    def step(nodes, index, carry):
        # Unsigned indices need no test for negative ones.
        at = lambda x: lax.dynamic_index_in_dim(x.astype(jnp.uint32), index, keepdims=False)
        row, left = at(row_of_step), at(left_of_step)
        start = lambda x: (row, *[jnp.uint32(0)] * (x.ndim - 1))
        shape = lambda x: (1, x.shape[1], nodes * groups, *x.shape[3:])
        get = lambda x: lax.dynamic_slice(x, start(x), shape(x))
        put = lambda x, new: lax.dynamic_update_slice(x, new, start(x))
        mask = lax.dynamic_index_in_dim(first_slots, left)[None]
        if window is not None:
            slots = at(start_of_step).astype(jnp.int32) + jnp.arange(size)
            mine = lax.dynamic_slice_in_dim(positions, row, 1)[:, :nodes]
            mask &= slots > mine[:, :, None] - window
        mask = spread(mask) if mask.shape[1] > 1 else mask[:, None]
        ids = at(pages_of_step)[None]
        keys, values = (_pages(pool, ids, widens) for pool in (pool_k, pool_v))
        scores = functools.partial(scores_of, get(rows))
        joined = _join(scores, keys, values, mask, jax.tree.map(get, carry))
        return jax.tree.map(put, carry, joined)

    begin, end = jnp.uint32(0), num_steps.astype(jnp.uint32)
    if first_only is not None:
        middle = num_first.astype(jnp.uint32)
        carry = lax.fori_loop(begin, middle, functools.partial(step, 1), carry)
        begin = middle
    every = functools.partial(step, rows.shape[2] // groups)
    return lax.fori_loop(begin, end, every, carry)


def _schedule(table: Array, count: int, first: Array, last: Array, first_only: Array | None):
    """Return the steps of a loop over blocks ``first`` to ``last`` [B] of all rows, row by row.

    A block is ``count`` pages. The result is the number of steps of ``first_only`` rows, which come
    first, and of all steps. Then come, of each of the S steps that there are at most, the row [S],
    the block in the row [S] and the pages [S, count].
    """
    batch, turns = len(table), -(-table.shape[1] // count)
    table = jnp.pad(table, ((0, 0), (0, turns * count - table.shape[1])))
    num_first, order = 0, None
    if first_only is not None:
        num_first = jnp.where(first_only, last - first, 0).sum()
        order = jnp.argsort(~first_only)
        table, first, last = table[order], first[order], last[order]
    ends = jnp.cumsum(last - first)
    index = jnp.arange(batch * turns)
    row = jnp.minimum((ends <= index[:, None]).sum(1, dtype=jnp.int32), batch - 1)
    block = jnp.clip(index + (last - ends)[row], 0, turns - 1)
    pages = table.reshape(batch * turns, count)[row * turns + block]
    return num_first, ends[-1], row if order is None else order[row], block, pages


def _pages(pool: Array, ids: Array, widens: bool) -> Array:
    """Return pages ``ids`` [B, n] side by side, [B, Hkv, n * page, D]."""
    if ids.shape[1] == 1:
        stored = pool.at[ids[:, 0]].get(mode="promise_in_bounds")
    else:
        stored = jnp.moveaxis(pool.at[ids].get(mode="promise_in_bounds"), 1, 2)
        stored = stored.reshape(*stored.shape[:2], -1, stored.shape[-1])
    if stored.dtype != jnp.uint16:
        return stored
    if widens:
        return lax.bitcast_convert_type(stored.astype(jnp.uint32) << 16, jnp.float32)
    return lax.bitcast_convert_type(stored, jnp.bfloat16)


def _attend_to_block(scores_of, cache_k, cache_v, mask_of, spread, block, index, carry):
    """Add block ``index`` of the prefix, ``block`` slots wide, to a running softmax."""
    # The last block is pulled back inside the buffer; repeated slots are masked.
    start = jnp.minimum(index * block, cache_k.shape[2] - block)
    slots = start + jnp.arange(block)
    mask = mask_of(slots) & (slots >= index * block)
    mask = spread(mask) if mask.shape[1] > 1 else mask[:, None]
    keys, values = (lax.dynamic_slice_in_dim(x, start, block, axis=2) for x in (cache_k, cache_v))
    return _join(scores_of, keys, values, mask, carry)


def _join(scores_of, keys, values, mask, carry):
    """Add keys and values to a running softmax.

    ``carry`` holds, for R = G*N rows of each key head, the highest score and the sum of weights,
    [B, Hkv, R], and the weighted sum of values, [B, Hkv, R, D].
    """
    peak, total, mixed = carry
    scores = scores_of(keys, mask)
    new_peak = jnp.maximum(peak, scores.max(-1))
    decay = jnp.exp(peak - new_peak)
    weights = jnp.exp(scores - new_peak[..., None])  # 0 where masked: the peak is a real score
    mixed = mixed * decay[..., None] + dot("bhrs,bhsd->bhrd", weights, values)
    return new_peak, total * decay + weights.sum(-1), mixed

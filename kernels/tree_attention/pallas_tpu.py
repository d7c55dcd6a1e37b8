"""Tree attention for TPU (Pallas on Mosaic TPU).

    grid:   batch row, key head, tile of query rows, split of the prefix, block of the split
    block:  0               1               2                      (dead)
            tree, slots     slots           slots up to length     not fetched, not computed

The tree block starts the running softmax, then the row's blocks of the cache stream past. Their
indices are prefetched as scalars. A block past a row's length, or outside its window, repeats the
index of the last live one, so nothing is fetched for it. Only blocks at an edge of the span are
masked; slots past ``length`` are never used.

A block of a cache of pages is several pages side by side. The pool is passed once for each of them,
and the table of pages is prefetched too. Scales of int8, rows of lanes, multiply the columns of the
scores and of the weights, so keys and values are read as whole numbers.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from jspec.core.narrow import Narrow
from jspec.kernels.tree_attention import layout
from jspec.kernels.tree_attention.layout import LOWEST, MASKED, WORD

Array = jax.Array

# Cache slots per block by query rows per tile. Long blocks for few rows save grid steps; the scores
# [rows, slots] of many rows must fit in vector memory.
SLOTS_BY_ROWS = ((64, 2048), (128, 1024), (512, 512))
TILE_ROWS = SLOTS_BY_ROWS[-1][0]
CORES = 2  # cores of a chip that share the grid (v4, v5p)
MAX_TREE_KEYS = 1024  # they are read as one block


@dataclasses.dataclass(frozen=True)
class Blocks:
    """Sizes of the work."""

    rows: int  # query rows per tile
    slots: int  # slots of the cache per block
    splits: int  # programs that share a row's prefix


def choose_blocks(batch: int, kv_heads: int, rows: int, slots: int) -> Blocks:
    """Choose sizes for ``rows`` query rows of each key head and a cache of ``slots``."""
    tile = min(rows, TILE_ROWS)
    largest = next(size for limit, size in SLOTS_BY_ROWS if tile <= limit)
    block = min(largest, -(-slots // 16) * 16)
    programs = batch * kv_heads * -(-rows // tile)
    splits = min(-(-CORES // programs), -(-slots // block))
    return Blocks(tile, block, splits)


def choose_pages(blocks: Blocks, page: int, most: int) -> Blocks:
    """Return the blocks with whole pages of ``page`` slots, at most ``most`` of a row."""
    count = max(1, min(blocks.slots // page, most))
    return dataclasses.replace(
        blocks, slots=count * page, splits=min(blocks.splits, -(-most // count))
    )


def refusal(
    q: Array, tree_k: Array, cache_k: Array | Narrow | None, table: Array | None = None
) -> str | None:
    """Return the reason why these arguments are not taken, with the remedy, or None."""
    del table  # pages may be as short as any cache
    if tree_k.shape[2] > MAX_TREE_KEYS:
        return f"takes up to {MAX_TREE_KEYS} tree keys, not {tree_k.shape[2]}; feed fewer at a time"
    if q.dtype == jnp.float64:
        return "computes in float32, but q is float64; cast it"
    return layout.refusal(tree_k, cache_k, ("bfloat16", "float32"))


# A function of its own in the program is lowered once, not once per layer.
@functools.partial(jax.jit, static_argnames=("scale", "window", "soft_cap", "blocks", "interpret"))
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
    blocks: Blocks | None = None,
    interpret: bool | pltpu.InterpretParams = False,
) -> Array:
    """Attend as the reference does, over a non-empty cache; ``blocks`` None chooses by shape."""
    del first_only  # the prefix is read for all nodes
    batch, heads, nodes, dim = q.shape
    kv_heads, page = cache_k.shape[1:3]
    slots = page if table is None else page * table.shape[1]
    group = heads // kv_heads
    blocks = blocks or choose_blocks(batch, kv_heads, group * nodes, slots)
    if table is not None:
        blocks = choose_pages(blocks, page, table.shape[1])
    rows = layout.queries(q, kv_heads, scale, cache_k.dtype)
    words = layout.per_row(layout.known_bits(ancestors, tree_k.shape[2]), group)
    by_row = [rows, lax.bitcast_convert_type(words, jnp.int32)]
    if window is not None:
        by_row.append(layout.per_row(positions, group)[..., None])
    by_row = [layout.pad_to(x, x.ndim - 2, blocks.rows) for x in by_row]
    span = layout.span(length, blocks.slots, blocks.splits, window, positions)
    if tree_k.shape[2] == 1:  # a matmul over a single key does not lower
        tree_k, tree_v = (layout.pad_to(x, 2, 8) for x in (tree_k, tree_v))
    tree, cache = (tree_k, tree_v), (cache_k, cache_v)
    stored = cache_k.format if isinstance(cache_k, Narrow) else None
    if stored is not None:
        scales = [x.scales for x in cache if x.scales is not None]
        cache = [*(x.values for x in cache), *scales]
    if not interpret:  # else XLA may move the entire cache into vector memory
        cache = [pltpu.with_memory_space_constraint(x, pltpu.HBM) for x in cache]
    mixed, log_total = _call(
        span,
        by_row,
        tree,
        cache,
        table,
        blocks=blocks,
        window=window,
        soft_cap=soft_cap,
        is_merged=blocks.splits > 1 or sinks is not None,
        stored=stored,
        interpret=interpret,
    )
    if log_total is None:
        merged = mixed[:, :, 0]
    else:
        merged = layout.merge(mixed, log_total[..., 0], sinks, nodes)
    return merged[:, :, : group * nodes].reshape(batch, heads, nodes, dim)


def _call(span, by_row, tree, cache, table, blocks, window, soft_cap, is_merged, stored, interpret):
    """Return results [B, Hkv, C, R, D] and, if they are merged, logs of their sums [..., R, 1]."""
    batch, kv_heads, rows, dim = by_row[0].shape
    tree_keys, page = tree[0].shape[2], cache[0].shape[2]
    words = by_row[1].shape[-1]
    tile, splits = blocks.rows, blocks.splits
    parts, most = (1, 1) if table is None else (blocks.slots // page, table.shape[1])
    slots = page * most
    scalars = [*span] if table is None else [*span, table.reshape(-1)]

    def block_index(b, c, s, first, count, share):
        index = jnp.minimum(c * share[b] + jnp.minimum(s, share[b] - 1), count[b] - 1)
        return first[b] + jnp.maximum(index, 0)

    def cache_block(b, h, _, c, s, *scalars):
        return b, h, block_index(b, c, s, *scalars[:3]), 0

    def scales_block(b, h, _, c, s, *scalars):
        return b, h, 0, block_index(b, c, s, *scalars[:3])

    def page_of(part, b, h, _, c, s, *scalars):
        column = block_index(b, c, s, *scalars[:3]) * parts + part
        return scalars[-1][b * most + jnp.minimum(column, most - 1)], h, 0, 0

    of_row = lambda width: pl.BlockSpec((None, tile, width), lambda b, _, t, *__: (b, t, 0))
    of_tree = pl.BlockSpec((None, None, tree_keys, dim), lambda b, h, *_: (b, h, 0, 0))

    def of_pages(*shape):
        return [
            pl.BlockSpec((None, None, *shape), functools.partial(page_of, part))
            for part in range(parts)
        ]

    of_cache = [pl.BlockSpec((None, None, blocks.slots, dim), cache_block)]
    of_scales = [pl.BlockSpec((None, None, 1, blocks.slots), scales_block)]
    if table is not None:
        of_cache, of_scales = of_pages(page, dim), of_pages(1, cache[-1].shape[3])
    of_queries = pl.BlockSpec((None, None, tile, dim), lambda b, h, t, *_: (b, h, t, 0))
    widths = (dim, 1) if is_merged else (dim,)
    out_shape = [(batch, kv_heads, splits, rows, width) for width in widths]
    steps = jnp.maximum(span.share.max(), 1)  # steps of the longest row
    results = pl.pallas_call(
        functools.partial(
            _kernel,
            num_scalars=len(scalars),
            parts=parts,
            slots=blocks.slots,
            window=window,
            soft_cap=soft_cap,
            stored=stored,
        ),
        out_shape=[jax.ShapeDtypeStruct(shape, jnp.float32) for shape in out_shape],
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(scalars),
            grid=(batch, kv_heads, rows // tile, splits, steps),
            in_specs=[
                of_queries,
                of_row(words),
                *([of_row(1)] if window is not None else []),
                of_tree,
                of_tree,
                *of_cache * 2,
                *of_scales * (len(cache) - 2),
            ],
            out_specs=[
                pl.BlockSpec(
                    (None, None, None, tile, width), lambda b, h, t, c, *_: (b, h, c, t, 0)
                )
                for width in widths
            ],
            scratch_shapes=[pltpu.VMEM((tile, width), jnp.float32) for width in (1, 1, dim)],
        ),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "parallel", "parallel", "arbitrary")
        ),
        cost_estimate=_cost(by_row[0], tree[0], batch * slots, slots + tree_keys),
        interpret=interpret,
        name="tree_attention",
    )(*scalars, *by_row, *tree, *(x for x in cache for _ in range(parts)))
    return results if is_merged else (*results, None)


def _cost(rows: Array, tree_k: Array, num_slots: int, keys: int) -> pl.CostEstimate:
    """An upper bound, the cost of a full cache: lengths are not static."""
    scores = rows.size // rows.shape[-1] * keys
    _, kv_heads, _, dim = tree_k.shape
    stored = (tree_k.size + num_slots * kv_heads * dim) * 2 * tree_k.dtype.itemsize
    return pl.CostEstimate(
        flops=4 * scores * rows.shape[-1],
        transcendentals=scores,
        bytes_accessed=stored + rows.size * (rows.dtype.itemsize + 4),
    )


def _kernel(*refs, num_scalars, parts, slots, window, soft_cap, stored):
    """Attend to one block of one split; a block of the cache has several ``parts``."""
    first, count, share, length, seen_by_all = refs[:5]
    q, words, *refs = refs[num_scalars:]
    positions, refs = (refs[0], refs[1:]) if window is not None else (None, refs)
    tree_k, tree_v, *refs = refs
    arrays = 4 if stored == "int8" else 2  # Keys, values and the scales of both.
    k, v, *scales = (refs[index * parts :][:parts] for index in range(arrays))
    out, *log_total, peak, total, mixed = refs[arrays * parts :]
    numbers = functools.partial(_joined, dtype=q.dtype, stored=stored)
    row, split, step = pl.program_id(0), pl.program_id(3), pl.program_id(4)
    index = split * share[row] + step
    start = (first[row] + index) * slots

    def scores_of(keys, factors=None):
        scores = _dot(q[...], keys, contract_last=True)
        scores = scores if factors is None else scores * factors
        return scores if soft_cap is None else soft_cap * jnp.tanh(scores / soft_cap)

    def accumulate(scores, values, factors=None):
        new_peak = jnp.maximum(peak[...], scores.max(-1, keepdims=True))
        weights = jnp.exp(scores - new_peak)
        decay = jnp.exp(peak[...] - new_peak)
        peak[...] = new_peak
        total[...] = decay * total[...] + weights.sum(-1, keepdims=True)
        weights = weights if factors is None else weights * factors
        mixed[...] = decay * mixed[...] + _dot(weights.astype(values.dtype), values)

    def read_block():
        """Return the scores, the values and the values' scales of a block of the cache."""
        rows = [_joined([x[:, : slots // parts] for x in each], axis=1) for each in scales]
        of_keys, of_values = rows or (None, None)
        return scores_of(numbers(k), of_keys), numbers(v), of_values

    @pl.when(step == 0)
    def _():
        peak[...] = jnp.full_like(peak, LOWEST)
        total[...] = jnp.zeros_like(total)
        mixed[...] = jnp.zeros_like(mixed)

    @pl.when((step == 0) & (split == 0))
    def _():
        seen = _bits(words[...], tree_k.shape[0])
        accumulate(jnp.where(seen, scores_of(tree_k[...]), MASKED), tree_v[...])

    live = (step < share[row]) & (index < count[row])
    inside = (start >= seen_by_all[row]) & (start + slots <= length[row])

    @pl.when(live & inside)
    def _():
        scores, values, factors = read_block()
        accumulate(scores, values, factors)

    @pl.when(live & ~inside)
    def _():
        scores, values, factors = read_block()
        slot = start + lax.broadcasted_iota(jnp.int32, scores.shape, 1)
        seen = slot < length[row]
        if window is not None:
            seen &= slot > positions[...] - window
        stored = start + lax.broadcasted_iota(jnp.int32, values.shape, 0) < length[row]
        values = jnp.where(stored, values.astype(jnp.float32), 0.0).astype(values.dtype)
        if factors is not None:
            slot = start + lax.broadcasted_iota(jnp.int32, factors.shape, 1)
            factors = jnp.where(slot < length[row], factors, 0.0)
        accumulate(jnp.where(seen, scores, MASKED), values, factors)

    @pl.when(step == pl.num_programs(4) - 1)
    def _():
        visible = total[...] > 0
        divisor = jnp.where(visible, total[...], 1.0)
        out[...] = mixed[...] / divisor
        if log_total:
            log_total[0][...] = jnp.where(visible, peak[...] + jnp.log(divisor), MASKED)


def _joined(
    parts: list, dtype: jnp.dtype | None = None, stored: str | None = None, axis: int = 0
) -> Array:
    """Return the parts of a block side by side; bits of a format ``stored`` as numbers."""

    def read(part: Any) -> Array:
        values = part[...]
        return values if stored is None else pltpu.bitcast(values, jnp.dtype(stored)).astype(dtype)

    wide = [*map(read, parts)]
    return wide[0] if len(wide) == 1 else jnp.concatenate(wide, axis)


def _bits(words: Array, count: int) -> Array:
    """The first ``count`` bits of int32 words [R, W]: bool [R, count]."""
    key = lax.broadcasted_iota(jnp.int32, (words.shape[0], count), 1)
    word = jnp.broadcast_to(words[:, :1], key.shape)
    for index in range(1, words.shape[1]):
        word = jnp.where(key >> 5 == index, words[:, index : index + 1], word)
    return lax.shift_right_logical(word, key & (WORD - 1)) & 1 > 0


def _dot(a: Array, b: Array, *, contract_last: bool = False) -> Array:
    precision = lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    contracted = (((1,), (1 if contract_last else 0,)), ((), ()))
    return lax.dot_general(
        a, b, contracted, precision=precision, preferred_element_type=jnp.float32
    )

"""Tree attention for NVIDIA Hopper GPUs (Pallas on Mosaic GPU).

One warpgroup computes 64 query rows of one key head over one split of the prefix:

    split 0:  tree blocks, then its share of the row's cache blocks
    others:   their share of the row's cache blocks

Blocks of keys and values arrive by TMA, ``stages`` of them in flight; both matmuls are wgmma. Each
split writes a softmax, and a second pass merges them. A block of a cache of pages lies in one page,
whose number the program reads from the table.
"""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jspec.kernels.tree_attention import layout
from jspec.kernels.tree_attention.layout import LOWEST, MASKED, WORD

Array = jax.Array

TILE_ROWS = 64  # rows of a wgmma
PAGE_MULTIPLE = 64  # a block of the cache lies in one page
FEATURE_MULTIPLE, MAX_FEATURES = 16, 128  # sizes of a head: depth of wgmma, limit of shared memory
MULTIPROCESSORS = 132  # multiprocessors of an H100 or H200
SPLIT_SLOTS = 256  # shorter splits cost more to merge than they save
FASTER_NODES = 64  # at most: on an H200, 3.1 to 7.8 times XLA's speed (accelerator_check_h200.json)
LOG2_E = math.log2(math.e)
# JAX 0.10 needs an index argument even for an indexed reference; 0.12 takes none.
NO_INDEX = {"idx": None} if jax.__version_info__ < (0, 11) else {}


@dataclasses.dataclass(frozen=True)
class Blocks:
    """Sizes of the work."""

    splits: int  # programs that share a row's prefix
    slots: int = 64  # slots of the cache per block; a multiple of 64
    stages: int = 3  # blocks in shared memory
    weights_in_registers: bool = True  # else in shared memory, which JAX can interpret


def choose_blocks(batch: int, kv_heads: int, rows: int, slots: int) -> Blocks:
    """Choose sizes for ``rows`` query rows of each key head and a cache of ``slots``."""
    programs = batch * kv_heads * -(-rows // TILE_ROWS)
    return Blocks(max(1, min(MULTIPROCESSORS // programs, slots // SPLIT_SLOTS)))


def refusal(
    q: Array, tree_k: Array, cache_k: Array | None, table: Array | None = None
) -> str | None:
    """Return the reason why these arguments are not taken, with the remedy, or None."""
    dim = q.shape[-1]
    if table is not None and cache_k.shape[2] % PAGE_MULTIPLE:
        page = cache_k.shape[2]
        return f"takes pages of a multiple of {PAGE_MULTIPLE} slots, not {page}; choose others"
    if dim % FEATURE_MULTIPLE or dim > MAX_FEATURES:
        sizes = f"a multiple of {FEATURE_MULTIPLE} features up to {MAX_FEATURES}"
        return f"takes heads of {sizes}, not {dim}; pad them"
    if jax.default_backend() == "gpu" and (wrong := wrong_device(jax.devices()[0])):
        return wrong
    return layout.refusal(tree_k, cache_k, ("bfloat16",))


def is_faster(q: Array, tree_k: Array, cache_k: Array | None, table: Array | None = None) -> bool:
    """Return whether the kernel beat XLA in such a case, on an H200.

    Pages, more nodes and several devices were not measured. XLA does not know how to shard the
    kernel.
    """
    if jax.default_backend() != "gpu" or jax.device_count() > 1 or table is not None:
        return False
    return q.shape[2] <= FASTER_NODES and refusal(q, tree_k, cache_k) is None


def wrong_device(device: jax.Device) -> str | None:
    """Return the reason why a GPU does not run the kernel: only Hopper has wgmma."""
    if device.compute_capability.split(".")[0] == "9":
        return None
    capability = f"{device.compute_capability} ({device.device_kind})"
    return f"needs a GPU of compute capability 9 (Hopper), not {capability}; take another"


# A function of its own in the program is lowered once, not once per layer.
@functools.partial(jax.jit, static_argnames=("scale", "window", "soft_cap", "blocks", "interpret"))
def tree_attention(
    q: Array,
    tree_k: Array,
    tree_v: Array,
    ancestors: Array,
    cache_k: Array,
    cache_v: Array,
    length: Array,
    positions: Array | None = None,
    table: Array | None = None,
    first_only: Array | None = None,
    *,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
    blocks: Blocks | None = None,
    interpret: object = None,
) -> Array:
    """Attend as the reference does, over a non-empty bfloat16 cache and heads of 16 n features.

    ``blocks`` None chooses by shape; ``interpret`` takes Mosaic GPU's interpreter parameters.
    """
    del first_only  # the prefix is read for all nodes
    batch, heads, nodes, dim = q.shape
    kv_heads, slots = cache_k.shape[1:3]
    slots *= 1 if table is None else table.shape[1]
    group = heads // kv_heads
    count = group * nodes
    blocks = blocks or choose_blocks(batch, kv_heads, count, slots)
    rows = layout.pad_to(layout.queries(q, kv_heads, scale, cache_k.dtype), 2, TILE_ROWS)
    # A cache shorter than a block is padded; the last block is pulled back inside the cache.
    cache = [
        layout.pad_to(x, 2, blocks.slots) if slots < blocks.slots else x for x in (cache_k, cache_v)
    ]
    tree = [layout.pad_to(x, 2, blocks.slots) for x in (tree_k, tree_v)]
    words = layout.known_bits(ancestors, tree_k.shape[2])
    words = layout.pad_to(words, 2, blocks.slots // WORD)
    by_row = [_by_word(words, group)]
    if window is not None:
        by_row.append(_by_word(positions[..., None], group))
    span = layout.span(length, blocks.slots, blocks.splits, window, positions)
    # Rows of padding in an incomplete tile stay on the chip.
    written = rows.shape[2] if count > TILE_ROWS else -(-count // 8) * 8
    has_pages = table is not None
    body = functools.partial(
        _kernel, blocks=blocks, window=window, soft_cap=soft_cap, has_pages=has_pages
    )
    tables = (table,) if has_pages else ()
    arrays = (*span, *tables, *tree, *cache, rows, *by_row)
    mixed, log_total = _call(body, arrays, rows, written, blocks, interpret)
    merged = mixed[:, :, 0] if blocks.splits == 1 else layout.merge(mixed, log_total[..., :written])
    return merged[:, :, :count].reshape(batch, heads, nodes, dim)


def _by_word(values: Array, group: int) -> Array:
    """Values of nodes [B, N, W] as int32 [B, W, R]: a program reads one word contiguously."""
    values = lax.bitcast_convert_type(layout.per_row(values, group), jnp.int32)
    return layout.pad_to(values.swapaxes(1, 2), 2, TILE_ROWS)


def _call(body, arrays, rows, written, blocks, interpret):
    """Return results [B, Hkv, C, written, D] and logs of their sums [B, Hkv, C, R], in float32."""
    batch, kv_heads, padded, dim = rows.shape
    shape = (batch, kv_heads, blocks.splits)
    queries, results = _smem(TILE_ROWS, dim, rows.dtype), _smem(TILE_ROWS, dim, jnp.float32)
    staged = _smem(blocks.slots, dim, rows.dtype, blocks.stages)
    weights = () if blocks.weights_in_registers else (_smem(TILE_ROWS, blocks.slots, rows.dtype),)
    options = {} if interpret is None else {"interpret": interpret}
    return plgpu.kernel(
        body,
        out_type=(
            jax.ShapeDtypeStruct((*shape, written, dim), jnp.float32),
            jax.ShapeDtypeStruct((*shape, padded), jnp.float32),
        ),
        grid=(kv_heads, batch, padded // TILE_ROWS, blocks.splits),
        grid_names=("head", "row", "tile", "split"),
        scratch_types=[
            queries,
            staged,
            staged,
            results,
            plgpu.SMEM((TILE_ROWS,), jnp.float32),
            plgpu.Barrier(),
            plgpu.Barrier(num_barriers=blocks.stages),
            plgpu.Barrier(num_barriers=blocks.stages),
            *weights,
        ],
        compiler_params=plgpu.CompilerParams(approx_math=True),
        **options,
    )(*arrays)


def _smem(size: int, width: int, dtype: jnp.dtype, *lead: int) -> plgpu.SMEM:
    """Shared memory [*lead, size, width] for TMA and wgmma, with the widest swizzle that fits."""
    itemsize = jnp.dtype(dtype).itemsize
    swizzle = next(size for size in (128, 64, 32) if width * itemsize % size == 0)
    tiling = plgpu.TilingTransform((8, swizzle // itemsize))
    shape = (*lead, size, width)
    return plgpu.SMEM(shape, dtype, transforms=(tiling, plgpu.SwizzleTransform(swizzle)))


def _kernel(*refs, blocks, window, soft_cap, has_pages):
    """Attend with one tile of rows to one split; ``positions`` are there for a window."""
    # ``seen_by_all`` is not used: masking every block is cheap beside the wait for the next one.
    (first, count, share, length, _), refs = refs[:5], refs[5:]
    table, refs = (refs[0], refs[1:]) if has_pages else (None, refs)
    tree_k, tree_v, cache_k, cache_v, q, words, *refs = refs
    positions, refs = (refs[0], refs[1:]) if window is not None else (None, refs)
    out, log_total, q_s, k_s, v_s, out_s, log_s, q_ready, k_ready, v_ready, *weights_s = refs
    head, row = lax.axis_index("head"), lax.axis_index("row")
    split, begin_row = lax.axis_index("split"), lax.axis_index("tile") * TILE_ROWS
    rows, written = pl.ds(begin_row, TILE_ROWS), min(TILE_ROWS, out.shape[3])
    slots, stages, dim = blocks.slots, blocks.stages, q.shape[-1]
    wgmma, by_wgmma_row = plgpu.Layout.WGMMA, plgpu.Layout.WGMMA.reduce(1)
    num_tree = jnp.where(split == 0, tree_k.shape[2] // slots, 0)
    begin = split * share[row]
    num_blocks = num_tree + jnp.clip(count[row] - begin, 0, share[row])
    page = cache_k.shape[2]
    last_start = (page if table is None else page * table.shape[1]) - slots

    def begin_of(index):  # first slot of this split's cache block number ``index``
        return (first[row] + begin + index - num_tree) * slots

    def fetch(index):
        slot = lax.rem(index, jnp.int32(stages))

        def copy(k, v, row, start):
            source = (row, head, pl.ds(start, slots))
            plgpu.copy_gmem_to_smem(k.at[source], k_s.at[slot], k_ready.at[slot])
            plgpu.copy_gmem_to_smem(v.at[source], v_s.at[slot], v_ready.at[slot])

        @pl.when(index < num_tree)
        def _():
            copy(tree_k, tree_v, row, index * slots)

        @pl.when((index >= num_tree) & (index < num_blocks))
        def _():
            start = jnp.minimum(begin_of(index), last_start)
            if table is None:
                copy(cache_k, cache_v, row, start)
            else:
                copy(cache_k, cache_v, table[row, lax.div(start, page)], lax.rem(start, page))

    def load_row(ref, word):
        part = ref.at[row, word, rows]
        return plgpu.load(part, layout=by_wgmma_row, optimized=False, **NO_INDEX)

    def spread(vector, width):
        return lax.broadcast_in_dim(vector, (TILE_ROWS, width), [0])

    def block(index, carry, seen_of):
        mixed, peak, total = carry
        slot = lax.rem(index, jnp.int32(stages))
        fetch(index + stages - 1)  # into the stage that the previous turn has read
        plgpu.barrier_wait(k_ready.at[slot])
        scores = _wgmma((TILE_ROWS, slots), q_s, k_s.at[slot].transpose((1, 0)))
        if soft_cap is not None:
            scores = soft_cap * jnp.tanh(scores / soft_cap)
        scores = jnp.where(seen_of(index), scores * LOG2_E, MASKED)
        new_peak = jnp.maximum(peak, scores.max(axis=1))
        weights = jnp.exp2(scores - spread(new_peak, slots))
        decay = jnp.exp2(peak - new_peak)
        total = decay * total + weights.sum(axis=1)
        weights = weights.astype(q_s.dtype)
        if weights_s:
            weights_s[0][...] = weights
            plgpu.commit_smem()
            weights = weights_s[0]
        plgpu.barrier_wait(v_ready.at[slot])
        values = _wgmma((TILE_ROWS, dim), weights, v_s.at[slot])
        return mixed * spread(decay, dim) + values, new_peak, total

    def column():
        return plgpu.broadcasted_iota(jnp.int32, (TILE_ROWS, slots), 1, layout=wgmma)

    def sees_key(index):
        key, per_block = column(), slots // WORD
        word = spread(load_row(words, index * per_block), slots)
        for other in range(1, per_block):
            later = spread(load_row(words, index * per_block + other), slots)
            word = jnp.where(key >= other * WORD, later, word)
        return lax.shift_right_logical(word, key & (WORD - 1)) & 1 > 0

    def sees_slot(index):
        start = begin_of(index)
        slot = jnp.minimum(start, last_start) + column()
        seen = (slot >= start) & (slot < length[row])
        if window is None:
            return seen
        return seen & (slot > spread(load_row(positions, 0), slots) - window)

    plgpu.copy_gmem_to_smem(q.at[row, head, rows], q_s, q_ready)
    for index in range(stages - 1):
        fetch(jnp.int32(index))
    plgpu.barrier_wait(q_ready)
    carry = (
        plgpu.layout_cast(jnp.zeros((TILE_ROWS, dim), jnp.float32), wgmma),
        plgpu.layout_cast(jnp.full((TILE_ROWS,), LOWEST, jnp.float32), by_wgmma_row),
        plgpu.layout_cast(jnp.zeros((TILE_ROWS,), jnp.float32), by_wgmma_row),
    )
    carry = lax.fori_loop(0, num_tree, lambda i, carry: block(i, carry, sees_key), carry)
    mixed, peak, total = lax.fori_loop(
        num_tree, num_blocks, lambda i, carry: block(i, carry, sees_slot), carry
    )
    divisor = jnp.where(total > 0, total, 1.0)
    out_s[...] = mixed / spread(divisor, dim)
    log_s[...] = jnp.where(total > 0, peak / LOG2_E + jnp.log(divisor), MASKED)
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(
        out_s.at[pl.ds(0, written)], out.at[row, head, split, pl.ds(begin_row, written)]
    )
    plgpu.copy_smem_to_gmem(log_s, log_total.at[row, head, split, rows])
    plgpu.wait_smem_to_gmem(0)


def _wgmma(shape: tuple[int, int], a, b) -> Array:
    """Multiply, accumulating in float32 registers; return when complete."""

    def run(accumulator):
        plgpu.wgmma(accumulator, a, b)
        return accumulator[...]

    return pl.run_scoped(run, plgpu.ACC(shape, jnp.float32))

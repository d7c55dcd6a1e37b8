"""Tree attention for NVIDIA Hopper GPUs (Pallas on Mosaic GPU).

One warpgroup computes 64 query rows of one key head over one split of the prefix:

    split 0:  tree blocks, then its share of the row's cache blocks
    others:   their share of the row's cache blocks

Blocks of keys and values arrive by TMA, ``stages`` of them in flight; both matmuls are wgmma. Those
of a cache in 8 bits are widened in shared memory. Each split writes a softmax, and a second pass
merges them. A block of a cache of pages lies in one page, whose number the program reads from the
table.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jspec.core.narrow import Narrow
from jspec.kernels.hopper import MULTIPROCESSORS, NO_INDEX, smem, wrong_device
from jspec.kernels.tree_attention import layout
from jspec.kernels.tree_attention.layout import LOWEST, MASKED, WORD

Array = jax.Array

TILE_ROWS = 64  # rows of a wgmma
PAGE_MULTIPLE = 64  # a block of the cache lies in one page
NARROW_FEATURES, MAX_NARROW_NODES = 32, 128  # the same for a cache in 8 bits, and its nodes
FEATURE_MULTIPLE, MAX_FEATURES = 16, 128  # sizes of a head: depth of wgmma, limit of shared memory
SPLIT_SLOTS = 256  # shorter splits cost more to merge than they save
LOG2_E = math.log2(math.e)


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
    multiple = NARROW_FEATURES if isinstance(cache_k, Narrow) else FEATURE_MULTIPLE
    if dim % multiple or dim > MAX_FEATURES:
        sizes = f"a multiple of {multiple} features up to {MAX_FEATURES}"
        return f"takes heads of {sizes}, not {dim}; pad them"
    if jax.default_backend() == "gpu" and (wrong := wrong_device(jax.devices()[0])):
        return wrong
    if isinstance(cache_k, Narrow) and tree_k.shape[2] > MAX_NARROW_NODES:
        nodes = f"up to {MAX_NARROW_NODES} nodes beside a cache in 8 bits, not {tree_k.shape[2]}"
        return f"takes {nodes}; draft fewer, or leave kv_cache_dtype out"
    return layout.refusal(tree_k, cache_k, ("bfloat16",))


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
    interpret: object = None,
) -> Array:
    """Attend as the reference does, over a non-empty cache and heads of 16 n features.

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
    cache, stored = [cache_k, cache_v], None
    if isinstance(cache_k, Narrow):
        stored, scales = cache_k.format, [cache_k.scales, cache_v.scales]
        cache = [cache_k.values, cache_v.values]
        cache += [] if scales[0] is None else [x[:, :, 0] for x in scales]
    # A cache shorter than a block is padded; the last block is pulled back inside the cache.
    cache = [layout.pad_to(x, 2, blocks.slots) if slots < blocks.slots else x for x in cache]
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
        _kernel,
        blocks=blocks,
        window=window,
        soft_cap=soft_cap,
        has_pages=has_pages,
        stored=stored,
    )
    tables = (table,) if has_pages else ()
    arrays = (*span, *tables, *tree, *cache, rows, *by_row)
    staged = _staged(cache[0].dtype, tree[0], blocks, is_narrow=stored is not None)
    mixed, log_total = _call(body, arrays, rows, written, staged, blocks, interpret)
    if blocks.splits == 1 and sinks is None:
        merged = mixed[:, :, 0]
    else:
        merged = layout.merge(mixed, log_total[..., :written], sinks, nodes)
    return merged[:, :, :count].reshape(batch, heads, nodes, dim)


def _by_word(values: Array, group: int) -> Array:
    """Values of nodes [B, N, W] as int32 [B, W, R]: a program reads one word contiguously."""
    values = lax.bitcast_convert_type(layout.per_row(values, group), jnp.int32)
    return layout.pad_to(values.swapaxes(1, 2), 2, TILE_ROWS)


def _staged(dtype: jnp.dtype, tree: Array, blocks: Blocks, *, is_narrow: bool) -> list[Any]:
    """Return shared memory for keys and values each: staged, wide and of the tree's blocks.

    The last two are for a cache in 8 bits.
    """
    *_, keys, dim = tree.shape
    kinds = [smem(blocks.slots, dim, dtype, blocks.stages)] * 2
    if is_narrow:
        kinds += [smem(blocks.slots, dim, tree.dtype)] * 2
        kinds += [smem(blocks.slots, dim, tree.dtype, keys // blocks.slots)] * 2
    return kinds


def _call(body, arrays, rows, written, staged, blocks, interpret):
    """Return results [B, Hkv, C, written, D] and logs of their sums [B, Hkv, C, R], in float32."""
    batch, kv_heads, padded, dim = rows.shape
    shape = (batch, kv_heads, blocks.splits)
    queries, results = smem(TILE_ROWS, dim, rows.dtype), smem(TILE_ROWS, dim, jnp.float32)
    weights = () if blocks.weights_in_registers else (smem(TILE_ROWS, blocks.slots, rows.dtype),)
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
            results,
            plgpu.SMEM((TILE_ROWS,), jnp.float32),
            plgpu.Barrier(),
            plgpu.Barrier(num_barriers=blocks.stages),
            plgpu.Barrier(num_barriers=blocks.stages),
            *staged,
            *weights,
        ],
        compiler_params=plgpu.CompilerParams(approx_math=True),
        **options,
    )(*arrays)


def _kernel(*refs, blocks, window, soft_cap, has_pages, stored):
    """Attend with one tile of rows to one split; ``positions`` are there for a window."""
    # ``seen_by_all`` is not used: masking every block is cheap beside the wait for the next one.
    (first, count, share, length, _), refs = refs[:5], refs[5:]
    table, refs = (refs[0], refs[1:]) if has_pages else (None, refs)
    (tree_k, tree_v, *cache), refs = refs[:4], refs[4:]
    scales, refs = (refs[:2], refs[2:]) if stored == "int8" else ((), refs)
    q, words, *refs = refs
    positions, refs = (refs[0], refs[1:]) if window is not None else (None, refs)
    out, log_total, q_s, out_s, log_s, q_ready, k_ready, v_ready, *refs = refs
    staged, wide, weights_s = refs[:2], refs[2:6], refs[6:]
    if stored is None:
        wide, weights_s = (), refs[2:]
    head, row = lax.axis_index("head"), lax.axis_index("row")
    split, begin_row = lax.axis_index("split"), lax.axis_index("tile") * TILE_ROWS
    rows, written = pl.ds(begin_row, TILE_ROWS), min(TILE_ROWS, out.shape[3])
    num_tree = jnp.where(split == 0, tree_k.shape[2] // blocks.slots, 0)
    begin = split * share[row]
    stream = _Stream(
        blocks=blocks,
        head=head,
        row=row,
        num_tree=num_tree,
        num_blocks=num_tree + jnp.clip(count[row] - begin, 0, share[row]),
        first=first,
        begin=begin,
        tree=(tree_k, tree_v),
        cache=cache,
        table=table,
        staged=staged,
        ready=(k_ready, v_ready),
        stored=stored,
        scales=scales,
        wide=wide[:2],
        nodes=wide[2:],
    )
    sight = _Sight(
        stream=stream,
        rows=rows,
        words=words,
        length=length,
        positions=positions,
        window=window,
    )
    plgpu.copy_gmem_to_smem(q.at[row, head, rows], q_s, q_ready)
    for index in range(blocks.stages - 1):
        stream.fetch(jnp.int32(index))
    plgpu.barrier_wait(q_ready)
    block = functools.partial(_block, stream, q_s, weights_s, soft_cap)
    by_row = plgpu.Layout.WGMMA.reduce(1)
    carry = (
        plgpu.layout_cast(jnp.zeros(q_s.shape, jnp.float32), plgpu.Layout.WGMMA),
        plgpu.layout_cast(jnp.full((TILE_ROWS,), LOWEST, jnp.float32), by_row),
        plgpu.layout_cast(jnp.zeros((TILE_ROWS,), jnp.float32), by_row),
    )
    carry = lax.fori_loop(
        0, num_tree, lambda index, carry: block(index, carry, sight.of_nodes, of_tree=True), carry
    )
    mixed, peak, total = lax.fori_loop(
        num_tree,
        stream.num_blocks,
        lambda index, carry: block(index, carry, sight.of_slots, of_tree=False),
        carry,
    )
    divisor = jnp.where(total > 0, total, 1.0)
    out_s[...] = mixed / _spread(divisor, q_s.shape[-1])
    log_s[...] = jnp.where(total > 0, peak / LOG2_E + jnp.log(divisor), MASKED)
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(
        out_s.at[pl.ds(0, written)], out.at[row, head, split, pl.ds(begin_row, written)]
    )
    plgpu.copy_smem_to_gmem(log_s, log_total.at[row, head, split, rows])
    plgpu.wait_smem_to_gmem(0)


@dataclasses.dataclass(frozen=True)
class _Stream:
    """The blocks of keys and values of one split, copied into stages ahead of their use."""

    blocks: Blocks
    head: Array
    row: Array
    num_tree: Array  # Blocks of nodes, which come first.
    num_blocks: Array
    first: Any  # Each row's first block of the cache that is read.
    begin: Array  # The split's first block, counted from there.
    tree: tuple[Any, Any]
    cache: Sequence[Any]
    table: Any  # None for caches without pages.
    staged: Sequence[Any]
    ready: tuple[Any, Any]  # Barriers of the stages.
    stored: str | None  # Format of a cache in 8 bits, which has the rest.
    scales: Sequence[Any]  # Of int8.
    wide: Sequence[Any]  # A block of the cache in the dtype of the tree.
    nodes: Sequence[Any]  # All blocks of the tree.

    @property
    def last_start(self) -> int:
        """The first slot of the last block, which is pulled back inside the cache."""
        page = self.cache[0].shape[2]
        return (page if self.table is None else page * self.table.shape[1]) - self.blocks.slots

    def begin_of(self, index: Array) -> Array:
        """Return the first slot of block ``index``, one of the cache."""
        return (self.first[self.row] + self.begin + index - self.num_tree) * self.blocks.slots

    def stage_of(self, index: Array) -> Array:
        """Return the stage of block ``index``."""
        return lax.rem(index, jnp.int32(self.blocks.stages))

    def fetch(self, index: Array) -> None:
        """Begin to copy block ``index``, if there is one."""
        stage = self.stage_of(index)

        @pl.when(index < self.num_tree)
        def _():
            source = (self.row, self.head, pl.ds(index * self.blocks.slots, self.blocks.slots))
            into = [x.at[index] for x in self.nodes] or [x.at[stage] for x in self.staged]
            self._copy(self.tree, source, into, stage)

        @pl.when((index >= self.num_tree) & (index < self.num_blocks))
        def _():
            into = [x.at[stage] for x in self.staged]
            self._copy(self.cache, self._place_of(index), into, stage)

    def _place_of(self, index: Array) -> tuple[Any, ...]:
        """Return the indices of block ``index``, one of the cache."""
        start, page = jnp.minimum(self.begin_of(index), self.last_start), self.cache[0].shape[2]
        owner = self.row
        if self.table is not None:
            owner, start = self.table[self.row, lax.div(start, page)], lax.rem(start, page)
        return owner, self.head, pl.ds(start, self.blocks.slots)

    def _copy(self, arrays: Any, source: tuple[Any, ...], into: list[Any], stage: Array) -> None:
        for array, staged, ready in zip(arrays, into, self.ready, strict=True):
            plgpu.copy_gmem_to_smem(array.at[source], staged, ready.at[stage])

    def operand(self, which: int, index: Array, *, of_tree: bool) -> Any:
        """Return the keys, 0, or the values, 1, of block ``index`` as wgmma takes them."""
        stage = self.stage_of(index)
        plgpu.barrier_wait(self.ready[which].at[stage])
        if self.stored is None:
            return self.staged[which].at[stage]
        if of_tree:
            return self.nodes[which].at[index]
        narrow, wide = self.staged[which].at[stage], self.wide[which]
        numbers = plgpu.load(narrow, layout=plgpu.Layout.WGMMA_UPCAST_2X, **NO_INDEX)
        if self.stored != "int8":
            numbers = lax.bitcast_convert_type(numbers, self.stored).astype(jnp.float32)
        wide[...] = numbers.astype(wide.dtype)
        plgpu.commit_smem()
        return wide

    def scaled(self, x: Array, which: int, index: Array, *, of_tree: bool) -> Array:
        """Multiply columns of x by the scales of the keys, 0, or the values, 1, of a block."""
        if of_tree or not self.scales:
            return x
        part, by_slot = self.scales[which].at[self._place_of(index)], plgpu.Layout.WGMMA.reduce(0)
        scales = plgpu.load(part, layout=by_slot, optimized=False, **NO_INDEX)
        return x * lax.broadcast_in_dim(scales, x.shape, [1])


@dataclasses.dataclass(frozen=True)
class _Sight:
    """The keys of a block that each row of the tile sees."""

    stream: _Stream
    rows: Any
    words: Any
    length: Any
    positions: Any
    window: int | None

    def of_nodes(self, index: Array) -> Array:
        """Return the visible nodes of block ``index``, by the bits of their words."""
        slots = self.stream.blocks.slots
        key, per_block = self._column(), slots // WORD
        word = _spread(self._load_row(self.words, index * per_block), slots)
        for other in range(1, per_block):
            later = _spread(self._load_row(self.words, index * per_block + other), slots)
            word = jnp.where(key >= other * WORD, later, word)
        return lax.shift_right_logical(word, key & (WORD - 1)) & 1 > 0

    def of_slots(self, index: Array) -> Array:
        """Return the visible slots of block ``index`` of the cache."""
        start = self.stream.begin_of(index)
        slot = jnp.minimum(start, self.stream.last_start) + self._column()
        seen = (slot >= start) & (slot < self.length[self.stream.row])
        if self.window is None:
            return seen
        position = _spread(self._load_row(self.positions, 0), self.stream.blocks.slots)
        return seen & (slot > position - self.window)

    def _column(self) -> Array:
        shape = (TILE_ROWS, self.stream.blocks.slots)
        return plgpu.broadcasted_iota(jnp.int32, shape, 1, layout=plgpu.Layout.WGMMA)

    def _load_row(self, ref: Any, word: Array | int) -> Array:
        part, by_row = ref.at[self.stream.row, word, self.rows], plgpu.Layout.WGMMA.reduce(1)
        return plgpu.load(part, layout=by_row, optimized=False, **NO_INDEX)


def _block(
    stream: _Stream,
    q_s: Any,
    weights_s: Sequence[Any],
    soft_cap: float | None,
    index: Array,
    carry: tuple[Array, Array, Array],
    seen_of: Callable[[Array], Array],
    *,
    of_tree: bool,
) -> tuple[Array, Array, Array]:
    """Add block ``index`` to the running softmax (mixed values, peak, total) of the tile."""
    mixed, peak, total = carry
    slots = stream.blocks.slots
    stream.fetch(index + stream.blocks.stages - 1)  # into the stage that was read a turn ago
    keys = stream.operand(0, index, of_tree=of_tree)
    scores = _wgmma((TILE_ROWS, slots), q_s, keys.transpose((1, 0)))
    scores = stream.scaled(scores, 0, index, of_tree=of_tree)
    if soft_cap is not None:
        scores = soft_cap * jnp.tanh(scores / soft_cap)
    scores = jnp.where(seen_of(index), scores * LOG2_E, MASKED)
    new_peak = jnp.maximum(peak, scores.max(axis=1))
    weights = jnp.exp2(scores - _spread(new_peak, slots))
    decay = jnp.exp2(peak - new_peak)
    total = decay * total + weights.sum(axis=1)
    weights = stream.scaled(weights, 1, index, of_tree=of_tree).astype(q_s.dtype)
    if weights_s:
        weights_s[0][...] = weights
        plgpu.commit_smem()
        weights = weights_s[0]
    values = _wgmma(q_s.shape, weights, stream.operand(1, index, of_tree=of_tree))
    return mixed * _spread(decay, q_s.shape[-1]) + values, new_peak, total


def _spread(vector: Array, width: int) -> Array:
    return lax.broadcast_in_dim(vector, (TILE_ROWS, width), [0])


def _wgmma(shape: tuple[int, int], a, b) -> Array:
    """Multiply, accumulating in float32 registers; return when complete."""

    def run(accumulator):
        plgpu.wgmma(accumulator, a, b)
        return accumulator[...]

    return pl.run_scoped(run, plgpu.ACC(shape, jnp.float32))

"""Grouped matrix product for NVIDIA Hopper GPUs (Pallas on Mosaic GPU).

One warpgroup multiplies up to 64 rows of one group with some columns of its matrix. Matrices arrive
by TMA, ``stages`` blocks in flight, and products are wgmma. A matrix is read once for every 64 rows
of its group, and not at all without rows: in decoding, memory is read at the speed of the device.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jspec.kernels import hopper_quantized
from jspec.kernels.grouped_matmul import quantised_gpu
from jspec.kernels.grouped_matmul.items import items_of, write
from jspec.kernels.hopper import smem, wrong_device

Array = jax.Array

TILE_ROWS = 64  # rows of a wgmma
COLUMN_MULTIPLE, DEPTH_MULTIPLE = 64, 16


@dataclasses.dataclass(frozen=True)
class Blocks:
    """Sizes of the work. Two programs of the default ones share a multiprocessor."""

    columns: int = 128
    depth: int = 64
    stages: int = 3  # blocks in shared memory


def choose_blocks(depth: int, columns: int) -> Blocks:
    """Choose sizes for matrices [depth, columns]."""
    return Blocks(
        next(size for size in (128, 64) if columns % size == 0),
        next(size for size in (64, 32, 16) if depth % size == 0),
    )


def refusal(
    x: Array,
    weights: Array,
    sizes: Array,
    scales: Array | None = None,
    zeros: Array | None = None,
) -> str | None:
    """Return the reason why these arguments are not taken, with the remedy, or None."""
    del x, sizes, zeros
    if scales is not None and weights.shape[1] != scales.shape[1]:
        return "takes values [E, N, K] with scales [E, N, G], not [E, K, N]; transpose both"
    reason = _refusal(weights) if scales is None else hopper_quantized.refusal(weights, scales)
    if reason is None and jax.default_backend() == "gpu":
        return wrong_device(jax.devices()[0])
    return reason


def _refusal(weights: Array) -> str | None:
    _, depth, columns = weights.shape
    if weights.dtype != jnp.bfloat16:
        return f"takes matrices in bfloat16, not {weights.dtype}; convert them"
    if depth % DEPTH_MULTIPLE or columns % COLUMN_MULTIPLE:
        multiples = f"a multiple of {DEPTH_MULTIPLE} rows and of {COLUMN_MULTIPLE} columns"
        return f"takes matrices of {multiples}, not {depth} x {columns}; pad them"
    return None


# A function of its own in the program is lowered once, not once per layer.
@functools.partial(jax.jit, static_argnames=("blocks", "interpret"))
def grouped_matmul(
    x: Array,
    weights: Array,
    sizes: Array,
    scales: Array | None = None,
    zeros: Array | None = None,
    *,
    blocks: Blocks | hopper_quantized.Blocks | None = None,
    interpret: object = None,
) -> Array:
    """Multiply as the reference does.

    ``blocks`` None chooses by shape; ``interpret`` takes Mosaic GPU's interpreter parameters.
    """
    if scales is not None:
        return quantised_gpu.grouped_matmul(
            x, weights, sizes, scales, zeros, blocks=blocks, interpret=interpret
        )
    rows, (_, depth, columns) = len(x), weights.shape
    blocks = blocks or choose_blocks(depth, columns)
    items = items_of(sizes, rows, TILE_ROWS)
    x = jnp.pad(x.astype(weights.dtype), ((0, TILE_ROWS), (0, 0)))
    options = {} if interpret is None else {"interpret": interpret}
    swizzle = min(blocks.depth * weights.dtype.itemsize, 128)
    staged = lambda *shape: smem(*shape, weights.dtype, blocks.stages, swizzle=swizzle)
    out = plgpu.kernel(
        functools.partial(_kernel, blocks=blocks),
        out_type=jax.ShapeDtypeStruct((rows, columns), jnp.float32),
        grid=(len(items.group), columns // blocks.columns),
        grid_names=("item", "tile"),
        scratch_types=[
            staged(TILE_ROWS, blocks.depth),
            staged(blocks.depth, blocks.columns),
            plgpu.SMEM((TILE_ROWS, blocks.columns), jnp.float32),
            plgpu.Barrier(num_barriers=blocks.stages),
            plgpu.Barrier(num_barriers=blocks.stages),
        ],
        **options,
    )(*items, x, weights)
    # The kernel leaves rows of no group as they are.
    return jnp.where(jnp.arange(rows)[:, None] < sizes.sum(), out, 0)


def _kernel(group, begin, count, x, weights, out, x_s, weights_s, out_s, *ready, blocks):
    """Multiply the rows of one item with some columns of its matrix."""
    item = lax.axis_index("item")
    first, rows = begin[item], count[item]
    columns = pl.ds(lax.axis_index("tile") * blocks.columns, blocks.columns)
    steps = x.shape[1] // blocks.depth

    def fetch(step):
        @pl.when(step < steps)
        def _():
            stage = lax.rem(step, jnp.int32(blocks.stages))
            depth = pl.ds(step * blocks.depth, blocks.depth)
            sources = x.at[pl.ds(first, TILE_ROWS), depth], weights.at[group[item], depth, columns]
            for source, staged, barrier in zip(sources, (x_s, weights_s), ready, strict=True):
                plgpu.copy_gmem_to_smem(source, staged.at[stage], barrier.at[stage])

    def product(accumulator):
        def turn(step, _):
            stage = lax.rem(step, jnp.int32(blocks.stages))
            for barrier in ready:
                plgpu.barrier_wait(barrier.at[stage])
            plgpu.wgmma(accumulator, x_s.at[stage], weights_s.at[stage])
            plgpu.wgmma_wait(1)  # The product of the last turn is complete: its stage is free.
            fetch(step + blocks.stages - 1)

        lax.fori_loop(0, steps, turn, None)
        return accumulator[...]

    @pl.when(rows > 0)
    def _():
        for step in range(blocks.stages - 1):
            fetch(jnp.int32(step))
        out_s[...] = pl.run_scoped(product, plgpu.ACC((TILE_ROWS, blocks.columns), jnp.float32))
        plgpu.commit_smem()
        write(out_s, out, first, rows, columns)

"""Grouped product with quantised matrices for NVIDIA Hopper GPUs (Pallas on Mosaic GPU).

One warpgroup multiplies a tile of rows of one group with 64 outputs of its matrix; see
``kernels.hopper_quantized``. A matrix is read as it is stored, once for every tile of its group,
and not at all without rows. Tiles are as small as few rows for each group allow.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jspec.kernels import hopper_quantized as tiles
from jspec.kernels.grouped_matmul.items import items_of, write
from jspec.kernels.hopper_quantized import ROW_MULTIPLE, TILE_OUTPUTS, Blocks

Array = jax.Array

MOST_ROWS = 128  # rows of a tile


def choose_rows(rows: int, groups: int) -> int:
    """Choose the rows of a tile: twice those of a group, if all have equally many."""
    share = 2 * -(-rows // groups)
    return min(max(1 << (share - 1).bit_length(), ROW_MULTIPLE), MOST_ROWS)


def grouped_matmul(
    x: Array,
    values: Array,
    sizes: Array,
    scales: Array,
    zeros: Array | None,
    *,
    blocks: Blocks | None = None,
    interpret: object = None,
) -> Array:
    """Multiply as the reference does; see ``pallas_gpu``."""
    rows, (groups, outputs, inputs) = len(x), values.shape
    count, num_scales = choose_rows(rows, groups), scales.shape[-1]
    form = tiles.Form(
        blocks=blocks or tiles.choose_blocks(count, values, num_scales),
        rows=count,
        inputs=inputs,
        size=inputs // num_scales,
        is_e2m1=values.dtype == jnp.float4_e2m1fn,
        has_exponents=scales.dtype == jnp.float8_e8m0fnu,
    )
    items, given = items_of(sizes, rows, count), tiles.operands_of(x, values, scales, zeros)
    x = jnp.pad(given.x, ((0, count + -rows % ROW_MULTIPLE), (0, 0)))
    factors = (given.scales,) if zeros is None else (given.scales, given.zeros)
    options = {} if interpret is None else {"interpret": interpret}
    out = plgpu.kernel(
        functools.partial(_kernel, form=form, has_zeros=zeros is not None),
        out_type=jax.ShapeDtypeStruct((rows, outputs), jnp.float32),
        grid=(len(items.group), outputs // TILE_OUTPUTS),
        grid_names=("item", "tile"),
        scratch_types=[
            plgpu.SMEM((count, TILE_OUTPUTS), jnp.float32),
            *tiles.scratch(form, given),
        ],
        **options,
    )(*items, given.values, x, *factors)
    # The kernel leaves rows of no group as they are.
    out = jnp.where(jnp.arange(rows)[:, None] < sizes.sum(), out, 0)
    return out if given.unit is None else out * given.unit


def _kernel(group, begin, count, values, x, scales, *refs, form, has_zeros):
    """Multiply the rows of one item with some outputs of its matrix."""
    zeros, refs = (refs[0], refs[1:]) if has_zeros else (None, refs)
    out, out_s, *memory = refs
    item = lax.axis_index("item")
    first, rows = begin[item], count[item]
    outputs = pl.ds(lax.axis_index("tile") * TILE_OUTPUTS, TILE_OUTPUTS)

    @pl.when(rows > 0)
    def _():
        matrix = tiles.Matrix(values, scales, zeros, lead=(group[item],))
        here, steps = pl.ds(first, form.rows), jnp.int32(form.steps)
        total = tiles.sums_of_tile(form, matrix, outputs, x, here, jnp.int32(0), steps, *memory)
        tiles.store(total, out_s, is_interpreted=form.blocks.is_interpreted)
        write(out_s, out, first, rows, outputs)

"""Grouped product with quantised matrices [E, K, N] for TPU (Pallas on Mosaic TPU).

The kernel has the indices of the matrices of all tiles of rows before it begins. So the values of
the next tile arrive as they are stored, while one is multiplied. They are scaled in float32 and
rounded to bfloat16 in vector memory, which is the matrix that the weight stands for. A matrix
without rows is never read, and the others once for each tile of their rows.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from jspec.core.weights import size_of

Array = jax.Array

TILE_ROWS, MOST_ROWS = 16, 128  # least and largest tile of rows; 16 is one of bfloat16
TILE_OUTPUTS = 256  # columns of the matrix unit
INPUT_MULTIPLE, SIZE_MULTIPLE = 64, 32  # inputs of a matrix, and of a group
BLOCK_INPUTS = 1024  # inputs that are widened at once
VALUES = ("int4", "int8", "float8_e4m3fn", "float8_e5m2", "float4_e2m1fn")
FACTORS = ("bfloat16", "float32", "float8_e8m0fnu")
OTHER_BYTES = 8 << 20  # vector memory of a block in float32, and of the compiler


def refusal(
    x: Array,
    weights: Array,
    sizes: Array,
    scales: Array | None = None,
    zeros: Array | None = None,
) -> str | None:
    """Return the reason why these arguments are not taken, with the remedy, or None."""
    del x, sizes
    if scales is None:
        return "takes quantised matrices alone; leave others to XLA"
    if weights.shape[1] == scales.shape[1]:
        return "takes values [E, K, N] with scales [E, G, N], not [E, N, K]; transpose both"
    if weights.dtype.name not in VALUES:
        return f"takes values in {', '.join(VALUES)}, not {weights.dtype}; convert them"
    for factors in (scales, zeros):
        if factors is not None and factors.dtype.name not in FACTORS:
            return f"takes factors in {', '.join(FACTORS)}, not {factors.dtype}; convert them"
    inputs, size = weights.shape[1], weights.shape[1] // scales.shape[1]
    if size % SIZE_MULTIPLE or inputs % INPUT_MULTIPLE:
        multiples = f"a multiple of {INPUT_MULTIPLE} inputs, in groups of {SIZE_MULTIPLE} n"
        return f"takes {multiples}, not {inputs} in groups of {size}; pad them"
    return None


class Items(NamedTuple):
    """Tiles of rows and one group each, int32 [I]; those behind the last have no rows.

    Groups that share a tile follow each other.
    """

    group: Array
    tile: Array
    begin: Array  # rows of the group in the tile
    end: Array


def items_of(sizes: Array, rows: int, height: int) -> Items:
    """Return the work of groups with ``sizes`` [E], ``rows`` together at most."""
    ends, groups = jnp.cumsum(sizes), len(sizes)
    begins = ends - sizes
    first = begins // height
    tiles = jnp.where(sizes > 0, (ends - 1) // height - first + 1, 0)
    last = jnp.cumsum(tiles)
    number = jnp.arange(min(groups, rows) + -(-rows // height), dtype=jnp.int32)
    item = jnp.minimum(number, jnp.maximum(last[-1] - 1, 0))  # Items without rows move nothing.
    group = jnp.minimum((last <= item[:, None]).sum(1), groups - 1)
    tile = first[group] + item - (last - tiles)[group]
    end = jnp.where(number < last[-1], jnp.minimum(ends[group], (tile + 1) * height), 0)
    integers = group, tile, jnp.maximum(begins[group], tile * height), end
    return Items(*(x.astype(jnp.int32) for x in integers))


def choose_rows(rows: int, groups: int) -> int:
    """Choose the rows of a tile: as many as a group has, if all have equally many."""
    share = -(-rows // groups)
    return min(max(1 << (share - 1).bit_length(), TILE_ROWS), MOST_ROWS)


# A function of its own in the program is lowered once, not once per layer.
@functools.partial(jax.jit, static_argnames="interpret")
def grouped_matmul(
    x: Array,
    values: Array,
    sizes: Array,
    scales: Array,
    zeros: Array | None = None,
    *,
    interpret: bool | pltpu.InterpretParams = False,
) -> Array:
    """Multiply as the reference does, with numbers of matrices that are rounded to bfloat16."""
    rows, (groups, inputs, outputs) = len(x), values.shape
    height, width = choose_rows(rows, groups), min(TILE_OUTPUTS, outputs)
    padded = -(-rows // height) * height
    items = items_of(sizes, rows, height)
    x = jnp.pad(x.astype(jnp.bfloat16), ((0, padded - rows), (0, 0)))
    stack = [each for each in (values, scales, zeros) if each is not None]
    if not interpret:  # else XLA may move all of it into vector memory
        stack = [pltpu.with_memory_space_constraint(each, pltpu.HBM) for each in stack]

    def of_group(count: int) -> pl.BlockSpec:
        shape = (1, count, width)
        return pl.BlockSpec(shape, lambda column, item, *refs: (refs[0][item], 0, column))

    arrived = sum(size_of(each) // groups * width // outputs for each in stack)
    out = pl.pallas_call(
        functools.partial(_kernel, size=inputs // scales.shape[1]),
        out_shape=jax.ShapeDtypeStruct((padded, outputs), jnp.float32),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(items),
            grid=(pl.cdiv(outputs, width), len(items.group)),
            in_specs=[
                pl.BlockSpec((height, inputs), lambda _, item, *refs: (refs[1][item], 0)),
                *(of_group(each.shape[1]) for each in stack),
            ],
            out_specs=pl.BlockSpec(
                (height, width), lambda column, item, *refs: (refs[1][item], column)
            ),
        ),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary"),
            vmem_limit_bytes=2 * arrived + 4 * height * (inputs + 2 * width) + OTHER_BYTES,
        ),
        interpret=interpret,
        name="grouped_matmul",
    )(*items, x, *stack)
    # The kernel leaves rows of no group as they are.
    return jnp.where(jnp.arange(rows)[:, None] < sizes.sum(), out[:rows], 0)


def _kernel(group, tile, begin, end, x, values, scales, *refs, size):
    """Add the rows of one item to the outputs of its tile; groups have ``size`` inputs."""
    del group
    *zeros, out = refs
    item, (height, inputs) = pl.program_id(1), x.shape
    first, last = begin[item] - tile[item] * height, end[item] - tile[item] * height

    @pl.when((item == 0) | (tile[item] != tile[jnp.maximum(item - 1, 0)]))
    def _():
        out[...] = jnp.zeros_like(out)

    def numbers(at, count):
        """Return inputs of the matrix from ``at`` on, in bfloat16."""
        groups = pl.ds(at // size, count // size)
        wide = values[0, pl.ds(at, count)]
        wide = _from_e2m1(wide) if wide.dtype == jnp.float4_e2m1fn else wide.astype(jnp.float32)
        wide = wide.reshape(count // size, size, wide.shape[-1])
        for ref in zeros:
            wide = wide - jnp.expand_dims(ref[0, groups].astype(jnp.float32), 1)
        factors = scales[0, groups]
        is_power = factors.dtype == jnp.float8_e8m0fnu
        factors = _from_e8m0(factors) if is_power else factors.astype(jnp.float32)
        wide = wide * jnp.expand_dims(factors, 1)
        return wide.astype(jnp.bfloat16).reshape(count, -1)

    @pl.when(last > first)
    def _():
        row = lax.broadcasted_iota(jnp.int32, (height, 1), 0)
        is_of = (row >= first) & (row < last)
        step = max(BLOCK_INPUTS // size, 1) * size
        for at in range(0, inputs, step):
            count = min(step, inputs - at)
            part = jnp.dot(
                x[:, at : at + count], numbers(at, count), preferred_element_type=jnp.float32
            )
            out[...] += jnp.where(is_of, part, 0)


def _from_e2m1(numbers: Array) -> Array:
    """Return numbers of float4_e2m1fn in float32, by their bits."""
    bits = lax.bitcast_convert_type(numbers, jnp.int4).astype(jnp.int32)
    size = bits & 7
    normal = lax.bitcast_convert_type((size << 22) + (126 << 23), jnp.float32)
    number = jnp.where(size < 2, size.astype(jnp.float32) * 0.5, normal)
    return jnp.where(bits < 0, -number, number)


def _from_e8m0(powers: Array) -> Array:
    """Return powers of two in float32, by their bits; TPUs have none below 2**-126."""
    bits = lax.bitcast_convert_type(powers, jnp.uint8).astype(jnp.int32)
    return lax.bitcast_convert_type(bits << 23, jnp.float32)

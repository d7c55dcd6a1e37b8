"""Product with a quantised matrix [I, O] for TPU (Pallas on Mosaic TPU).

The rows stay in vector memory. Values and factors of a tile of outputs arrive as they are stored,
while the tile before is multiplied. A block of values is scaled in float32 and rounded to bfloat16
there, which is the matrix that the weight stands for, and multiplied. So the matrix is read once
for all rows, and never written.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from jspec.core.quantized import KERNEL_ROWS, Factors, is_multiplied_out
from jspec.core.weights import linear, size_of

Array = jax.Array

TILE_OUTPUTS = 256  # columns of the matrix unit
ROW_MULTIPLE = 16  # rows of a tile of bfloat16
LANES = 128
SIZES = (16, 32, 64, 128)  # inputs of a group
BLOCK_GROUPS = 16  # groups of a block; their factors of two bytes fill a tile
VALUES = ("int4", "uint4", "int8", "float8_e4m3fn", "float8_e5m2")
FACTORS = ("bfloat16", "float16", "float32", "int8", "uint8")
SUPERBLOCK = 8  # groups with one outer factor, or a multiple of them
OTHER_BYTES = 8 << 20  # vector memory of a block in float32, and of the compiler


def refusal(
    x: Array,
    values: Array,
    scales: Array,
    zeros: Array | None = None,
    outer_scales: Array | None = None,
    minima: Array | None = None,
    outer_minima: Array | None = None,
) -> str | None:
    """Return the reason why these arguments are not taken, with the remedy, or None."""
    del minima, outer_minima  # XLA multiplies them.
    if len(values) == len(scales):
        return "takes values [I, O] with scales [G, O], not [O, I] with [O, G]; transpose both"
    (inputs, outputs), size = values.shape, len(values) // len(scales)
    if values.dtype.name not in VALUES:
        return f"takes values in {', '.join(VALUES)}, not {values.dtype}; convert them"
    for factors in (scales, zeros, outer_scales):
        if factors is not None and factors.dtype.name not in FACTORS:
            return f"takes factors in {', '.join(FACTORS)}, not {factors.dtype}; convert them"
    if inputs % LANES or outputs % LANES or size not in SIZES:
        sizes = ", ".join(map(str, SIZES))
        return (
            f"takes multiples of {LANES} inputs and outputs, in groups of {sizes}, not {inputs} "
            f"and {outputs} in groups of {size}; pad them"
        )
    count = SUPERBLOCK if outer_scales is None else len(scales) // len(outer_scales)
    if count % SUPERBLOCK:
        return (
            f"takes superblocks of {SUPERBLOCK}n groups, not of {count}; multiply their factors out"
        )
    if len(x) > KERNEL_ROWS:
        return f"takes up to {KERNEL_ROWS} rows, not {len(x)}; multiply the matrix out"
    return None


def is_better(x: Array, values: Array, scales: Array, *others: Array | None) -> bool:
    """Return whether the kernel moves fewer bytes than XLA, as compiled."""
    del others
    return is_multiplied_out(len(x), len(values) // len(scales))


def quantized_matmul(
    x: Array,
    values: Array,
    scales: Array,
    zeros: Array | None = None,
    outer_scales: Array | None = None,
    minima: Array | None = None,
    outer_minima: Array | None = None,
    *,
    offset: int = 0,
    interpret: bool | pltpu.InterpretParams = False,
) -> Array:
    """Multiply as the reference does, with numbers of the matrix that are rounded to bfloat16.

    XLA multiplies minima, and reads them once.
    """
    out = _product(x, values, scales, zeros, outer_scales, offset=offset, interpret=interpret)
    if minima is None:
        return out
    rounded = x.astype(jnp.bfloat16).astype(jnp.float32)
    sums = rounded.reshape(len(x), len(minima), -1).sum(-1)
    return out + linear(sums, Factors(minima, outer_minima).array(-2))


# A function of its own in the program is lowered once, not once per layer.
@functools.partial(jax.jit, static_argnames=("offset", "interpret"))
def _product(
    x: Array,
    values: Array,
    scales: Array,
    zeros: Array | None,
    outer_scales: Array | None,
    *,
    offset: int,
    interpret: bool | pltpu.InterpretParams,
) -> Array:
    """Return the product without minima."""
    rows, (inputs, outputs), groups = len(x), values.shape, len(scales)
    padded = -(-rows // ROW_MULTIPLE) * ROW_MULTIPLE
    x = jnp.pad(x.astype(jnp.bfloat16), ((0, padded - rows), (0, 0)))
    factors = [each for each in (scales, zeros, outer_scales) if each is not None]
    matrix = [values, *map(_bits, factors)]
    if not interpret:  # else XLA may move all of it into vector memory
        matrix = [pltpu.with_memory_space_constraint(each, pltpu.HBM) for each in matrix]
    tile = min(TILE_OUTPUTS, outputs)
    of_tile = lambda height: pl.BlockSpec((height, tile), lambda i: (0, i))
    arrived = (size_of(x), *(size_of(each) * tile // outputs for each in matrix))
    out = pl.pallas_call(
        functools.partial(_kernel, has_zeros=zeros is not None, offset=offset),
        out_shape=jax.ShapeDtypeStruct((padded, outputs), jnp.float32),
        grid=(pl.cdiv(outputs, tile),),
        in_specs=[
            pl.BlockSpec((padded, inputs), lambda _: (0, 0)),
            *(of_tile(len(each)) for each in matrix),
        ],
        out_specs=of_tile(padded),
        scratch_shapes=[pltpu.VMEM((groups, tile), jnp.float32)],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel",), vmem_limit_bytes=2 * sum(arrived) + OTHER_BYTES
        ),
        cost_estimate=pl.CostEstimate(
            flops=2 * padded * values.size,
            transcendentals=0,
            bytes_accessed=size_of(x) + sum(map(size_of, matrix)) + 4 * padded * outputs,
        ),
        interpret=interpret,
        name="quantized_matmul",
    )(x, *matrix)
    return out[:rows]


def _bits(factors: Array) -> Array:
    """Return factors as a TPU loads them: those in float16 as whole numbers."""
    is_half = factors.dtype == jnp.float16
    return lax.bitcast_convert_type(factors, jnp.int16) if is_half else factors


def _kernel(x, values, inner, *refs, has_zeros, offset):
    """Multiply with the outputs of one tile, whose scales become one array ``scales``."""
    *refs, out, scales = refs
    zeros, outer = refs[:has_zeros], refs[has_zeros:]
    inputs, (groups, tile) = values.shape[0], scales.shape
    size = inputs // groups
    count = groups // BLOCK_GROUPS
    wide = _in_float32(inner[...])
    for ref in outer:
        wide = wide.reshape(len(ref), -1, tile) * jnp.expand_dims(_in_float32(ref[...]), 1)
    scales[...] = wide.reshape(groups, tile)

    def product(block, groups):
        """Return the product with some groups of a block."""
        first = pl.multiple_of(block * BLOCK_GROUPS, BLOCK_GROUPS)
        begin, width = pl.multiple_of(first * size, BLOCK_GROUPS * size), groups * size
        factors = lambda ref: jnp.expand_dims(_in_float32(ref[pl.ds(first, groups)]), 1)
        wide = values[pl.ds(begin, width)].astype(jnp.float32).reshape(groups, size, -1)
        wide = wide + jnp.float32(offset) if offset else wide
        for ref in zeros:
            wide = wide - factors(ref)
        wide = (wide * factors(scales)).astype(jnp.bfloat16).reshape(width, -1)
        contracted = (((1,), (0,)), ((), ()))
        return lax.dot_general(
            x[:, pl.ds(begin, width)], wide, contracted, preferred_element_type=jnp.float32
        )

    def turn(block, _):
        out[...] += product(block, BLOCK_GROUPS)

    rest = groups - count * BLOCK_GROUPS
    out[...] = product(jnp.int32(count), rest) if rest else jnp.zeros_like(out)
    if count:
        lax.fori_loop(0, count, turn, None)


def _in_float32(factors: Array) -> Array:
    """Return factors in float32; int16 are the bits of float16."""
    if factors.dtype != jnp.int16:
        return factors.astype(jnp.float32)
    bits = factors.astype(jnp.int32)
    size = lax.bitcast_convert_type(((bits & 0x7FFF) << 13) + (112 << 23), jnp.float32)
    small = (bits & 0x3FF).astype(jnp.float32) * 2.0**-24
    size = jnp.where(bits & 0x7C00 == 0, small, size)
    return jnp.where(bits < 0, -size, size)

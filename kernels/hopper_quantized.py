"""Products with quantised matrices on NVIDIA Hopper GPUs, shared by kernels (Pallas, Mosaic GPU).

One warpgroup multiplies up to 128 rows with 64 outputs of a matrix. Values arrive by TMA as they
are stored, ``stages`` blocks in flight. They are converted in registers, where wgmma takes them;
the sums of each group are scaled in float32. Rows are the narrow operand, so sums are transposed.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jspec.core.weights import bits_of
from jspec.kernels.hopper import NO_INDEX, smem

Array = jax.Array

TILE_OUTPUTS = 64  # rows of a wgmma
ROW_MULTIPLE = 8  # columns of a wgmma
DEPTH_MULTIPLE = 64
SMALL_GROUPS = (16, 32)  # inputs, as of GGUF and MXFP4; a block of inputs has several such groups
IN_FLIGHT = 40 << 10  # bytes of values that cover the latency of memory
SHARED = 110 << 10  # bytes of shared memory of a program, so that two share a multiprocessor
# Dtypes of values, and those that they are converted to, exactly.
OPERANDS = {
    "int4": "bfloat16",
    "int8": "bfloat16",
    "float8_e4m3fn": "float16",
    "float8_e5m2": "float16",
    "float4_e2m1fn": "float16",
}
# Registers of 4 and 8 bits, of which a few shuffles make those of 16 bits.
LAYOUTS = {4: plgpu.Layout.WGMMA_UPCAST_4X, 8: plgpu.Layout.WGMMA_UPCAST_2X}
# The bits of float4_e2m1fn, shifted to those of float16, are the number divided by this.
_E2M1_UNIT = 2.0**14
_E2M1_SHIFT, _E2M1_BITS = 9, 0x8E00 - (1 << 16)


@dataclasses.dataclass(frozen=True)
class Blocks:
    """Sizes of the work."""

    splits: int = 1  # programs that share the inputs of an output
    depth: int = 128  # inputs per block
    stages: int = 4  # blocks in shared memory
    is_interpreted: bool = False  # JAX interprets no layouts of registers


def choose_blocks(rows: int, values: Array, groups: int, splits: int = 1) -> Blocks:
    """Choose sizes for values [..., O, I] with ``groups`` groups of inputs."""
    inputs = values.shape[-1]
    size = inputs if inputs // groups in SMALL_GROUPS else inputs // groups
    depth = 128 if size % 128 == 0 else 64
    of_values = TILE_OUTPUTS * depth * bits_of(values.dtype) // 8
    fits = SHARED // (of_values + 2 * depth * rows)
    return Blocks(min(splits, inputs // depth), depth, max(2, min(IN_FLIGHT // of_values, fits)))


def refusal(values: Array, scales: Array) -> str | None:
    """Return the reason why values [..., O, I] are not taken, with the remedy, or None."""
    *_, outputs, inputs = values.shape
    size = inputs // scales.shape[-1]
    if values.dtype.name not in OPERANDS:
        return f"takes values in {', '.join(OPERANDS)}, not {values.dtype}; convert them"
    of_groups = inputs if size in SMALL_GROUPS else size
    if outputs % TILE_OUTPUTS or of_groups % DEPTH_MULTIPLE:
        small = " or ".join(map(str, SMALL_GROUPS))
        return (
            f"takes a multiple of {TILE_OUTPUTS} outputs, and groups of {small} or a multiple of "
            f"{DEPTH_MULTIPLE} inputs, not {outputs} with groups of {size}; pad them"
        )
    return None


class Operands(NamedTuple):
    """The arguments of a kernel, in dtypes that it converts."""

    x: Array  # [T, I]
    values: Array  # [..., O, I]
    scales: Array  # [..., O, G]; those of float8_e8m0fnu are exponents of float32 in uint8
    zeros: Array | None
    unit: Array | None  # float32 [T, 1] or [], the factor of the results; None for 1


def operands_of(x: Array, values: Array, scales: Array, zeros: Array | None) -> Operands:
    """Return the arguments as a kernel takes them; numbers without an instruction become bits."""
    dtype, x = jnp.dtype(OPERANDS[values.dtype.name]), x.astype(jnp.bfloat16)
    unit = _power_of_rows(x) if dtype == jnp.float16 else None
    x = (x if unit is None else x / unit).astype(dtype)
    unit = None if unit is None else unit.astype(jnp.float32)
    if values.dtype == jnp.float4_e2m1fn:
        values, unit = lax.bitcast_convert_type(values, jnp.int4), unit * _E2M1_UNIT
    if scales.dtype == jnp.float8_e8m0fnu:
        scales = lax.bitcast_convert_type(scales, jnp.uint8)
    return Operands(x, values, scales, None if zeros is None else zeros.astype(dtype), unit)


def _power_of_rows(x: Array) -> Array:
    """Return powers of two [T, 1] that bring rows into the range of float16, without loss."""
    peak = jnp.abs(x).max(1, keepdims=True).astype(jnp.float32)
    exponent = lax.bitcast_convert_type(peak, jnp.int32) & 0x7F800000
    power = lax.bitcast_convert_type(exponent, jnp.float32) * 2.0**-13
    return jnp.where(power < 2.0**-100, 1, power)


@dataclasses.dataclass(frozen=True)
class Form:
    """The sizes of the work of a program; static and hashable."""

    blocks: Blocks
    rows: int  # T, a multiple of 8
    inputs: int
    size: int  # inputs of a group
    is_e2m1: bool  # whether int4 has the bits of float4_e2m1fn
    has_exponents: bool = False  # whether scales are exponents of float32
    offset: int = 0  # added to values

    @property
    def width(self) -> int:
        """Inputs of a product, which are of one group."""
        return min(self.size, self.blocks.depth)

    @property
    def steps(self) -> int:
        """Blocks of inputs of a matrix."""
        return self.inputs // self.blocks.depth


def scratch(form: Form, operands: Operands) -> list[Any]:
    """Return the memory of ``sums_of_tile``, its last arguments."""
    dtype, blocks, width = operands.x.dtype, form.blocks, form.width
    # JAX interprets neither operands in registers nor transposed ones.
    shapes = ((TILE_OUTPUTS, width), (width, form.rows)) if blocks.is_interpreted else ()
    swizzle = None if width == blocks.depth else width * dtype.itemsize
    return [
        smem(TILE_OUTPUTS, blocks.depth, operands.values.dtype, blocks.stages),
        smem(form.rows, blocks.depth, dtype, blocks.stages, swizzle=swizzle),
        plgpu.Barrier(num_barriers=blocks.stages),
        plgpu.Barrier(num_barriers=blocks.stages),
        *(plgpu.SMEM(shape, dtype) for shape in shapes),
    ]


class Matrix(NamedTuple):
    """A quantised matrix in memory, or a stack of them."""

    values: Any  # [..., O, I]
    scales: Any  # [..., O, G]
    zeros: Any
    lead: tuple = ()  # index of the matrix in a stack
    outer_scales: Any = None  # [..., O, S]
    minima: Any = None  # [..., O, G]
    outer_minima: Any = None  # [..., O, S]
    sums: Any = None  # Sums of rows, which minima and the offset multiply; see ``sums_of_rows``.


def sums_of_rows(form: Form, x: Array) -> Array:
    """Return the sums [P, T] of the inputs of each product; of one group only, and zeros."""
    pieces = form.inputs // form.width if form.size < form.inputs else 1
    sums = x.astype(jnp.float32).reshape(len(x), pieces, -1).sum(-1).T
    return sums if pieces > 1 else jnp.pad(sums, ((0, 1), (0, 0)))


@dataclasses.dataclass(frozen=True)
class _Groups:
    """The numbers of groups of a matrix, for the outputs of a tile."""

    form: Form
    matrix: Matrix
    outputs: Any
    rows: Any

    def load(self, ref: Any, layout: Any) -> Array:
        """Return memory in registers."""
        if self.form.blocks.is_interpreted:
            return ref[...]
        return plgpu.load(ref, layout=layout, optimized=ref.ndim > 1, **NO_INDEX)

    def numbers(self, ref: Any, begin: Array, dtype: Any = jnp.float32) -> Array:
        """Return the numbers [64] of the group that has the input ``begin``."""
        group = lax.div(begin, jnp.int32(self.form.inputs // ref.shape[-1]))
        numbers = ref.at[(*self.matrix.lead, self.outputs, group)]
        numbers = self.load(numbers, plgpu.Layout.WGMMA.reduce(1))
        has_exponents = self.form.has_exponents and ref is self.matrix.scales
        return _from_exponents(numbers) if has_exponents else numbers.astype(dtype)

    def outer(self, begin: Array) -> tuple[Array | None, Array | None]:
        """Return the outer factors of scales and minima of a block of inputs."""
        scales, minima = self.matrix.outer_scales, self.matrix.outer_minima
        return (
            None if scales is None else self.numbers(scales, begin),
            None if minima is None else self.numbers(minima, begin),
        )

    def scaled(self, sums: Array, begin: Array, outer: Any, piece: Array) -> Array:
        """Return the sums [64, T] of a product as the matrix has them.

        ``piece`` is the index of the sums of rows.
        """
        matrix, scale = self.matrix, self.numbers(self.matrix.scales, begin)
        scale = scale if outer[0] is None else scale * outer[0]
        result = sums * over(scale, self.form.rows)
        if matrix.sums is None:
            return result
        bias = scale * jnp.float32(self.form.offset)
        if matrix.minima is not None:
            minima = self.numbers(matrix.minima, begin)
            bias += minima if outer[1] is None else minima * outer[1]
        of_rows = self.load(matrix.sums.at[piece, self.rows], plgpu.Layout.WGMMA.reduce(0))
        return result + over(bias, self.form.rows) * over(of_rows, self.form.rows, axis=1)


def over(numbers: Array, columns: int, axis: int = 0) -> Array:
    """Return numbers of outputs or of columns, of axis 0 or 1, as [64, columns]."""
    return lax.broadcast_in_dim(numbers, (TILE_OUTPUTS, columns), [axis])


def sums_of_tile(form, matrix, outputs, x, rows, first, steps, *memory) -> Array:
    """Return the sums [64, T] of ``rows`` of x with ``outputs``, over ``steps`` blocks of inputs.

    They are in registers, in the layout of wgmma. Block number ``first`` comes first.
    """
    blocks, width, groups = form.blocks, form.width, _Groups(form, matrix, outputs, rows)
    values_s, x_s, values_ready, x_ready, *plain = memory
    has_groups = form.size < form.inputs

    def stage_of(step):
        return lax.rem(step, jnp.int32(blocks.stages))

    def fetch(step):
        @pl.when(step < steps)
        def _():
            stage, inputs = stage_of(step), pl.ds((first + step) * blocks.depth, blocks.depth)
            source = matrix.values.at[(*matrix.lead, outputs, inputs)]
            plgpu.copy_gmem_to_smem(source, values_s.at[stage], values_ready.at[stage])
            plgpu.copy_gmem_to_smem(x.at[rows, inputs], x_s.at[stage], x_ready.at[stage])

    def operand_of(step):
        """Return a block of values as wgmma takes them."""
        operand = groups.load(values_s.at[stage_of(step)], LAYOUTS[bits_of(values_s.dtype)])
        if not plain:
            operand = plgpu.layout_cast(operand, plgpu.Layout.WGMMA)
        return _from_e2m1(operand) if form.is_e2m1 else operand.astype(x.dtype)

    def turn(step, total):
        fetch(step + blocks.stages - 1)  # into the stage that was read a turn ago
        block = (first + step) * blocks.depth
        outer = groups.outer(block)
        plgpu.barrier_wait(values_ready.at[stage_of(step)])
        whole = operand_of(step)
        plgpu.barrier_wait(x_ready.at[stage_of(step)])
        for begin in range(0, blocks.depth, width):
            operand = whole[:, begin : begin + width]
            if matrix.zeros is not None:
                zeros = groups.numbers(matrix.zeros, block + begin, x.dtype)
                operand = operand - over(zeros, width)
            part = x_s.at[stage_of(step), :, pl.ds(begin, width)]
            sums = _product(operand, part, form.rows, plain)
            if has_groups:
                piece = lax.div(block + begin, jnp.int32(width))
                sums = groups.scaled(sums, block + begin, outer, piece)
            total += sums
        return total

    for step in range(blocks.stages - 1):
        fetch(jnp.int32(step))
    total = jnp.zeros((TILE_OUTPUTS, form.rows), jnp.float32)
    if not plain:
        total = plgpu.layout_cast(total, plgpu.Layout.WGMMA)
    total = lax.fori_loop(0, steps, turn, total)
    if not has_groups:
        # The first block of inputs adds what the sums of rows are for.
        piece = jnp.minimum(first, jnp.int32(1))
        total = groups.scaled(total, jnp.int32(0), (None, None), piece)
    return total


def _from_exponents(numbers: Array) -> Array:
    """Return the powers of two of float8_e8m0fnu, given its bits; the least is 2**-127."""
    bits = jnp.maximum(numbers.astype(jnp.int32) << 23, 1 << 22)
    return lax.bitcast_convert_type(bits, jnp.float32)


def _from_e2m1(codes: Array) -> Array:
    """Return the numbers of float4_e2m1fn in float16, divided by 2**14, given its bits as int4."""
    bits = codes.astype(jnp.int8).astype(jnp.int16) << _E2M1_SHIFT
    return lax.bitcast_convert_type(bits & jnp.int16(_E2M1_BITS), jnp.float16)


def _product(operand, rows, count, plain):
    """Return the product with ``count`` rows; the interpreter has memory, ``plain``, for both."""
    if plain:
        plain[0][...], plain[1][...] = operand, rows[...].T
        operand, rows = plain
    else:
        rows = rows.transpose((1, 0))

    def multiply(accumulator):
        plgpu.wgmma(accumulator, operand, rows)
        return accumulator[...]

    return pl.run_scoped(multiply, plgpu.ACC((TILE_OUTPUTS, count), jnp.float32))


def store(total: Array, out_s: Any, *, is_interpreted: bool) -> None:
    """Write sums [64, T] into shared memory [T, 64]."""
    if is_interpreted:
        out_s[...] = total.T
    else:
        total = plgpu.layout_cast(total, plgpu.Layout.WGMMA_TRANSPOSED)
        out_s.transpose((1, 0))[...] = total
    plgpu.commit_smem()

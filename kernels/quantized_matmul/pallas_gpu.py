"""Product with a quantised matrix for NVIDIA Hopper GPUs (Pallas on Mosaic GPU).

One warpgroup multiplies up to 128 rows with some outputs of the matrix, over one split of its
inputs. Values arrive by TMA as they are stored, ``stages`` blocks in flight. They are converted in
registers, where wgmma takes them; the sums of each group are scaled in float32. So the matrix is
read once for all rows, and never written. Rows are the narrow operand, so sums are transposed.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jspec.core.quantized import KERNEL_ROWS
from jspec.core.weights import bits_of
from jspec.kernels.hopper import NO_INDEX, smem, wrong_device

Array = jax.Array

TILE_OUTPUTS = 64  # rows of a wgmma
ROW_MULTIPLE = 8  # columns of a wgmma
DEPTH_MULTIPLE = 64
SMALL_GROUP = 32  # inputs of GGUF's blocks; a block of inputs has several such groups
PROGRAMS, MAX_SPLITS = 96, 4  # programs that fill the device; each split writes its sums
IN_FLIGHT = 40 << 10  # bytes of values that cover the latency of memory
SHARED = 110 << 10  # bytes of shared memory of a program, so that two share a multiprocessor
# Dtypes of values, and those that they are converted to, exactly.
OPERANDS = {
    "int4": "bfloat16",
    "int8": "bfloat16",
    "float8_e4m3fn": "float16",
    "float8_e5m2": "float16",
}
# Registers of 4 and 8 bits, of which a few shuffles make those of 16 bits.
LAYOUTS = {4: plgpu.Layout.WGMMA_UPCAST_4X, 8: plgpu.Layout.WGMMA_UPCAST_2X}


@dataclasses.dataclass(frozen=True)
class Blocks:
    """Sizes of the work."""

    splits: int = 1  # programs that share the inputs of an output
    depth: int = 128  # inputs per block
    stages: int = 4  # blocks in shared memory
    is_interpreted: bool = False  # JAX interprets no layouts of registers


def choose_blocks(rows: int, values: Array, groups: int) -> Blocks:
    """Choose sizes for values [O, I] with ``groups`` groups of inputs."""
    outputs, inputs = values.shape
    size = inputs if inputs // groups == SMALL_GROUP else inputs // groups
    depth = 128 if size % 128 == 0 else 64
    splits = min(-(-PROGRAMS // (outputs // TILE_OUTPUTS)), MAX_SPLITS, inputs // depth)
    of_values = TILE_OUTPUTS * depth * bits_of(values.dtype) // 8
    fits = SHARED // (of_values + 2 * depth * rows)
    return Blocks(splits, depth, max(2, min(IN_FLIGHT // of_values, fits)))


def refusal(x: Array, values: Array, scales: Array, zeros: Array | None) -> str | None:
    """Return the reason why these arguments are not taken, with the remedy, or None."""
    del zeros
    (outputs, inputs), size = values.shape, values.shape[1] // scales.shape[1]
    if values.dtype.name not in OPERANDS:
        return f"takes values in {', '.join(OPERANDS)}, not {values.dtype}; convert them"
    of_groups = inputs if size == SMALL_GROUP else size
    if outputs % TILE_OUTPUTS or of_groups % DEPTH_MULTIPLE:
        multiples = f"a multiple of {TILE_OUTPUTS} outputs, and groups of {SMALL_GROUP} or a"
        return (
            f"takes {multiples} multiple of {DEPTH_MULTIPLE} inputs, not {outputs} with groups of "
            f"{size}; pad them"
        )
    if len(x) > KERNEL_ROWS:
        return f"takes up to {KERNEL_ROWS} rows, not {len(x)}; multiply the matrix out"
    if jax.default_backend() == "gpu":
        return wrong_device(jax.devices()[0])
    return None


# A function of its own in the program is lowered once, not once per layer.
@functools.partial(jax.jit, static_argnames=("blocks", "interpret"))
def quantized_matmul(
    x: Array,
    values: Array,
    scales: Array,
    zeros: Array | None = None,
    *,
    blocks: Blocks | None = None,
    interpret: object = None,
) -> Array:
    """Multiply as the reference does.

    ``blocks`` None chooses by shape; ``interpret`` takes Mosaic GPU's interpreter parameters.
    """
    rows, (outputs, inputs), groups = len(x), values.shape, scales.shape[1]
    operand = jnp.dtype(OPERANDS[values.dtype.name])
    x = x.astype(jnp.bfloat16)
    size = _power_of_rows(x) if operand == jnp.float16 else None
    x = x if size is None else x / size
    padded = -(-rows // ROW_MULTIPLE) * ROW_MULTIPLE
    blocks = blocks or choose_blocks(padded, values, groups)
    x = jnp.pad(x.astype(operand), ((0, padded - rows), (0, 0)))
    factors = (scales,) if zeros is None else (scales, zeros.astype(operand))
    size_of_group = inputs // groups
    width = min(blocks.depth, size_of_group)
    # JAX interprets neither operands in registers nor transposed ones.
    shapes = ((TILE_OUTPUTS, width), (width, padded)) if blocks.is_interpreted else ()
    swizzle = None if width == blocks.depth else width * operand.itemsize
    options = {} if interpret is None else {"interpret": interpret}
    out = plgpu.kernel(
        functools.partial(_kernel, blocks=blocks, size=size_of_group, has_zeros=zeros is not None),
        out_type=jax.ShapeDtypeStruct((blocks.splits, padded, outputs), jnp.float32),
        grid=(outputs // TILE_OUTPUTS, blocks.splits),
        grid_names=("tile", "split"),
        scratch_types=[
            smem(TILE_OUTPUTS, blocks.depth, values.dtype, blocks.stages),
            smem(padded, blocks.depth, operand, blocks.stages, swizzle=swizzle),
            smem(padded, TILE_OUTPUTS, jnp.float32),
            plgpu.Barrier(num_barriers=blocks.stages),
            plgpu.Barrier(num_barriers=blocks.stages),
            *(plgpu.SMEM(shape, operand) for shape in shapes),
        ],
        **options,
    )(values, x, *factors)
    out = out[:, :rows].sum(0)
    return out if size is None else out * size


def _power_of_rows(x: Array) -> Array:
    """Return powers of two [T, 1] that bring rows into the range of float16, without loss."""
    peak = jnp.abs(x).max(1, keepdims=True).astype(jnp.float32)
    exponent = lax.bitcast_convert_type(peak, jnp.int32) & 0x7F800000
    power = lax.bitcast_convert_type(exponent, jnp.float32) * 2.0**-13
    return jnp.where(power < 2.0**-100, 1, power)


def _kernel(values, x, scales, *refs, blocks, size, has_zeros):
    """Multiply with the outputs of one tile, over one split; groups have ``size`` inputs."""
    zeros, refs = (refs[0], refs[1:]) if has_zeros else (None, refs)
    out, values_s, x_s, out_s, values_ready, x_ready, *plain = refs
    split, share = lax.axis_index("split"), -(-values.shape[1] // (blocks.depth * blocks.splits))
    outputs = pl.ds(lax.axis_index("tile") * TILE_OUTPUTS, TILE_OUTPUTS)
    first = split * share
    has_groups, width = size < values.shape[1], min(size, blocks.depth)
    steps = jnp.minimum(share, values.shape[1] // blocks.depth - first)

    def stage_of(step):
        return lax.rem(step, jnp.int32(blocks.stages))

    def fetch(step):
        @pl.when(step < steps)
        def _():
            stage, inputs = stage_of(step), pl.ds((first + step) * blocks.depth, blocks.depth)
            source = values.at[outputs, inputs]
            plgpu.copy_gmem_to_smem(source, values_s.at[stage], values_ready.at[stage])
            plgpu.copy_gmem_to_smem(x.at[:, inputs], x_s.at[stage], x_ready.at[stage])

    def load(ref, layout):
        if plain:
            return ref[...]
        return plgpu.load(ref, layout=layout, optimized=ref.ndim > 1, **NO_INDEX)

    def factor(ref, step, begin, columns):
        """Return the numbers of the group that has the input ``begin`` of a block."""
        group = lax.div((first + step) * blocks.depth + begin, jnp.int32(size))
        numbers = load(ref.at[outputs, group], plgpu.Layout.WGMMA.reduce(1))
        numbers = numbers.astype(jnp.float32 if ref is scales else x.dtype)
        return lax.broadcast_in_dim(numbers, (TILE_OUTPUTS, columns), [0])

    def operand_of(step):
        """Return a block of values as wgmma takes them."""
        part = values_s.at[stage_of(step)]
        operand = load(part, LAYOUTS[bits_of(values.dtype)])
        if not plain:
            operand = plgpu.layout_cast(operand, plgpu.Layout.WGMMA)
        return operand.astype(x.dtype)

    def turn(step, total):
        fetch(step + blocks.stages - 1)  # into the stage that was read a turn ago
        plgpu.barrier_wait(values_ready.at[stage_of(step)])
        whole = operand_of(step)
        plgpu.barrier_wait(x_ready.at[stage_of(step)])
        for begin in range(0, blocks.depth, width):
            operand = whole[:, begin : begin + width]
            if zeros is not None:
                operand = operand - factor(zeros, step, begin, width)
            rows = x_s.at[stage_of(step), :, pl.ds(begin, width)]
            sums = _product(operand, rows, x.shape[0], plain)
            total += sums * factor(scales, step, begin, x.shape[0]) if has_groups else sums
        return total

    for step in range(blocks.stages - 1):
        fetch(jnp.int32(step))
    total = jnp.zeros((TILE_OUTPUTS, x.shape[0]), jnp.float32)
    if not plain:
        total = plgpu.layout_cast(total, plgpu.Layout.WGMMA)
    total = lax.fori_loop(0, steps, turn, total)
    if not has_groups:
        total = total * factor(scales, jnp.int32(0), 0, x.shape[0])
    if plain:
        out_s[...] = total.T
    else:
        total = plgpu.layout_cast(total, plgpu.Layout.WGMMA_TRANSPOSED)
        out_s.transpose((1, 0))[...] = total
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(out_s, out.at[split, :, outputs])
    plgpu.wait_smem_to_gmem(0)


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

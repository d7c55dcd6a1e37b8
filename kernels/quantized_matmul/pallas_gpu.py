"""Product with a quantised matrix for NVIDIA Hopper GPUs (Pallas on Mosaic GPU).

One warpgroup multiplies up to 128 rows with some outputs of the matrix, over one split of its
inputs; see ``kernels.hopper_quantized``. So the matrix is read once for all rows, and never
written.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jspec.core.quantized import KERNEL_ROWS
from jspec.kernels import hopper_quantized as tiles
from jspec.kernels.hopper import smem, wrong_device
from jspec.kernels.hopper_quantized import ROW_MULTIPLE, SMALL_GROUPS, TILE_OUTPUTS, Blocks

Array = jax.Array

PROGRAMS, MAX_SPLITS = 96, 4  # programs that fill the device; each split writes its sums


def choose_blocks(rows: int, values: Array, groups: int) -> Blocks:
    """Choose sizes for values [O, I] with ``groups`` groups of inputs."""
    splits = min(-(-PROGRAMS // (values.shape[0] // TILE_OUTPUTS)), MAX_SPLITS)
    return tiles.choose_blocks(rows, values, groups, splits)


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
    del zeros
    if len(values) != len(scales):
        return "takes values [O, I] with scales [O, G], not [I, O] with [G, O]; transpose both"
    if reason := tiles.refusal(values, scales):
        return reason
    if minima is not None and values.dtype == jnp.float4_e2m1fn:
        return f"takes no minima of {values.dtype}; multiply the matrix out"
    inputs, size = values.shape[1], values.shape[1] // scales.shape[1]
    for outer in (outer_scales, outer_minima):
        if outer is not None and (size not in SMALL_GROUPS or inputs // outer.shape[1] % 128):
            return (
                f"takes outer factors of 128n inputs in groups of {SMALL_GROUPS}, not of "
                f"{inputs // outer.shape[1]} in groups of {size}; multiply them into the others"
            )
    if len(x) > KERNEL_ROWS:
        return f"takes up to {KERNEL_ROWS} rows, not {len(x)}; multiply the matrix out"
    if jax.default_backend() == "gpu":
        return wrong_device(jax.devices()[0])
    return None


# A function of its own in the program is lowered once, not once per layer.
@functools.partial(jax.jit, static_argnames=("offset", "blocks", "interpret"))
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
    blocks: Blocks | None = None,
    interpret: object = None,
) -> Array:
    """Multiply as the reference does.

    ``blocks`` None chooses by shape; ``interpret`` takes Mosaic GPU's interpreter parameters.
    """
    rows, (outputs, inputs), groups = len(x), values.shape, scales.shape[1]
    padded = -(-rows // ROW_MULTIPLE) * ROW_MULTIPLE
    form = tiles.Form(
        blocks=blocks or choose_blocks(padded, values, groups),
        rows=padded,
        inputs=inputs,
        size=inputs // groups,
        is_e2m1=values.dtype == jnp.float4_e2m1fn,
        has_exponents=scales.dtype == jnp.float8_e8m0fnu,
        offset=offset,
    )
    given = tiles.operands_of(x, values, scales, zeros)
    x = jnp.pad(given.x, ((0, padded - rows), (0, 0)))
    has_sums = minima is not None or offset != 0
    factors = {
        "scales": given.scales,
        "zeros": given.zeros,
        "outer_scales": outer_scales,
        "minima": minima,
        "outer_minima": outer_minima,
        "sums": tiles.sums_of_rows(form, x) if has_sums else None,
    }
    factors = {name: array for name, array in factors.items() if array is not None}
    options = {} if interpret is None else {"interpret": interpret}
    out = plgpu.kernel(
        functools.partial(_kernel, form=form, names=tuple(factors)),
        out_type=jax.ShapeDtypeStruct((form.blocks.splits, padded, outputs), jnp.float32),
        grid=(outputs // TILE_OUTPUTS, form.blocks.splits),
        grid_names=("tile", "split"),
        scratch_types=[smem(padded, TILE_OUTPUTS, jnp.float32), *tiles.scratch(form, given)],
        **options,
    )(given.values, x, *factors.values())
    out = out[:, :rows].sum(0)
    return out if given.unit is None else out * given.unit


def _kernel(values, x, *refs, form, names):
    """Multiply with the outputs of one tile, over one split; ``names`` are those of factors."""
    factors = {"zeros": None} | dict(zip(names, refs, strict=False))
    out, out_s, *memory = refs[len(names) :]
    split, share = lax.axis_index("split"), -(-form.steps // form.blocks.splits)
    outputs = pl.ds(lax.axis_index("tile") * TILE_OUTPUTS, TILE_OUTPUTS)
    first = split * share
    steps = jnp.minimum(share, form.steps - first)
    matrix, rows = tiles.Matrix(values, **factors), pl.ds(0, form.rows)
    total = tiles.sums_of_tile(form, matrix, outputs, x, rows, first, steps, *memory)
    tiles.store(total, out_s, is_interpreted=form.blocks.is_interpreted)
    plgpu.copy_smem_to_gmem(out_s, out.at[split, :, outputs])
    plgpu.wait_smem_to_gmem(0)

"""The grouped matrix product: every back-end is the reference, which is a loop over groups.

Mosaic GPU's interpreter simulates memory, copies and barriers, and catches races. It simulates no
layout of registers: these are only compiled.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jspec import ops
from jspec.core.quantized import SCHEMES, grouped, quantize
from jspec.kernels import hopper_quantized
from jspec.kernels.grouped_matmul import pallas_gpu, pallas_tpu, reference, xla
from jspec.kernels.grouped_matmul.items import items_of
from jspec.kernels.grouped_matmul.shapes import CASES
from jspec.models.blocks.experts import Experts, mixture
from jspec.models.quantised import ForKernel, by_xla, for_kernel

interpreting = pytest.importorskip("jax._src.pallas.mosaic_gpu.interpret.params")

# Groups without rows, with one tile and with several; rows of no group at the end.
SIZES = {
    "all kinds": ((3, 0, 70, 1, 8), 90),
    "none": ((0, 0, 0, 0, 0), 4),
    "one": ((0, 0, 0, 129, 0), 129),
    "each": ((1, 1, 1, 1, 1), 5),
}


def arguments(sizes, rows, dtype=jnp.bfloat16, depth=96, columns=128):
    keys = jax.random.split(jax.random.key(rows))
    x = jax.random.normal(keys[0], (rows, depth)).astype(dtype)
    weights = jax.random.normal(keys[1], (len(sizes), depth, columns)).astype(dtype)
    return x, weights, jnp.array(sizes, jnp.int32)


# Rows of groups, inputs, groups of inputs, dtypes of values, of scales and of zero points.
QUANTISED = {
    "MXFP4": ("all kinds", 192, 6, "float4_e2m1fn", "float8_e8m0fnu", None),
    "e2m1, scales in floats": ("each", 128, 4, "float4_e2m1fn", "bfloat16", None),
    "int4 in groups of 64": ("all kinds", 192, 3, "int4", "bfloat16", None),
    "int4 in small groups, with zeros": ("one", 192, 6, "int4", "bfloat16", "bfloat16"),
    "int8 by output": ("each", 192, 1, "int8", "float32", None),
    "int8 without rows": ("none", 64, 1, "int8", "float32", None),
    "fp8 in blocks": ("all kinds", 256, 2, "float8_e4m3fn", "float32", None),
}


def quantised_arguments(rows, depth, groups, values, scales, zeros, columns=64):
    sizes, rows = SIZES[rows]
    keys = jax.random.split(jax.random.key(rows), 4)
    draw = lambda key, *shape: jax.random.randint(keys[key], shape, -8, 8)
    powers = 2.0 ** draw(2, len(sizes), columns, groups)
    return (
        100.0 ** (jnp.arange(rows)[:, None] % 5) * jax.random.normal(keys[0], (rows, depth)),
        jnp.asarray(np.asarray(draw(1, len(sizes), columns, depth), np.float32).astype(values)),
        jnp.array(sizes, jnp.int32),
        powers.astype(scales) if scales.startswith("float8") else (1.3 * powers).astype(scales),
        zeros and draw(3, len(sizes), columns, groups).astype(zeros),
    )


def close(result, expected, tolerance=1e-5):
    """Compare each row by its own largest number."""
    error = np.abs(np.asarray(result, np.float64) - expected).max(1)
    np.testing.assert_array_less(error, tolerance * np.abs(expected).max(1) + 1e-30)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", SIZES)
def test_the_reference_and_xla_are_a_loop_over_groups(name, dtype):
    x, weights, sizes = arguments(*SIZES[name], dtype)
    expected, begin = np.zeros((len(x), weights.shape[2])), 0
    for matrix, size in zip(np.asarray(weights, np.float64), np.asarray(sizes), strict=True):
        rows = slice(begin, begin + size)
        expected[rows] = np.asarray(x[rows], np.float64) @ matrix
        begin += size
    for module in (reference, xla):
        result = jax.jit(module.grouped_matmul)(x, weights, sizes)
        assert result.dtype == jnp.float32
        np.testing.assert_allclose(result, expected, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("name", SIZES)
@pytest.mark.parametrize(
    "blocks", [pallas_gpu.Blocks(64, 32, 3), pallas_gpu.Blocks(128, 16, 2), None]
)
def test_the_kernel_for_hopper_is_the_reference(name, blocks):
    from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks

    x, weights, sizes = arguments(*SIZES[name])
    interpret = interpreting.InterpretGPUParams(detect_races=True)
    result = pallas_gpu.grouped_matmul(x, weights, sizes, blocks=blocks, interpret=interpret)
    expected = reference.grouped_matmul(x, weights, sizes)
    np.testing.assert_allclose(result, expected, rtol=1e-5, atol=1e-4)
    assert not gpu_callbacks.get_races().races_found


@pytest.mark.parametrize("name", QUANTISED)
def test_quantised_matrices_are_multiplied_as_they_are(name):
    from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks

    x, values, sizes, scales, zeros = arrays = quantised_arguments(*QUANTISED[name])
    wide = lambda array: np.repeat(np.asarray(array, np.float64), len(x.T) // scales.shape[2], 2)
    matrices = np.asarray(values, np.float64) - (0 if zeros is None else wide(zeros))
    group = np.repeat(np.arange(len(sizes)), sizes)
    expected, rows = np.zeros((len(x), 64)), np.asarray(x.astype(jnp.bfloat16), np.float64)
    expected[: len(group)] = np.einsum(
        "rk,rnk->rn", rows[: len(group)], (matrices * wide(scales))[group]
    )
    close(reference.grouped_matmul(*arrays), expected)
    blocks = hopper_quantized.choose_blocks(8, values, scales.shape[2])
    blocks = dataclasses.replace(blocks, stages=2, is_interpreted=True)
    interpret = interpreting.InterpretGPUParams(detect_races=True)
    close(pallas_gpu.grouped_matmul(*arrays, blocks=blocks, interpret=interpret), expected)
    assert not gpu_callbacks.get_races().races_found


@pytest.mark.parametrize("name", QUANTISED)
def test_the_kernel_for_tpus_multiplies_the_numbers_of_quantised_matrices(name):
    x, values, sizes, scales, zeros = quantised_arguments(*QUANTISED[name], columns=320)
    turn = lambda array: array if array is None else array.swapaxes(1, 2)
    values = jnp.asarray(np.asarray(values).swapaxes(1, 2))
    scales, zeros = turn(scales), turn(zeros)
    result = pallas_tpu.grouped_matmul(x, values, sizes, scales, zeros, interpret=True)
    # Numbers are values times scales, rounded to bfloat16.
    close(result, np.asarray(reference.grouped_matmul(x, values, sizes, scales, zeros)), 2**-7)
    by_xla = jax.jit(xla.grouped_matmul)(x, values, sizes, scales, zeros)
    close(by_xla, np.asarray(result, np.float64))


def test_every_row_has_an_item_of_a_tpu_and_groups_of_a_tile_follow_each_other():
    sizes = np.array([3, 0, 70, 16, 8], np.int32)
    items = pallas_tpu.items_of(jnp.array(sizes), 150, 16)
    rows = [
        (int(group), row)
        for group, tile, begin, end in zip(*items, strict=True)
        for row in range(begin, end)
        if row // 16 == tile
    ]
    assert rows == list(zip(np.repeat(np.arange(5), sizes), range(97), strict=True))
    assert (np.diff(items.tile) >= 0).all() and (np.diff(items.group) >= 0).all()


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_the_kernel_lowers_at_the_real_size(case):
    def multiply(*arrays):
        return ops.grouped_matmul(*arrays, implementation="pallas_gpu")

    lowered = jax.jit(multiply).trace(*case.arrays()).lower(lowering_platforms=("cuda",))
    assert lowered.as_text().count("mosaic_gpu") >= 1
    assert lowered.out_info.shape == (case.rows, case.columns)


def test_every_row_has_an_item_and_groups_without_rows_have_none():
    sizes = np.array([3, 0, 70, 64, 8], np.int32)
    items = items_of(jnp.array(sizes), 150, pallas_gpu.TILE_ROWS)
    rows = [
        (int(group), row)
        for group, begin, count in zip(*items, strict=True)
        for row in range(begin, begin + count)
    ]
    assert rows == list(zip(np.repeat(np.arange(5), sizes), range(145), strict=True))
    assert (np.asarray(items.count) > 0).sum() == 5
    # No more than 40 experts run for 40 rows, though there are 128.
    assert len(items_of(jnp.zeros(128, jnp.int32), 40, 64).group) == 40


def test_the_numbers_of_four_and_eight_bits_are_exact():
    codes = np.arange(16, dtype=np.uint8)
    numbers = hopper_quantized._from_e2m1(jnp.asarray(codes.view(ml_dtypes.int4)))
    expected = codes.view(ml_dtypes.float4_e2m1fn).astype(np.float32)
    np.testing.assert_array_equal(np.asarray(numbers, np.float32) * 2.0**14, expected)
    bits = np.arange(255, dtype=np.uint8)
    powers = hopper_quantized._from_exponents(jnp.asarray(bits))
    np.testing.assert_array_equal(powers, bits.view(ml_dtypes.float8_e8m0fnu).astype(np.float32))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(dtype="float32"), "takes matrices in bfloat16, not float32; convert them"),
        (dict(columns=96), "multiple of 16 rows and of 64 columns, not 96 x 96; pad them"),
        (dict(depth=40), "not 40 x 128"),
    ],
)
def test_matrices_that_the_kernel_does_not_take_are_refused(changes, message):
    arrays = arguments((3, 2), 5, **changes)
    with pytest.raises(ValueError, match=message):
        ops.grouped_matmul(*arrays, implementation="pallas_gpu")
    np.testing.assert_allclose(
        ops.grouped_matmul(*arrays), reference.grouped_matmul(*arrays), atol=1e-4
    )


def test_quantised_matrices_that_the_kernel_does_not_take_are_refused():
    for sizes, message in (
        (("each", 128, 2, "uint4", "float32", None), "takes values in int4, int8.*, not uint4"),
        (("each", 128, 16, "int8", "float32", None), "groups of 16 or 32 or a.*groups of 8; pad"),
    ):
        arrays = quantised_arguments(*sizes)
        with pytest.raises(ValueError, match=message):
            ops.grouped_matmul(*arrays, implementation="pallas_gpu")
    with pytest.raises(ValueError, match=r"takes values .* not \[E, N, K\]; transpose"):
        ops.grouped_matmul(*arrays, implementation="pallas_tpu")
    with pytest.raises(ValueError, match="takes quantised matrices alone; leave others to XLA"):
        ops.grouped_matmul(*arguments((3, 2), 5), implementation="pallas_tpu")
    x, _, sizes, _, _ = arrays
    for values, groups, message in (
        ("uint4", 2, "takes values in int4, int8.* not uint4; convert them"),
        ("int4", 8, "64 inputs, in groups of 32 n, not 128 in groups of 16; pad them"),
    ):
        stack, scales = jnp.zeros((5, 128, 64), values), jnp.zeros((5, groups, 64))
        with pytest.raises(ValueError, match=message):
            ops.grouped_matmul(x, stack, sizes, scales, implementation="pallas_tpu")


def test_a_mixture_of_quantised_experts_runs_by_the_kernel_unless_xla_is_named():
    config = Experts(4, 2, 64, scoring="softmax", selection_bias=False)
    params = config.init(jax.random.split(jax.random.key(0)), 64, jnp.bfloat16)
    made = lambda x: for_kernel(quantize(x, SCHEMES["int4"], swapped=True), "pallas_gpu")
    narrow = params.replace(gate_up=made(params.gate_up), down=made(params.down))
    x = jax.random.normal(jax.random.key(1), (5, 64), jnp.bfloat16)
    run = jax.jit(mixture, static_argnames=("config", "implementation"))

    def kernels(params):
        traced = run.trace(params, config, x, implementation="ragged")
        return traced.lower(lowering_platforms=("cuda",)).as_text().count("mosaic_gpu")

    assert kernels(narrow) > 0 == kernels(by_xla(narrow))
    wide = narrow.replace(gate_up=narrow.gate_up.array(), down=narrow.down.array())
    for implementation in ("ragged", "blocks"):
        result = run(by_xla(narrow), config, x, implementation=implementation)
        expected = run(wide, config, x, implementation=implementation)
        np.testing.assert_allclose(result, expected, atol=0.02 * float(jnp.abs(expected).max()))


def test_a_tpu_has_a_kernel_for_quantised_experts_alone(monkeypatch):
    stack, sizes = jnp.ones((3, 128, 64), jnp.bfloat16), jnp.ones(3, jnp.int32)
    monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
    for scheme in SCHEMES.values():
        made = for_kernel(quantize(stack, scheme))
        assert isinstance(made, ForKernel) and made.shape == stack.shape
        assert by_xla(made).implementation == "xla"
    x = jnp.ones((3, 128), jnp.bfloat16)
    assert not ops.has_kernel("grouped_matmul", None, x, stack, sizes)
    multiply = functools.partial(ops.grouped_matmul, implementation=None)
    run = jax.jit(lambda x, stack: grouped(x, stack, sizes, multiply))
    lowered = run.trace(x, made).lower(lowering_platforms=("tpu",))
    assert lowered.as_text().count("tpu_custom_call") == 1

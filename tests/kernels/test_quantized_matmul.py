"""The product with a quantised matrix: every back-end is the reference, and weights choose one.

Mosaic GPU's interpreter simulates memory, copies and barriers, and catches races. It simulates no
layout of registers: the conversions to the operands of wgmma are only compiled.
"""

import functools
from types import SimpleNamespace
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from jspec import ops
from jspec.checkpoints.quantised import on_the_fly
from jspec.core.quantized import KERNEL_ROWS, SCHEMES, Factors, Quantized, Scheme, quantize
from jspec.core.quantized_rows import ByToken
from jspec.core.weights import Transposed, as_stored, bits_of
from jspec.kernels.quantized_matmul import pallas_gpu, pallas_tpu, reference, xla
from jspec.kernels.quantized_matmul.shapes import CASES
from jspec.models.quantised import ForKernel, by_xla, for_kernel

interpreting = pytest.importorskip("jax._src.pallas.mosaic_gpu.interpret.params")


class Form(NamedTuple):
    """A matrix [O, I], the dtypes of its values and zero points, and the rows that it meets."""

    rows: int
    outputs: int
    inputs: int
    groups: int
    values: str
    zeros: str | None = None
    splits: int = 1
    minima: bool = False
    superblocks: int = 0  # Scales and minima have as many outer factors.
    offset: int = 0


FORMS = {
    "int4 in groups, two splits": Form(5, 128, 384, 3, "int4", splits=2),
    "int4 with zeros in small groups": Form(9, 64, 192, 3, "int4", "int8"),
    "int4 in groups of 32, two splits": Form(5, 64, 384, 12, "int4", "int8", splits=2),
    "int8 in groups of 32": Form(3, 64, 192, 6, "int8"),
    "int8 by channel, more splits than fit": Form(40, 64, 256, 1, "int8", splits=2),
    "int8 with zeros": Form(1, 64, 256, 2, "int8", "bfloat16"),
    "fp8 by channel": Form(3, 64, 256, 1, "float8_e4m3fn"),
    "fp8 in blocks": Form(16, 64, 256, 2, "float8_e5m2", splits=2),
    "Q4_1, two splits": Form(5, 128, 384, 12, "int4", splits=2, minima=True, offset=8),
    "Q4_K": Form(9, 64, 512, 16, "int4", minima=True, superblocks=2, offset=8),
    "Q6_K, two splits": Form(5, 64, 512, 32, "int8", splits=2, superblocks=2),
    "int8 by channel with minima": Form(5, 64, 256, 1, "int8", splits=2, minima=True, offset=128),
    "int4 with zeros and minima": Form(3, 64, 512, 2, "int4", "int8", minima=True),
    "fp8 in blocks with minima": Form(3, 64, 256, 2, "float8_e4m3fn", minima=True),
}
# Rows, outputs, inputs, groups, dtypes of values, zero points and scales, groups of a superblock.
TPU_FORMS = {
    "int4 in groups of 32, a block and a rest": (5, 128, 640, 20, "int4", None, "float16", None),
    "int4 with zeros": (17, 384, 128, 4, "int4", "bfloat16", "bfloat16", None),
    "uint4 in groups of 32, in superblocks": (1, 128, 768, 24, "uint4", None, "uint8", 8),
    "int8 in groups of 16, in superblocks": (2, 128, 512, 32, "int8", None, "int8", 16),
    "int8 in groups of 64, two blocks": (1, 128, 2048, 32, "int8", None, "float16", None),
    "fp8 in groups of 128": (3, 128, 256, 2, "float8_e4m3fn", None, "float32", None),
}


def arguments(form):
    """Return the arrays of a product; rows are scaled apart."""
    keys = jax.random.split(jax.random.key(form.rows), 7)
    sizes = 100.0 ** (jnp.arange(form.rows)[:, None] % 5)
    matrix, factors = (form.outputs, form.inputs), (form.outputs, form.groups)
    draw = lambda key, shape: jax.random.randint(key, shape, -8, 8)
    normal = lambda key, shape: jax.random.normal(key, shape).astype(jnp.bfloat16)
    whole = lambda key, shape: jax.random.randint(key, shape, 0, 64).astype(jnp.uint8)
    inner = whole if form.superblocks else normal
    superblocks = (form.outputs, form.superblocks)
    outer = [normal(key, superblocks) if form.superblocks else None for key in keys[4:6]]
    return (
        (sizes * jax.random.normal(keys[0], (form.rows, form.inputs))).astype(jnp.bfloat16),
        (draw(keys[1], matrix) + 8 * form.values.startswith("u")).astype(form.values),
        inner(keys[2], factors),
        None if form.zeros is None else draw(keys[3], factors).astype(form.zeros),
        outer[0],
        inner(keys[6], factors) if form.minima else None,
        outer[1] if form.minima else None,
    )


def close(result, expected, tolerance=1e-5):
    """Compare each row by its own largest number."""
    error = np.abs(np.asarray(result) - expected).max(1)
    np.testing.assert_array_less(error, tolerance * np.abs(expected).max(1) + 1e-30)


def by_input(x, *matrix):
    """Return arguments with the matrix and its factors transposed."""
    return x, *(None if array is None else array.T for array in matrix)


@pytest.mark.parametrize("name", FORMS)
def test_the_reference_and_xla_multiply_the_numbers(name):
    form = FORMS[name]
    x, values, scales, zeros, outer_scales, minima, outer_minima = arrays = arguments(form)

    def wide(array, default):
        if array is None:
            return default
        return np.repeat(np.asarray(array, np.float64), form.inputs // array.shape[1], 1)

    numbers = np.asarray(values, np.float64) + form.offset - wide(zeros, 0)
    numbers = numbers * wide(scales, 1) * wide(outer_scales, 1)
    numbers = numbers + wide(minima, 0) * wide(outer_minima, 1)
    expected = np.asarray(x, np.float64) @ numbers.T
    for given in (arrays, by_input(*arrays)):
        for multiply in (reference.quantized_matmul, xla.quantized_matmul):
            jitted = jax.jit(multiply, static_argnames="offset")
            close(jitted(*given, offset=form.offset), expected)


@pytest.mark.parametrize("name", FORMS)
def test_the_kernel_for_hopper_is_the_reference(name):
    from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks

    form = FORMS[name]
    arrays, depth = arguments(form), max(64, min(128, form.inputs // form.groups))
    blocks = pallas_gpu.Blocks(form.splits, depth, 2, is_interpreted=True)
    interpret = interpreting.InterpretGPUParams(detect_races=True)
    result = pallas_gpu.quantized_matmul(
        *arrays, offset=form.offset, blocks=blocks, interpret=interpret
    )
    close(result, np.asarray(reference.quantized_matmul(*arrays, offset=form.offset)))
    assert not gpu_callbacks.get_races().races_found


@pytest.mark.parametrize("name", TPU_FORMS)
def test_the_kernel_for_tpus_multiplies_the_matrix_that_the_weight_stands_for(name):
    from jax._src.pallas.mosaic.interpret import interpret_pallas_call

    *sizes, kind, superblock = TPU_FORMS[name]
    x, values, scales, zeros, *_ = arguments(Form(*sizes))
    outer, offset = None, 3 * ("int" in sizes[4])
    if superblock:
        scales, outer = jnp.abs(20 * scales), scales[:, ::superblock].astype(jnp.float16)
    scales = scales.at[0, 0].set(0).at[1, 0].set(3e-7).astype(kind)  # subnormal in float16
    arrays = by_input(x, values, scales, zeros, outer)
    assert pallas_tpu.refusal(*arrays) is None
    interpret = pltpu.InterpretParams(
        detect_races=True, out_of_bounds_reads="raise", uninitialized_memory="nan"
    )
    result = pallas_tpu.quantized_matmul(*arrays, offset=offset, interpret=interpret)
    assert not interpret_pallas_call.races.races_found
    expected = np.asarray(reference.quantized_matmul(*arrays, offset=offset))
    close(result, expected, tolerance=0.01)
    zeros = (0 if zeros is None else arrays[3]) - jnp.full(arrays[2].shape, offset, jnp.float32)
    weight = Quantized(arrays[1], Factors(arrays[2], arrays[4]), zeros, axis=-2, name="bfloat16")
    close(result, np.asarray(x, np.float64) @ np.asarray(weight.array(), np.float64))


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_the_kernels_lower_at_the_real_size(case):
    def multiply(*arrays, implementation):
        return ops.quantized_matmul(*arrays, offset=case.offset, implementation=implementation)

    kernels = [
        ("pallas_gpu", "cuda", -1, "mosaic_gpu"),
        ("pallas_tpu", "tpu", -2, "tpu_custom_call"),
    ]
    for name, platform, axis, call in kernels if case.is_scaled else kernels[:1]:
        traced = jax.jit(functools.partial(multiply, implementation=name)).trace(*case.arrays(axis))
        lowered = traced.lower(lowering_platforms=(platform,))
        assert lowered.as_text().count(call) >= 1
        assert lowered.out_info.shape == (case.rows, case.outputs)


def test_every_split_has_inputs():
    for inputs, outputs in ((4096, 64), (4096, 4096), (896, 128), (64, 64), (14336, 4096)):
        values = jax.ShapeDtypeStruct((outputs, inputs), jnp.int4)
        blocks = pallas_gpu.choose_blocks(8, values, 1)
        count = inputs // blocks.depth
        assert (blocks.splits - 1) * -(-count // blocks.splits) < count


@pytest.mark.parametrize(
    ("name", "sizes", "message"),
    [
        ("gpu", (3, 64, 128, 1, "uint4"), "takes values in int4, int8.*, not uint4; convert them"),
        ("gpu", (3, 96, 128, 1, "int4"), "multiple of 64 outputs.* not 96 with groups of 128; pad"),
        ("gpu", (3, 64, 96, 3, "int4"), "not 64 with groups of 32; pad them"),
        ("gpu", (3, 64, 128, 16, "int4"), "groups of 16 or 32 or a.* not 64 with groups of 8; pad"),
        ("gpu", (129, 64, 128, 1, "int4"), "up to 128 rows, not 129; multiply the matrix out"),
        ("gpu", (3, 64, 512, 16, "int4", None, 1, True, 8), "factors of 128n inputs .* not of 64"),
        ("gpu", (3, 64, 512, 16, "float4_e2m1fn", None, 1, True), "takes no minima of float4_e2m"),
        (
            "tpu",
            (3, 128, 128, 4, "int32"),
            "takes values in int4, uint4.*, not int32; convert",
        ),
        ("tpu", (3, 64, 128, 4, "int4"), "multiples of 128.* not 128 and 64 in groups of 32; pad"),
        ("tpu", (3, 128, 96, 3, "int4"), "not 96 and 128 in groups of 32; pad them"),
        ("tpu", (3, 128, 128, 16, "int4"), "groups of 16, 32, 64.* in groups of 8; pad them"),
        ("tpu", (129, 128, 128, 4, "int4"), "up to 128 rows, not 129; multiply the matrix out"),
        (
            "tpu",
            (3, 128, 128, 4, "int4", None, 1, True, 1),
            "takes superblocks of 8n groups, not of 4",
        ),
    ],
)
def test_matrices_that_a_kernel_does_not_take_are_refused(name, sizes, message):
    given = arguments(Form(*sizes))
    swapped = by_input(*given)
    given, swapped = (given, swapped) if name == "gpu" else (swapped, given)
    multiply = functools.partial(ops.quantized_matmul, implementation=f"pallas_{name}")
    with pytest.raises(ValueError, match=message):
        multiply(*given)
    with pytest.raises(ValueError, match=r"takes values .* with scales .*; transpose both"):
        multiply(*swapped[:4])


@pytest.fixture
def hopper(monkeypatch):
    """Let JAX's device be a Hopper GPU, for choices that run nothing there."""
    gpu = SimpleNamespace(compute_capability="9.0", device_kind="NVIDIA H200")
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(jax, "devices", lambda: [gpu])


def unsigned(values, groups=2, superblocks=None):
    """Return a weight of whole numbers without a sign.

    It has zero points, as of AWQ and GPTQ; or, with ``superblocks``, minima, as GGUF's blocks.
    """
    draw = lambda key, shape, most: jax.random.randint(jax.random.key(key), shape, 0, most)
    scales = (1 + draw(1, (64, groups), 9)).astype(jnp.float16) / 8
    outer = scales[:, :superblocks] if superblocks else None
    stored = Quantized(
        values=draw(0, (64, 128), 16).astype(values),
        scales=Factors(scales, outer),
        zeros=draw(2, (64, groups), 17).astype(jnp.uint16) if superblocks is None else None,
        minima=None if superblocks is None else Factors(-scales, outer),
        axis=-1,
        name="bfloat16",
    )
    return Transposed(stored)


@pytest.mark.parametrize(
    ("values", "groups", "superblocks"),
    [
        ("uint4", 2, None),
        ("uint8", 2, None),
        ("uint4", 4, None),
        ("uint4", 4, 0),
        ("uint4", 4, 1),
        ("uint8", 1, 0),
    ],
)
def test_numbers_without_a_sign_stay_equal_to_the_bit(hopper, values, groups, superblocks):
    weight = unsigned(values, groups, superblocks)
    made = for_kernel(weight)
    assert isinstance(made.stored, ForKernel)
    assert made.stored.values.dtype.name == values[1:]
    np.testing.assert_array_equal(made.array(), weight.array())
    np.testing.assert_array_equal(as_stored(made).array(), weight.array())
    assert type(as_stored(made)) is Quantized
    assert jax.tree.map(jnp.shape, as_stored(made)) == jax.tree.map(jnp.shape, as_stored(weight))
    x = jax.random.normal(jax.random.key(0), (3, 128)).astype(jnp.bfloat16)
    for name in ("reference", "xla"):
        stored = made.stored.replace(implementation=name)
        close(ops.linear(x, Transposed(stored)), np.asarray(ops.linear(x, weight)))


def test_weights_that_no_kernel_takes_stay_as_they_are(hopper, monkeypatch):
    matrix = jnp.ones((128, 64), jnp.bfloat16)
    for scheme in SCHEMES.values():
        for each in (matrix, matrix[None]):
            assert isinstance(for_kernel(quantize(each, scheme, swapped=True)).stored, ForKernel)
        others = [
            matrix,
            quantize(matrix, scheme),
            quantize(matrix.astype(jnp.float32), scheme, swapped=True),
            quantize(matrix[:, :40], scheme, swapped=True),
            quantize(matrix[None, :, :40], scheme, swapped=True),
        ]
        assert all(for_kernel(other) is other for other in others)
    one = quantize(matrix, SCHEMES["int8"], swapped=True)
    fields = {name: getattr(one.stored, name) for name in Quantized.__dataclass_fields__}
    by_token = Transposed(ByToken(**fields))
    assert for_kernel(by_token) is by_token
    monkeypatch.setattr(jax, "default_backend", lambda: "cpu")
    assert for_kernel(one) is one


def test_matrices_that_are_quantised_on_hopper_are_for_the_kernel(hopper):
    entry = SimpleNamespace(transpose=True, float32=False, path=("layers", 0, "mixer", "qkv"))
    matrix = jax.random.normal(jax.random.key(0), (128, 64)).astype(jnp.bfloat16)
    for name, scheme in SCHEMES.items():
        for each in (matrix, matrix[None]):
            made = on_the_fly.quantised(entry, each, scheme)
            assert isinstance(made.stored, ForKernel), name
            np.testing.assert_array_equal(made.array(), quantize(each, scheme).array())


@pytest.mark.parametrize("values", ["int4", "int8"])
def test_a_tpu_gets_its_kernel_where_xla_would_multiply_groups_out(monkeypatch, values):
    monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
    matrix = jax.random.normal(jax.random.key(0), (256, 128)).astype(jnp.bfloat16)
    most = 2.0 ** (bits_of(jnp.dtype(values)) - 1)
    made = lambda size, **given: quantize(matrix, Scheme("", values, most, (size,)), **given)
    for size in (16, 32, 64, 128):
        weight = for_kernel(made(size))
        assert isinstance(weight, ForKernel)
        np.testing.assert_array_equal(weight.array(), made(size).array())
        rows = {size // 2: 0, size // 2 + 1: 1, KERNEL_ROWS: 1, KERNEL_ROWS + 1: 0}
        assert {count: count_of_kernels(weight, count, "tpu") for count in rows} == rows
        assert count_of_kernels(by_xla(weight), KERNEL_ROWS, "tpu") == 0
    others = [made(8), made(32, swapped=True), quantize(matrix, SCHEMES["int8"])]
    assert all(for_kernel(other) is other for other in others)


@pytest.mark.parametrize("has_outer", [False, True])
def test_the_product_of_a_tpu_has_minima_and_factors_in_float16(monkeypatch, has_outer):
    draw = lambda key, shape, most: jax.random.randint(jax.random.key(key), shape, 0, most)

    def factors(key):
        inner = draw(key, (8, 128), 64)
        halves = (inner / 64).astype(jnp.float16)
        return Factors(inner.astype(jnp.uint8), halves[:1]) if has_outer else Factors(halves)

    weight = Quantized(
        values=draw(0, (256, 128), 16).astype("uint4"),
        scales=factors(1),
        minima=factors(2),
        name="bfloat16",
    )
    made = for_kernel(weight, "pallas_tpu")
    assert jnp.float16 not in [leaf.dtype for leaf in jax.tree.leaves(made.scales)]
    assert count_of_kernels(made, 3, "tpu") == 1
    np.testing.assert_array_equal(made.array(), weight.array())
    np.testing.assert_array_equal(made.swapped().array(), weight.array().T)
    interpreted = functools.partial(pallas_tpu.quantized_matmul, interpret=True)
    monkeypatch.setattr(pallas_tpu, "quantized_matmul", interpreted)
    x = jax.random.normal(jax.random.key(3), (3, 256)).astype(jnp.bfloat16)
    for each in (made, by_xla(made)):
        close(ops.linear(x, each), ops.linear(x, weight), tolerance=0.01)


def count_of_kernels(weight, rows, platform):
    """Return the kernels in a product of so many rows, lowered for a platform."""
    x = jax.ShapeDtypeStruct((rows, weight.shape[0]), jnp.bfloat16)
    traced = jax.jit(ops.linear).trace(x, weight)
    name = {"cuda": "mosaic_gpu", "tpu": "tpu_custom_call"}[platform]
    return traced.lower(lowering_platforms=(platform,)).as_text().count(name)


@pytest.mark.parametrize("rows", [3, 200])
def test_a_weight_multiplies_few_rows_by_its_kernel_and_others_by_xla(rows):
    matrix = jax.random.normal(jax.random.key(0), (128, 64)).astype(jnp.bfloat16)
    weight = for_kernel(quantize(matrix, SCHEMES["int4"], swapped=True), "pallas_gpu")
    assert (count_of_kernels(weight, rows, "cuda") > 0) == (rows == 3)
    assert count_of_kernels(by_xla({"w": weight})["w"], rows, "cuda") == 0
    drawn = jax.random.normal(jax.random.key(1), (rows, 128)).astype(jnp.bfloat16)
    expected = drawn.astype(jnp.float32) @ weight.array().astype(jnp.float32)
    np.testing.assert_allclose(ops.linear(drawn, by_xla(weight)), expected, atol=0.3)

"""Quantised weights: products equal those of the numbers that they stand for."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax import lax

from jspec import ops
from jspec.core import quantized
from jspec.core.quantized import SCHEMES, Factors, Quantized, quantize, stored_nibbles
from jspec.core.weights import Transposed, columns_from, matrix_of, size_of
from jspec.models.batch_invariant import in_tiles

RNG = np.random.default_rng(0)
INPUTS, OUTPUTS, GROUP = 64, 24, 16
CODES = {
    "int8": lambda shape: RNG.integers(-128, 128, shape).astype(np.int8),
    "float8_e4m3fn": lambda shape: RNG.normal(size=shape).astype(ml_dtypes.float8_e4m3fn),
    "int4": lambda shape: RNG.integers(-8, 8, shape).astype(ml_dtypes.int4),
    "uint4": lambda shape: RNG.integers(0, 16, shape).astype(ml_dtypes.uint4),
    "float4_e2m1fn": lambda shape: (
        RNG.integers(0, 16, shape).astype(np.uint8).view(ml_dtypes.float4_e2m1fn)
    ),
}
FORMS = {
    "scales": {},
    "zeros": {"zeros"},
    "minima": {"minima"},
    "superblocks": {"minima", "outer"},
    "an order": {"zeros", "order"},
    "one group": {"one"},
    "one group with zeros": {"one", "zeros"},
}


def made(code, parts=(), *, packed=False, axis=-2, dtype="float32"):
    """Return a quantised matrix and the numbers that it stands for."""
    numbers = 1 if "one" in parts else INPUTS // GROUP
    lay = (lambda x: x) if axis == -2 else np.transpose
    values = CODES[code]((INPUTS, OUTPUTS))
    draw = lambda count: RNG.random((count, OUTPUTS)).astype(np.float16)
    outer = lambda: draw(numbers // 2) if "outer" in parts else None
    factors = lambda: (draw(numbers), outer())
    scales, minima = factors(), factors() if "minima" in parts else None
    zeros = RNG.integers(0, 16, (numbers, OUTPUTS)).astype(np.uint8) if "zeros" in parts else None
    order = RNG.permutation(INPUTS).astype(np.int32) if "order" in parts else None
    whole = lambda pair: (
        pair[0].astype(np.float32)
        * (1 if pair[1] is None else np.repeat(pair[1].astype(np.float32), 2, 0))
    )
    spread = lambda x: np.repeat(x.astype(np.float32), INPUTS // numbers, 0)
    array = values.astype(np.float32) - (0 if zeros is None else spread(zeros))
    array = array * spread(whole(scales)) + (0 if minima is None else spread(whole(minima)))
    if order is not None:
        array = array[np.argsort(order)]
    array_of = lambda x: None if x is None else jnp.array(lay(x))
    stored = lambda pair: Factors(inner=array_of(pair[0]), outer=array_of(pair[1]))
    nibbles = code in quantized.NIBBLES
    values = stored_nibbles(lay(values), axis, numbers, packed=packed) if nibbles else lay(values)
    weight = Quantized(
        values=jnp.array(values),
        scales=stored(scales),
        zeros=None if zeros is None else jnp.array(lay(zeros)),
        minima=minima and stored(minima),
        order=None if order is None else jnp.array(order),
        axis=axis,
        name=dtype,
        code=code if packed and nibbles else "",
    )
    return (weight if axis == -2 else Transposed(weight)), array


@pytest.mark.parametrize("axis", [-2, -1])
@pytest.mark.parametrize("parts", FORMS)
@pytest.mark.parametrize("code", CODES)
def test_numbers_and_products_are_those_of_the_formula(code, parts, axis):
    for packed in [False, True] if code in quantized.NIBBLES else [False]:
        weight, expected = made(code, FORMS[parts], packed=packed, axis=axis)
        assert weight.shape == expected.shape and weight.dtype == jnp.float32
        np.testing.assert_array_equal(weight.array(), expected)
        x, back = RNG.normal(size=(2, 3, INPUTS)), RNG.normal(size=(5, OUTPUTS))
        x, back = x.astype(np.float32), back.astype(np.float32)
        close = dict(rtol=1e-5, atol=1e-4 * np.abs(expected).max())
        np.testing.assert_allclose(ops.linear(x, weight), x @ expected, **close)
        out = ops.linear(back, weight, transposed=True)
        np.testing.assert_allclose(out, back @ expected.T, **close)
        ids = np.array([[0, 9], [33, 2]])
        np.testing.assert_array_equal(ops.look_up(weight, ids), expected[ids])


def test_products_in_tiles_give_a_row_the_same_bits_among_any_other_rows():
    weight, expected = made("uint4", FORMS["zeros"], axis=-1)
    x = RNG.normal(size=(40, INPUTS)).astype(np.float32)
    tiled = jax.jit(lambda rows: in_tiles(lambda tile: ops.linear(tile, weight), rows))
    np.testing.assert_allclose(tiled(x), x @ expected, rtol=1e-5, atol=1e-2)
    np.testing.assert_array_equal(tiled(x[:3]), tiled(x)[:3])


@pytest.mark.parametrize("parts", FORMS)
@pytest.mark.parametrize("rows", [3, 40])
def test_accelerators_multiply_the_same(monkeypatch, parts, rows):
    monkeypatch.setattr(lax, "platform_dependent", lambda *x, default, **_: default(*x))
    for axis in (-2, -1):
        weight, expected = made("uint4", FORMS[parts], axis=axis)
        x = RNG.normal(size=(rows, INPUTS)).astype(np.float32)
        close = dict(rtol=1e-5, atol=1e-4 * np.abs(expected).max())
        np.testing.assert_allclose(ops.linear(x, weight), x @ expected, **close)


@pytest.mark.parametrize("swapped", [False, True])
@pytest.mark.parametrize("name", SCHEMES)
def test_a_scheme_keeps_a_matrix_to_its_own_noise(name, swapped):
    noise = {"int8": 0.01, "fp8": 0.04, "int4": 0.13}[name]
    stack = RNG.normal(size=(3, 256, 40)).astype(np.float32)
    stack[0, :, 3] = 0
    for packed in (False, True):
        weight = quantize(jnp.array(stack), SCHEMES[name], swapped=swapped, packed=packed)
        error = np.asarray(weight.array()) - stack
        assert np.sqrt((error**2).mean()) < noise
        assert weight.shape == stack.shape
        size = sum(size_of(leaf) for leaf in jax.tree.leaves(weight))
        assert size <= stack.size * {"int8": 1.02, "fp8": 1.02, "int4": 0.52}[name]
        one = matrix_of(weight, jnp.int32(2))
        x = RNG.normal(size=(4, 256)).astype(np.float32)
        np.testing.assert_allclose(ops.linear(x, one), x @ one.array(), rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("axis", [-2, -1])
def test_columns_of_a_quantised_weight_stay_quantised(axis):
    weight, expected = made("int4", {"minima"}, packed=True, axis=axis)
    part = columns_from(weight, 4, 2)
    assert isinstance(part, Quantized | Transposed)
    wanted = np.concatenate([expected[:, 4:12], expected[:, 16:]], 1)
    np.testing.assert_array_equal(part.array(), wanted)


def test_a_gradient_flows_through_a_quantised_product_to_its_input():
    weight, expected = made("int4", {"minima"}, packed=True)
    x = RNG.normal(size=(3, INPUTS)).astype(np.float32)
    grad = jax.grad(lambda x: (ops.linear(x, weight) ** 2).sum())(x)
    np.testing.assert_allclose(grad, 2 * (x @ expected) @ expected.T, rtol=1e-3, atol=1e-2)

"""Tests of the embedding lookup: exact rows and gradients in every dtype."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec import ops

IDS = np.array([[3, 0, 6], [6, 6, 1]], np.int32)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "float8_e4m3fn"])
def test_look_up_equals_numpy_indexing(dtype):
    table = np.random.default_rng(0).standard_normal((7, 5)).astype(dtype)
    rows = jax.jit(ops.look_up)(table, IDS)
    assert rows.dtype == dtype
    np.testing.assert_array_equal(np.asarray(rows), table[IDS])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_gradient_of_a_repeated_row_adds_up(dtype):
    gradient = jax.grad(lambda table: (ops.look_up(table, IDS).astype(jnp.float32) * 2).sum())(
        jnp.ones((7, 5), dtype)
    )
    assert gradient.dtype == dtype
    counts = np.bincount(IDS.ravel(), minlength=7)
    np.testing.assert_array_equal(gradient.astype(jnp.float32), 2.0 * counts[:, None] * np.ones(5))

"""Rows of tables are those rows, to the bit and with their gradient, however wide their numbers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec import ops

IDS = np.array([[3, 0, 6], [6, 6, 1]], np.int32)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "float8_e4m3fn"])
def test_rows_of_a_table_are_those_of_numpy(dtype):
    table = np.random.default_rng(0).standard_normal((7, 5)).astype(dtype)
    found = jax.jit(ops.look_up)(table, IDS)
    assert found.dtype == dtype
    np.testing.assert_array_equal(np.asarray(found), table[IDS])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_row_that_is_looked_up_twice_has_the_gradient_of_both(dtype):
    loss = lambda table: (ops.look_up(table, IDS).astype(jnp.float32) * 2).sum()
    gradient = jax.grad(loss)(jnp.ones((7, 5), dtype))
    assert gradient.dtype == dtype
    counts = np.bincount(IDS.ravel(), minlength=7)
    np.testing.assert_array_equal(gradient.astype(jnp.float32), 2.0 * counts[:, None] * np.ones(5))

"""The grouped matrix product: every back-end is the reference, which is a loop over groups.

Mosaic GPU's interpreter simulates memory, copies and barriers, and catches races.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec import ops
from jspec.kernels.grouped_matmul import pallas_gpu, reference, xla
from jspec.kernels.grouped_matmul.shapes import CASES

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


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_the_kernel_lowers_at_the_real_size(case):
    shape = jax.ShapeDtypeStruct
    arrays = (
        shape((case.rows, case.depth), jnp.float32),
        shape((case.experts, case.depth, case.columns), jnp.bfloat16),
        shape((case.experts,), jnp.int32),
    )

    def multiply(x, weights, sizes):
        return ops.grouped_matmul(x, weights, sizes, implementation="pallas_gpu")

    lowered = jax.jit(multiply).trace(*arrays).lower(lowering_platforms=("cuda",))
    assert lowered.as_text().count("mosaic_gpu") >= 1
    assert lowered.out_info.shape == (case.rows, case.columns)


def test_every_row_has_an_item_and_groups_without_rows_have_none():
    sizes = np.array([3, 0, 70, 64, 8], np.int32)
    items = pallas_gpu.items_of(jnp.array(sizes), 150)
    rows = [
        (int(group), row)
        for group, begin, count in zip(*items, strict=True)
        for row in range(begin, begin + count)
    ]
    assert rows == list(zip(np.repeat(np.arange(5), sizes), range(145), strict=True))
    assert (np.asarray(items.count) > 0).sum() == 5
    # No more than 40 experts run for 40 rows, though there are 128.
    assert len(pallas_gpu.items_of(jnp.zeros(128, jnp.int32), 40).group) == 40


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

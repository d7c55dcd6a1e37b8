"""The grouped matrix product of XLA.

It is one instruction on TPUs, which reads the matrices of groups with rows. On GPUs XLA multiplies
every row with every matrix, and masks the rest. Quantised matrices are multiplied out first.
"""

import jax
import jax.numpy as jnp
from jax import lax

from jspec.core.quantized import Factors, Quantized

Array = jax.Array


def grouped_matmul(
    x: Array,
    weights: Array,
    sizes: Array,
    scales: Array | None = None,
    zeros: Array | None = None,
) -> Array:
    """See the reference."""
    if scales is not None:
        axis = -1 if weights.shape[1] == scales.shape[1] else -2
        stack = Quantized(weights, Factors(scales), zeros, axis=axis, name="bfloat16")
        weights = stack.array() if axis == -2 else stack.array().swapaxes(-1, -2)
    return lax.ragged_dot(
        x.astype(weights.dtype),
        weights,
        sizes,
        precision=lax.Precision.HIGHEST if weights.dtype == jnp.float32 else None,
        preferred_element_type=jnp.promote_types(weights.dtype, jnp.float32),
    )

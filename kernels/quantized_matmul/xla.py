"""The product of XLA, of ``core.quantized``.

TPUs read what is stored for few rows, and write the matrix wide for many. GPUs write groups wider.
"""

import jax
import jax.numpy as jnp

from jspec.core.quantized import Factors, Quantized, grouped_product

Array = jax.Array


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
) -> Array:
    """See the reference."""
    axis = -1 if len(values) == len(scales) else -2
    if offset:
        below = jnp.zeros(scales.shape, jnp.int16) if zeros is None else zeros.astype(jnp.int16)
        zeros = below - offset
    weight = Quantized(
        values=values,
        scales=Factors(scales, outer_scales),
        zeros=zeros,
        minima=None if minima is None else Factors(minima, outer_minima),
        axis=axis,
        name="bfloat16",
    )
    return grouped_product(x, weight)

"""The product of XLA, of ``core.quantized``: TPUs read what is stored, GPUs write groups wider."""

import jax

from jspec.core.quantized import Factors, Quantized, grouped_product

Array = jax.Array


def quantized_matmul(
    x: Array,
    values: Array,
    scales: Array,
    zeros: Array | None = None,
    outer: Array | None = None,
) -> Array:
    """See the reference."""
    axis = -1 if len(values) == len(scales) else -2
    factors = Factors(scales, outer)
    return grouped_product(x, Quantized(values, factors, zeros, axis=axis, name="bfloat16"))

"""The specification of the product with a quantised matrix, dense and unoptimised."""

import jax
import jax.numpy as jnp

from jspec.core.quantized import Factors

Array = jax.Array


def quantized_matmul(
    x: Array,
    values: Array,
    scales: Array,
    zeros: Array | None = None,
    outer: Array | None = None,
) -> Array:
    """Return the product of rows with a matrix whose inputs are quantised in groups.

    Args:
      x: [T, I], rounded to bfloat16.
      values: [O, I], whole numbers or floats of 4 or 8 bits; or [I, O], as ``scales`` are.
      scales: [O, G], one for each I / G values that follow each other; or [G, O].
      zeros: whole numbers, of the shape of ``scales``, subtracted from values; None for none.
      outer: [O, G / n] or [G / n, O], each a factor of n scales that follow each other, or None.

    Returns:
      [T, O], accumulated in float32; sums of groups are scaled. A kernel may scale values instead,
      and round them to bfloat16.
    """
    axis = -1 if len(values) == len(scales) else -2
    scales = Factors(scales, outer).array(axis)
    if axis == -2:
        values, scales = values.T, scales.T
        zeros = None if zeros is None else zeros.T
    rows = x.astype(jnp.bfloat16).astype(jnp.float32).reshape(len(x), scales.shape[1], -1)
    apart = values.astype(jnp.float32).reshape(*scales.shape, -1)
    if zeros is not None:
        apart = apart - zeros.astype(jnp.float32)[..., None]
    sums = jnp.einsum("tgi,ogi->tog", rows, apart, precision=jax.lax.Precision.HIGHEST)
    return (sums * scales).sum(-1)

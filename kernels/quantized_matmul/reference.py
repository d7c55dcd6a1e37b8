"""The specification of the product with a quantised matrix, dense and unoptimised."""

import jax
import jax.numpy as jnp

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
    """Return the product of rows with a matrix whose inputs are quantised in groups.

    The matrix is ``(values + offset - zeros) * scales * outer_scales + minima * outer_minima``.

    Args:
      x: [T, I], rounded to bfloat16.
      values: [O, I], whole numbers or floats of 4 or 8 bits; or [I, O], as all that follow.
      scales: [O, G], one for each I / G values that follow each other; or [G, O].
      zeros: [O, G] whole numbers; None for none.
      outer_scales: [O, S], one for each G / S scales that follow each other; None for none.
      minima: [O, G]; None for none.
      outer_minima: [O, S], as ``outer_scales``.
      offset: whole number; values without a sign are stored with one, less the half of their range.

    Returns:
      [T, O], accumulated in float32. A kernel may scale values, and round them to bfloat16.
    """
    if len(values) != len(scales):
        values = values.T
        scales, zeros, outer_scales, minima, outer_minima = (
            None if each is None else each.T
            for each in (scales, zeros, outer_scales, minima, outer_minima)
        )
    rows = x.astype(jnp.bfloat16).astype(jnp.float32).reshape(len(x), scales.shape[1], -1)
    apart = values.astype(jnp.float32).reshape(*scales.shape, -1) + offset
    if zeros is not None:
        apart = apart - zeros.astype(jnp.float32)[..., None]
    apart = apart * _factors(scales, outer_scales)[..., None]
    if minima is not None:
        apart = apart + _factors(minima, outer_minima)[..., None]
    return jnp.einsum("tgi,ogi->to", rows, apart, precision=jax.lax.Precision.HIGHEST)


def _factors(inner: Array, outer: Array | None) -> Array:
    inner = inner.astype(jnp.float32)
    if outer is None:
        return inner
    return inner * jnp.repeat(outer.astype(jnp.float32), inner.shape[1] // outer.shape[1], 1)

"""Arithmetic shared by all kinds of blocks."""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jspec import sharding
from jspec.core.packing import Packing
from jspec.core.types import Array

Linear = Callable[[Array, Array], Array]

_LEAST_SWITCHED = 2**14  # weights that are not multiplied with all entries of a list


def normal(key: Array, shape: tuple[int, ...], dtype: jnp.dtype, scale: float = 1.0) -> Array:
    """Return random normal weights with standard deviation 0.02 * ``scale``."""
    return (0.02 * scale * jax.random.normal(key, shape)).astype(dtype)


def over_listed(
    packing: Packing | None, weights: Any, function: Callable[..., Any], *xs: Array
) -> Any:
    """Return ``function(*xs)``: with a ``packing`` over as few entries as hold its list.

    The function maps arrays [B, T, ...] to such arrays, each token for itself, by products with
    ``weights``. Where these are few, it runs over all entries.
    """
    count = sum(math.prod(weight.shape) for weight in jax.tree.leaves(weights))
    if packing is None or count < _LEAST_SWITCHED:
        return function(*xs)
    return packing.over(function, *xs)


def affine(x: Array, weight: Array, bias: Array | None, linear: Linear) -> Array:
    """Return ``x @ weight + bias`` in the dtype of ``linear``; None for no bias."""
    out = linear(x, weight)
    return out if bias is None else out + bias.astype(out.dtype)


def by_rows(x: Array, weight: Array, bias: Array | None, linear: Linear) -> Array:
    """Return ``affine`` by a weight of a head, whose rows several devices may divide."""
    return affine(sharding.undivided(x), weight, bias, linear)


def rows_at(x: Array, index: Array | None) -> Array:
    """Return rows ``index`` [B, m] of x [B, T, ...]; all rows if it is None."""
    if index is None:
        return x
    index = index.reshape(*index.shape, *[1] * (x.ndim - 2))
    return jnp.take_along_axis(x, index, 1, mode="promise_in_bounds")


def product(equation: str, x: Array, weights: Array) -> Array:
    """Return an einsum with the precision of ``ops.linear``.

    ``x`` is rounded to the dtype of ``weights``; sums are accumulated in float32 (or wider).
    """
    dtype = jnp.promote_types(weights.dtype, jnp.float32)
    precision = jax.lax.Precision.HIGHEST if weights.dtype == jnp.float32 else None
    x = x.astype(weights.dtype)

    def narrow(x: Array, weights: Array) -> Array:
        return jnp.einsum(equation, x, weights, precision=precision, preferred_element_type=dtype)

    def wide(x: Array, weights: Array) -> Array:
        return narrow(x.astype(dtype), weights.astype(dtype))

    if weights.dtype == dtype:
        return narrow(x, weights)
    # XLA's CPU backend has no batched bfloat16 product that accumulates in float32.
    return jax.lax.platform_dependent(x, weights, cpu=wide, default=narrow)

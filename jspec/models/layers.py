"""The arithmetic that blocks of every kind are made of."""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from jspec.core.types import Array

Linear = Callable[[Array, Array], Array]


def normal(key: Array, shape: tuple[int, ...], dtype: jnp.dtype, scale: float = 1.0) -> Array:
    """Random weights: normal, 0.02 * ``scale`` wide."""
    return (0.02 * scale * jax.random.normal(key, shape)).astype(dtype)


def rms_norm(x: Array, weight: Array, eps: float) -> Array:
    """Root-mean-square norm over the last axis, computed in float32 (or wider).

    It multiplies by ``weight`` after rounding to the dtype of x.
    """
    wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    wide = wide * jax.lax.rsqrt(jnp.mean(wide * wide, -1, keepdims=True) + eps)
    return wide.astype(x.dtype) * weight.astype(x.dtype)


def affine(x: Array, weight: Array, bias: Array | None, linear: Linear) -> Array:
    """``x @ weight + bias`` in the dtype that ``linear`` gives; None for no bias."""
    out = linear(x, weight)
    return out if bias is None else out + bias.astype(out.dtype)


def rows_at(x: Array, index: Array | None) -> Array:
    """Rows ``index`` [B, m] of x [B, T, ...]; all where that is None."""
    if index is None:
        return x
    return jnp.take_along_axis(x, index.reshape(*index.shape, *[1] * (x.ndim - 2)), 1)


def gated(x: Array, gate_up: Array, down: Array, linear: Linear) -> Array:
    """The usual MLP without biases: [..., D] through ``gate_up`` [D, 2F] and ``down`` [F, D]."""
    gate, up = jnp.split(linear(x, gate_up), 2, axis=-1)
    return linear(jax.nn.silu(gate) * up, down)


def product(equation: str, x: Array, weights: Array) -> Array:
    """An einsum with the rules of ``ops.linear``: ``x`` is rounded to the dtype of ``weights``, and
    the sum is kept in float32 (or wider)."""
    dtype = jnp.promote_types(weights.dtype, jnp.float32)
    precision = jax.lax.Precision.HIGHEST if weights.dtype == jnp.float32 else None
    x = x.astype(weights.dtype)

    def narrow(x: Array, weights: Array) -> Array:
        return jnp.einsum(equation, x, weights, precision=precision, preferred_element_type=dtype)

    def wide(x: Array, weights: Array) -> Array:
        return narrow(x.astype(dtype), weights.astype(dtype))

    # XLA's CPU backend has no products of bfloat16 with a batch axis that add up in float32.
    return jax.lax.platform_dependent(x, weights, cpu=wide, default=narrow)

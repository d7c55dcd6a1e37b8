"""Norms."""

import dataclasses

import jax
import jax.numpy as jnp

from jspec.core.types import Array


@dataclasses.dataclass(frozen=True)
class RmsNorm:
    """An RMS norm over the last axis: ``norm(x, weight)``."""

    eps: float = 1e-6

    def __call__(self, x: Array, weight: Array) -> Array:
        """Return x divided by its root mean square and multiplied by ``weight``."""
        return rms_norm(x, weight, self.eps)


def rms_norm(x: Array, weight: Array, eps: float) -> Array:
    """Return the RMS norm of x over the last axis, computed in float32 (or wider).

    The result is rounded to the dtype of x before it is multiplied by ``weight``.
    """
    wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    wide = wide * jax.lax.rsqrt(jnp.mean(wide * wide, -1, keepdims=True) + eps)
    return wide.astype(x.dtype) * weight.astype(x.dtype)

"""Norms: each is a static value of a config, and has at most one array of weights."""

import dataclasses

import jax
import jax.numpy as jnp

from jspec.core.types import Array


@dataclasses.dataclass(frozen=True)
class Norm:
    """A norm over the last axis: ``norm(x, weight)``."""

    eps: float = 1e-6

    @property
    def parts(self) -> tuple[str, ...]:
        """Names of the tensors, as long as the axis, that are joined in ``weight``; () for none."""
        return ("weight",)

    def init(self, size: int, dtype: jnp.dtype) -> Array | None:
        """Return the first ``weight`` for an axis of ``size`` features; None without weights."""
        return jnp.ones((size,), dtype)

    def __call__(self, x: Array, weight: Array | None) -> Array:
        """Return the norm of x [..., D], computed in float32 (or wider), in the dtype of x."""
        raise NotImplementedError


@dataclasses.dataclass(frozen=True)
class RmsNorm(Norm):
    """An RMS norm: x divided by its root mean square, and multiplied by ``weight``.

    Attributes:
      eps: added to the mean square.
      wide: multiply before the result is rounded to the dtype of x, not after.
      centred: ``weight`` is stored minus one, as of Gemma and Qwen3-Next; such norms are ``wide``.
      scaled: whether there is a ``weight``.
    """

    wide: bool = False
    centred: bool = False
    scaled: bool = True

    @property
    def parts(self) -> tuple[str, ...]:
        """See ``Norm``."""
        return super().parts if self.scaled else ()

    def init(self, size: int, dtype: jnp.dtype) -> Array | None:
        """See ``Norm``."""
        if not self.scaled:
            return None
        return (jnp.zeros if self.centred else jnp.ones)((size,), dtype)

    def __call__(self, x: Array, weight: Array | None) -> Array:
        """See ``Norm``."""
        if not (self.wide or self.centred or weight is None):
            return rms_norm(x, weight, self.eps)
        wide = _over_rms(x, self.eps)
        if weight is not None:
            factors = weight.astype(wide.dtype)
            wide = wide * (1 + factors if self.centred else factors)
        return wide.astype(x.dtype)


@dataclasses.dataclass(frozen=True)
class LayerNorm(Norm):
    """A norm over the last axis that subtracts its mean, and divides by its standard deviation.

    With a ``bias`` the weights are [2D]: factors, then biases. Rounding is last.
    """

    eps: float = 1e-5
    bias: bool = False

    @property
    def parts(self) -> tuple[str, ...]:
        """See ``Norm``."""
        return ("weight", "bias") if self.bias else ("weight",)

    def init(self, size: int, dtype: jnp.dtype) -> Array:
        """See ``Norm``."""
        factors = jnp.ones((size,), dtype)
        return jnp.concatenate([factors, jnp.zeros((size,), dtype)]) if self.bias else factors

    def __call__(self, x: Array, weight: Array) -> Array:
        """See ``Norm``."""
        wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
        wide = wide - wide.mean(-1, keepdims=True)
        wide = wide * jax.lax.rsqrt(jnp.mean(wide * wide, -1, keepdims=True) + self.eps)
        factors, *biases = jnp.split(weight.astype(wide.dtype), len(self.parts))
        wide = wide * factors
        return sum(biases, wide).astype(x.dtype)


def rms_norm(x: Array, weight: Array, eps: float) -> Array:
    """Return the RMS norm of x over the last axis, computed in float32 (or wider).

    The result is rounded to the dtype of x before it is multiplied by ``weight``.
    """
    return _over_rms(x, eps).astype(x.dtype) * weight.astype(x.dtype)


def _over_rms(x: Array, eps: float) -> Array:
    """Return x divided by its root mean square, in float32 (or wider)."""
    wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    return wide * jax.lax.rsqrt(jnp.mean(wide * wide, -1, keepdims=True) + eps)

"""Numbers of a cache in 8 bits, with a scale for each vector of features.

A cached key or value x of D features is stored as x / s, rounded to 8 bits, with
s = max |x| / ``LIMITS``. So no number is clipped, and no calibration is needed: a scale takes 4 of
D + 4 bytes. Attention multiplies the values by their scales again, block by block.
"""

from typing import Self

import jax.numpy as jnp
from flax import struct
from jax import lax

from jspec.core.types import Array

# The largest number of each format. Bits of fp8 are stored as uint8: XLA's CPU backend would
# convert an entire buffer of fp8 in every read and write.
LIMITS = {"int8": 127.0, "float8_e4m3fn": 448.0, "float8_e5m2": 57344.0}


@struct.dataclass
class Scaled:
    """An array [..., D] of numbers in a format of ``LIMITS``."""

    values: Array  # [..., D] int8, or uint8, the bits of fp8
    scales: Array  # [..., 1] float32
    format: str = struct.field(pytree_node=False)
    # Dtype of the numbers, where they are used.
    dtype: jnp.dtype = struct.field(pytree_node=False)

    @classmethod
    def of(cls, x: Array, format: str, dtype: jnp.dtype) -> Self:
        """Return the closest numbers to x; vectors with a NaN or an infinity become NaN."""
        x = x.astype(jnp.float32)
        scales = jnp.abs(x).max(-1, keepdims=True) / LIMITS[format]
        scaled = x / jnp.where(scales > 0, scales, 1)
        if format == "int8":
            return cls(jnp.round(scaled).astype(jnp.int8), scales, format, dtype)
        bits = lax.bitcast_convert_type(scaled.astype(format), jnp.uint8)
        return cls(bits, scales, format, dtype)

    @classmethod
    def zeros(cls, shape: tuple[int, ...], format: str, dtype: jnp.dtype) -> Self:
        """Return zeros."""
        values = jnp.zeros(shape, jnp.int8 if format == "int8" else jnp.uint8)
        return cls(values, jnp.zeros((*shape[:-1], 1), jnp.float32), format, dtype)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the numbers."""
        return self.values.shape

    def numbers(self) -> Array:
        """Return the numbers."""
        values = self.values
        if self.format != "int8":
            values = lax.bitcast_convert_type(values, self.format)
        return (values.astype(jnp.float32) * self.scales).astype(self.dtype)


def is_scaled(x: object) -> bool:
    """Return whether x is a ``Scaled``: a leaf of the pytrees that hold one."""
    return isinstance(x, Scaled)


def numbers(x: Array | Scaled) -> Array:
    """Return an array as it is, or the numbers of a scaled one."""
    return x.numbers() if isinstance(x, Scaled) else x

"""Numbers of a cache in 8 bits.

fp8 stores a number as the closest of its format, and the largest of it for larger ones: keys and
values are far smaller. int8 stores x / s, rounded, where s = max |x| / 127 over the features of a
token and key head; the scales take 4 of D + 4 bytes. Neither needs a calibration. Attention makes
numbers of the values again, block by block.
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
class Narrow:
    """An array [..., D] of numbers in a format of ``LIMITS``."""

    values: Array  # [..., D] int8, or uint8, the bits of fp8
    scales: Array | None  # [..., 1] float32, of int8
    format: str = struct.field(pytree_node=False)
    # Dtype of the numbers, where they are used.
    dtype: jnp.dtype = struct.field(pytree_node=False)

    @classmethod
    def of(cls, x: Array, format: str, dtype: jnp.dtype) -> Self:
        """Return the closest numbers to x; NaN stays, in int8 for a whole vector."""
        x, limit = x.astype(jnp.float32), LIMITS[format]
        if format == "int8":
            scales = jnp.abs(x).max(-1, keepdims=True) / limit
            values = jnp.round(x / jnp.where(scales > 0, scales, 1)).astype(jnp.int8)
            return cls(values, scales, format, dtype)
        closest = jnp.clip(x, -limit, limit).astype(format)
        return cls(lax.bitcast_convert_type(closest, jnp.uint8), None, format, dtype)

    @classmethod
    def zeros(cls, shape: tuple[int, ...], format: str, dtype: jnp.dtype) -> Self:
        """Return zeros."""
        if format == "int8":
            scales = jnp.zeros((*shape[:-1], 1), jnp.float32)
            return cls(jnp.zeros(shape, jnp.int8), scales, format, dtype)
        return cls(jnp.zeros(shape, jnp.uint8), None, format, dtype)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the numbers."""
        return self.values.shape

    def narrow(self) -> Array:
        """Return the values in their format."""
        if self.scales is not None:
            return self.values
        return lax.bitcast_convert_type(self.values, self.format)

    def numbers(self) -> Array:
        """Return the numbers."""
        if self.scales is None:
            return self.narrow().astype(self.dtype)
        return (self.values.astype(jnp.float32) * self.scales).astype(self.dtype)


def is_narrow(x: object) -> bool:
    """Return whether x is a ``Narrow``: a leaf of the pytrees that hold one."""
    return isinstance(x, Narrow)

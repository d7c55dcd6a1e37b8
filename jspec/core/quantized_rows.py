"""Products of quantised weights with rows that are quantised too, as w8a8 checkpoints ask."""

import jax.numpy as jnp
from flax import struct
from jax import lax

from jspec.core.quantized import Quantized
from jspec.core.types import Array


@struct.dataclass
class ByToken(Quantized):
    """A quantised matrix whose products quantise each row, with a scale of its own.

    Values have 8 bits, and one group of all inputs. Rows take their dtype, so that accelerators
    multiply numbers of 8 bits; a CPU multiplies the same numbers in float32. The product of a row
    does not depend on other rows.
    """

    def over_groups(self, rows: Array) -> Array:
        """See ``Quantized``."""
        numbers, scales = quantized_rows(rows, self.values.dtype)
        contracted = (((1,), (2 + self.axis,)), ((), ()))

        def in_float32(x: Array, w: Array) -> Array:
            return lax.dot_general(
                x.astype(jnp.float32),
                w.astype(jnp.float32),
                contracted,
                precision=lax.Precision.HIGHEST,
            )

        def as_stored(x: Array, w: Array) -> Array:
            is_whole = jnp.issubdtype(w.dtype, jnp.integer)
            dtype = jnp.int32 if is_whole else jnp.float32
            out = lax.dot_general(x, w, contracted, preferred_element_type=dtype)
            return out.astype(jnp.float32)

        out = lax.platform_dependent(numbers, self.values, cpu=in_float32, default=as_stored)
        return out * scales * self.scales.array(self.axis).reshape(1, -1)


def quantized_rows(rows: Array, dtype: jnp.dtype) -> tuple[Array, Array]:
    """Return rows [T, I] in int8 or float8_e4m3fn, and their scales, float32 [T, 1].

    The largest number of a row becomes half of the range of the dtype, 127.5 or 448, as in
    compressed-tensors. That is 127 here, also for -127.5, which the library rounds to -127 or -128
    by the last bit of a division.
    """
    is_whole = jnp.issubdtype(dtype, jnp.integer)
    most, half = (127.0, 127.5) if is_whole else (float(jnp.finfo(dtype).max),) * 2
    rows = rows.astype(jnp.float32)
    scales = jnp.abs(rows).max(-1, keepdims=True) / half
    numbers = jnp.clip(rows / jnp.where(scales == 0, 1, scales), -most, most)
    return (jnp.round(numbers) if is_whole else numbers).astype(dtype), scales

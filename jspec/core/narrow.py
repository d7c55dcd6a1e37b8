"""Numbers of a cache in 8 bits.

fp8 stores a number as the closest of its format, and the largest of it for larger ones: keys and
values are far smaller. int8 stores x / s, rounded, where s = max |x| / 127 over the features of a
token and key head. A scale takes 4 bytes, and those of a page whole rows of 128. Neither needs a
calibration. Attention makes numbers of the values again, block by block.
"""

from collections.abc import Callable
from typing import Any, Self

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax

from jspec import sharding
from jspec.core.types import Array

# The largest number of each format. Bits of fp8 are stored as uint8: XLA's CPU backend would
# convert an entire buffer of fp8 in every read and write.
LIMITS = {"int8": 127.0, "float8_e4m3fn": 448.0, "float8_e5m2": 57344.0}
# Scales of a page take whole rows of them. XLA for TPU would lay out shorter rows by pages, and
# copy the pool for attention.
LANES = 128


@struct.dataclass
class Narrow:
    """An array [..., D] of numbers in a format of ``LIMITS``."""

    values: Array  # [..., D] int8, or uint8, the bits of fp8
    # Of int8, float32: [B, H, N, 1] of nodes, [B, H, 1, S] of slots, and [P, H, 1, L] of pages, L a
    # multiple of ``LANES``. A TPU would pad buffers whose last axis is short.
    scales: Array | None
    format: str = struct.field(pytree_node=False)
    # Dtype of the numbers, where they are used.
    dtype: jnp.dtype = struct.field(pytree_node=False)

    @classmethod
    def of(cls, x: Array, format: str, dtype: jnp.dtype) -> Self:
        """Return nodes with the closest numbers to x; NaN stays, in int8 for a whole vector."""
        x, limit = x.astype(jnp.float32), LIMITS[format]
        if format == "int8":
            scales = jnp.abs(x).max(-1, keepdims=True) / limit
            values = jnp.round(x / jnp.where(scales > 0, scales, 1)).astype(jnp.int8)
            return cls(values, scales, format, dtype)
        closest = jnp.clip(x, -limit, limit).astype(format)
        return cls(lax.bitcast_convert_type(closest, jnp.uint8), None, format, dtype)

    @classmethod
    def zeros(
        cls, shape: tuple[int, ...], format: str, dtype: jnp.dtype, lanes: int | None = None
    ) -> Self:
        """Return a buffer of zeros, whose scales have ``lanes``; None for one a slot."""
        if format == "int8":
            scales = jnp.zeros((*shape[:-2], 1, lanes or shape[-2]), jnp.float32)
            return cls(jnp.zeros(shape, jnp.int8), scales, format, dtype)
        return cls(jnp.zeros(shape, jnp.uint8), None, format, dtype)

    def pool(self, num_pages: int, page_size: int) -> Self:
        """Return an empty pool of pages for this buffer [B, H, S, D]."""
        shape = (num_pages, self.shape[1], page_size, self.shape[3])
        lanes = -(-page_size // LANES) * LANES
        return Narrow.zeros(shape, self.format, self.dtype, lanes)

    def of_nodes(self, batch: int, count: int) -> Self:
        """Return the shapes of ``count`` nodes for this buffer [B, H, S, D]."""
        shape = (batch, self.shape[1], count, self.shape[3])
        x = jax.ShapeDtypeStruct(shape, jnp.float32)
        return jax.eval_shape(lambda x: Narrow.of(x, self.format, self.dtype), x)

    def append(
        self,
        new: Self,
        commit: Any,
        write: Callable[[Array, Array], Array],
        *,
        is_divided: bool,
    ) -> Self:
        """Return this buffer behind an ``entries.Commit`` of ``new``; ``write`` is for arrays."""
        values, scales = write(self.values, new.values), self.scales
        if scales is not None and commit.table is None:
            scales = write(scales.swapaxes(2, 3), new.scales).swapaxes(2, 3)
        elif scales is not None:
            scales = _write_rows(scales, new.scales, commit, self.shape[2], is_divided=is_divided)
        return self.replace(values=values, scales=scales)

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
        """Return the numbers, of nodes, slots or pages."""
        if self.scales is None:
            return self.narrow().astype(self.dtype)
        # A row of scales has those of equally many slots.
        scales = self.scales[..., : self.shape[2] // self.scales.shape[2]]
        scales = scales.reshape(*self.shape[:-1], 1)
        return (self.values.astype(jnp.float32) * scales).astype(self.dtype)


def _write_rows(pool: Array, fresh: Array, commit: Any, page: int, *, is_divided: bool) -> Array:
    """Write the committed ones of scales ``fresh`` [B, H, N, 1] into pages [P, H, 1, L].

    The rows of lanes of a sequence's pages are read, changed and written whole. To write single
    numbers, XLA for TPU would lay out the pool by pages, and copy it for attention.
    """
    reach, lanes = commit.path.shape[1], pool.shape[3]
    length, count = commit.length[:, None], commit.count[:, None, None]
    columns = lax.div(length, page) + jnp.arange(1 + -(-(reach - 1) // page))  # [B, M]
    steps = (columns * page - length)[..., None] + jnp.arange(lanes)  # [B, M, L]
    is_new = (steps >= 0) & (steps < count) & (jnp.arange(lanes) < page)
    ids = jnp.take_along_axis(commit.table, columns, 1, mode="clip")
    ids = jnp.where(is_new.any(-1), ids, len(pool))
    nodes = jnp.take_along_axis(commit.path[:, None], steps, 2, mode="clip")

    def write(pool: Array, fresh: Array, ids: Array, nodes: Array, is_new: Array) -> Array:
        index = ids[:, None], jnp.arange(pool.shape[1])[:, None], 0
        old = pool.at[index].get(mode="clip")  # [B, H, M, L]
        new = jnp.take_along_axis(fresh.swapaxes(2, 3), nodes[:, None], 3)
        return pool.at[index].set(jnp.where(is_new[:, None], new, old), mode="drop")

    write = sharding.over_heads(write, is_split=is_divided)
    return write(pool, fresh, ids, nodes, is_new)

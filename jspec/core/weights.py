"""The weights that ``ops.linear`` and ``ops.look_up`` take: arrays, and what is stored otherwise.

A ``Weight`` multiplies itself. A new kind is a subclass, a ``flax.struct.dataclass`` of arrays that
defines ``shape``, ``dtype`` and ``array``, and its own products where these are faster.
"""

import abc
import math
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax

from jspec.core.types import Array

# XLA's CPU matmul for bfloat16 is fast from two rows on, and its rows are bit-equal from three rows
# on. One padded row count makes a token's logits independent of N.
_BFLOAT16_ROWS = 4


class Weight(abc.ABC):
    """A matrix [I, O] that is no plain array, or a stack [E, I, O]; a pytree."""

    @property
    @abc.abstractmethod
    def shape(self) -> tuple[int, ...]:
        """The shape of ``array``."""

    @property
    @abc.abstractmethod
    def dtype(self) -> jnp.dtype:
        """The dtype of ``array``."""

    @abc.abstractmethod
    def array(self) -> Array:
        """Return the weight as a plain array."""

    def linear(self, x: Array, *, transposed: bool) -> Array:
        """See ``linear``."""
        return linear(x, self.array(), transposed=transposed)

    def look_up(self, ids: Array) -> Array:
        """See ``look_up``."""
        return look_up(self.array(), ids)

    def stored_as(self) -> "Array | Weight":
        """Return the weight with its inputs before its outputs, as devices divide it."""
        return self

    def matrix(self, index: Array) -> "Array | Weight":
        """Return a matrix of a stack, whose arrays all have the stack on axis 0."""
        return jax.tree.map(lambda x: x[index], self)

    def columns_from(self, first: int, parts: int, axis: int) -> "Array | Weight":
        """See ``columns_from``."""
        return columns_from(self.array(), first, parts, axis)


@struct.dataclass
class Transposed(Weight):
    """A weight [..., I, O] that is stored as [..., O, I], an array or a weight.

    XLA's CPU backend reads it up to twice as fast so, in bfloat16.
    """

    stored: Array | Weight  # [..., O, I]

    @property
    def shape(self) -> tuple[int, ...]:
        """See ``Weight``."""
        *stack, outputs, inputs = self.stored.shape
        return *stack, inputs, outputs

    @property
    def dtype(self) -> jnp.dtype:
        """See ``Weight``."""
        return self.stored.dtype

    def array(self) -> Array:
        """See ``Weight``."""
        return as_array(self.stored).swapaxes(-1, -2)

    def linear(self, x: Array, *, transposed: bool) -> Array:
        """See ``linear``."""
        return linear(x, self.stored, transposed=not transposed)

    def stored_as(self) -> Array | Weight:
        """See ``Weight``."""
        return self.stored.swapped() if isinstance(self.stored, Weight) else self.array()

    def columns_from(self, first: int, parts: int, axis: int) -> "Transposed":
        """See ``columns_from``."""
        return Transposed(columns_from(self.stored, first, parts, 1 - axis))


def as_array(weight: Array | Weight) -> Array:
    """Return a weight as a plain array."""
    return weight.array() if isinstance(weight, Weight) else weight


def as_stored(weight: Array | Weight) -> Array | Weight:
    """Return a weight with its inputs before its outputs, as devices divide it."""
    return weight.stored_as() if isinstance(weight, Weight) else weight


def as_arrays(params: Any) -> Any:
    """Return a pytree with every weight as a plain array, as for training."""
    return jax.tree.map(as_array, params, is_leaf=lambda x: isinstance(x, Weight))


def matrix_of(stack: Array | Weight, index: Array) -> Array | Weight:
    """Return matrix ``index``, int32 [], of a stack [E, I, O]."""
    return stack.matrix(index) if isinstance(stack, Weight) else stack[index]


def columns_from(
    weight: Array | Weight, first: int, parts: int = 1, axis: int = 1
) -> Array | Weight:
    """Return the output columns of a weight [I, O] from column ``first`` of each of its parts on.

    The O columns are in so many parts; the result is [I, O - parts * first]. With ``axis`` 0, rows.
    """
    if isinstance(weight, Weight):
        return weight.columns_from(first, parts, axis)
    if axis == 0:
        return weight.reshape(parts, -1, weight.shape[1])[:, first:].reshape(-1, weight.shape[1])
    return weight.reshape(len(weight), parts, -1)[:, :, first:].reshape(len(weight), -1)


def size_of(array: Any) -> int:
    """Return the bytes of an array, or of its shape; values may take half a byte."""
    return math.prod(array.shape) * bits_of(array.dtype) // 8


def bits_of(dtype: jnp.dtype) -> int:
    """Return the bits of a number."""
    kind = jnp.finfo if jnp.issubdtype(dtype, jnp.floating) else None
    kind = jnp.iinfo if jnp.issubdtype(dtype, jnp.integer) else kind
    return kind(dtype).bits if kind else 8 * dtype.itemsize


def weights_of(params: Any) -> list[Any]:
    """Return the weights of a pytree, arrays and others, or their shapes."""
    leaves = jax.tree.leaves(params, is_leaf=lambda x: isinstance(x, Weight))
    return [leaf for leaf in leaves if hasattr(leaf, "dtype")]


def linear(x: Array, w: Array | Weight, *, transposed: bool = False) -> Array:
    """Return ``x @ w`` for x [..., I] and w [I, O], accumulated in float32 (or wider).

    ``transposed`` takes w as [O, I], so that a tied head needs no copy of the embedding. A narrow w
    is not widened in memory; x is rounded to its dtype. float32 weights multiply at full precision
    on every device.
    """
    if isinstance(w, Weight):
        return w.linear(x, transposed=transposed)
    dtype = jnp.promote_types(w.dtype, jnp.float32)
    rows = x.reshape(-1, x.shape[-1]).astype(w.dtype)
    count = rows.shape[0]
    if w.dtype == jnp.bfloat16 and count < _BFLOAT16_ROWS:
        rows = jnp.pad(rows, ((0, _BFLOAT16_ROWS - count), (0, 0)))
    precision = lax.Precision.HIGHEST if w.dtype == jnp.float32 else None
    contracted = (((1,), (1 if transposed else 0,)), ((), ()))
    out = lax.dot_general(rows, w, contracted, precision=precision, preferred_element_type=dtype)
    return out[:count].reshape(*x.shape[:-1], out.shape[-1])


def look_up(table: Array | Weight, ids: Array) -> Array:
    """Return the rows [..., D] of an embedding table [V, D] at int32 ids [...].

    XLA's CPU backend cannot gather bfloat16: it widens the table in every launch, and in every
    round for a lookup in a branch. So the bits of narrow numbers are gathered there.
    """
    return table.look_up(ids) if isinstance(table, Weight) else _look_up(table, ids)


@jax.custom_jvp
def _look_up(table: Array, ids: Array) -> Array:
    if table.dtype.itemsize >= 4:
        return table[ids]
    return lax.platform_dependent(table, ids, cpu=_rows_by_bits, default=_rows)


def _rows(table: Array, ids: Array) -> Array:
    return table[ids]


def _rows_by_bits(table: Array, ids: Array) -> Array:
    # The barrier ties the table to the ids: XLA must not copy it before the loop of the ids.
    table, ids = lax.optimization_barrier((table, ids))
    words = lax.bitcast_convert_type(table, f"uint{8 * table.dtype.itemsize}")
    return lax.bitcast_convert_type(words[ids], table.dtype)


@_look_up.defjvp
def _look_up_jvp(primals: tuple[Array, Array], tangents: tuple[Array, Array]):
    table, ids = primals
    return _look_up(table, ids), tangents[0][ids]

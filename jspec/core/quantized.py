"""Quantised weights: narrow values, and factors for groups of them.

A matrix is ``(values - zeros) * scales + minima``. Values that follow each other along one axis, a
group, share their scale, zero point and minimum. A product multiplies the values as they are, each
group by itself, and scales the sums: XLA for accelerators then reads what is stored, and no more.
A weight that is multiplied out first is written to memory and read again.

XLA's CPU backend widens any narrow operand of a product in memory. So blocks of outputs, which stay
in the CPU's caches, are widened one after the other.
"""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import lax

from jspec import sharding
from jspec.core.types import Array
from jspec.core.weights import Transposed, Weight, as_array, columns_from

_BLOCK = 1 << 17  # numbers of a block on a CPU
KERNEL_ROWS = 128  # Kernels take no more rows: for many, a matrix that is multiplied out is faster.
NIBBLES = ("int4", "uint4", "float4_e2m1fn")  # Values of these names take half a byte.


@struct.dataclass
class Factors:
    """A number for each group of a matrix, [..., G, O] or [..., O, G].

    With ``outer``, [..., G / n, O] or [..., O, G / n], the numbers are products: n groups that
    follow each other, a superblock, have one outer factor.
    """

    inner: Array
    outer: Array | None = None

    def array(self, axis: int) -> Array:
        """Return the numbers in float32, given the axis of the groups, -1 or -2."""
        inner = self.inner.astype(jnp.float32)
        if self.outer is None:
            return inner
        count = inner.shape[axis] // self.outer.shape[axis]
        return inner * jnp.repeat(self.outer.astype(jnp.float32), count, axis)


@struct.dataclass
class Quantized(Weight):
    """A quantised matrix [I, O], or a stack [E, I, O]; see the module.

    Attributes:
      values: [..., I, O] of any narrow dtype; or, if ``code`` is given, uint8 with half as many on
        ``axis``. Then the low half-bytes are the first half of a group, the high ones the second.
      scales: of groups along ``axis``, of which all have the same size.
      zeros: whole numbers [..., G, O] or [..., O, G], subtracted from values; None for none.
      minima: added to scaled values; None for none.
      order: int32 [..., I], the index in the matrix of each stored entry of ``axis``; None if it is
        the same.
      axis: the axis of the groups, -2 (the inputs of the matrix) or -1.
      name: the dtype that the weight stands for.
      code: the one of ``NIBBLES`` that half-bytes hold; "" for values with a dtype of their own.
    """

    values: Array
    scales: Factors
    zeros: Array | None = None
    minima: Factors | None = None
    order: Array | None = None
    axis: int = struct.field(pytree_node=False, default=-2)
    name: str = struct.field(pytree_node=False, default="float32")
    code: str = struct.field(pytree_node=False, default="")

    @property
    def shape(self) -> tuple[int, ...]:
        """See ``Weight``."""
        shape = list(self.values.shape)
        shape[self.axis] *= 2 if self.code else 1
        return tuple(shape)

    @property
    def dtype(self) -> jnp.dtype:
        """See ``Weight``."""
        return jnp.dtype(self.name)

    @property
    def num_groups(self) -> int:
        """Number of groups, G."""
        return self.scales.inner.shape[self.axis]

    def array(self) -> Array:
        """See ``Weight``; the numbers are rounded once, to ``dtype``."""
        array = self._in_float32()
        if self.order is None:
            return array.astype(self.dtype)
        index = jnp.argsort(self.order, axis=-1)
        index = index[..., None] if self.axis == -2 else index[..., None, :]
        return jnp.take_along_axis(array, index, self.axis).astype(self.dtype)

    def linear(self, x: Array, *, transposed: bool) -> Array:
        """See ``linear``."""
        rows = x.reshape(-1, x.shape[-1])
        if self.axis == (-1 if transposed else -2):
            rows = rows if self.order is None else rows[:, self.order]
            out = self.over_groups(rows)
        else:
            out = self._to_groups(rows)
            out = out if self.order is None else out[:, jnp.argsort(self.order)]
        return out.reshape(*x.shape[:-1], out.shape[-1])

    def grouped(self, x: Array, sizes: Array, multiply: Callable[..., Array]) -> Array:
        """See ``grouped``; the stack has the outputs of matrices on the axis without groups."""
        array = self.array()
        return multiply(x, array if self.axis == -2 else array.swapaxes(-1, -2), sizes)

    def look_up(self, ids: Array) -> Array:
        """See ``look_up``; only the rows that are looked up are multiplied out."""
        if self.axis == -2 or self.order is not None:
            return self.array()[ids]
        rows = jax.tree.map(lambda x: x[ids.reshape(-1)], self)
        return rows.array().reshape(*ids.shape, -1)

    def columns_from(self, first: int, parts: int, axis: int) -> "Array | Weight":
        """See ``columns_from``."""
        if self.axis == axis - 2:
            return columns_from(self.array(), first, parts, axis)
        cut = functools.partial(columns_from, first=first, parts=parts, axis=axis)
        return jax.tree.map(cut, self.replace(order=None)).replace(order=self.order)

    def swapped(self) -> "Quantized":
        """Return the transpose of the matrix."""
        arrays = self.replace(order=None)
        shapes = isinstance(self.values, jax.ShapeDtypeStruct)
        swap = lambda x: x.swapaxes(-1, -2)
        turned = (lambda x: jax.eval_shape(swap, x)) if shapes else swap
        return jax.tree.map(turned, arrays).replace(order=self.order, axis=-3 - self.axis)

    def _in_float32(self) -> Array:
        """Return the matrix, its entries in their stored order."""
        values = self._grouped(jnp.float32)
        by_group = functools.partial(jnp.expand_dims, axis=self.axis)
        if self.zeros is not None:
            values = values - by_group(self.zeros.astype(jnp.float32))
        values = values * by_group(self.scales.array(self.axis))
        if self.minima is not None:
            values = values + by_group(self.minima.array(self.axis))
        return values.reshape(self.shape)

    def _grouped(self, dtype: jnp.dtype) -> Array:
        """Return the values with the groups apart, [..., G, I / G, O] or [..., O, G, I / G]."""
        parts = self._halves(dtype)
        return parts[0] if len(parts) == 1 else jnp.concatenate(parts, self.axis)

    def _halves(self, dtype: jnp.dtype) -> list[Array]:
        """Return the first and the second halves of groups, or all if no byte has two values."""
        shape = list(self.values.shape)
        at = len(shape) + self.axis
        shape[at : at + 1] = [self.num_groups, shape[at] // self.num_groups]
        values = self.values.reshape(shape)
        if not self.code:
            return [values.astype(dtype)]
        return [_decoded(half, self.code, dtype) for half in (values & 15, values >> 4)]

    def _bias(self) -> Array | None:
        """Return what is added to each scaled value of a group, float32; None for nothing."""
        bias = None if self.minima is None else self.minima.array(self.axis)
        if self.zeros is not None:
            below = self.zeros.astype(jnp.float32) * self.scales.array(self.axis)
            bias = -below if bias is None else bias - below
        return bias

    def over_groups(self, rows: Array) -> Array:
        """Return the product of rows [T, I], already in ``order``, that sums over the groups."""
        if sharding.num_shards() > 1:  # Devices would exchange blocks.
            return grouped_product(rows, self)
        return lax.platform_dependent(rows, self, cpu=_product_by_blocks, default=grouped_product)

    def _to_groups(self, rows: Array) -> Array:
        """Return the product of rows [T, O] whose outputs are the axis of the groups."""
        by_output = (lambda x: x) if self.axis == -2 else jnp.transpose
        scales, bias = by_output(self.scales.array(self.axis)), self._bias()
        rows = rows.astype(jnp.float32)
        values = self._grouped(self.dtype)
        equation = "tno,ngo->tng" if self.axis == -2 else "tno,ong->tng"
        out = _einsum(equation, rows[:, None] * scales, values)
        if bias is not None:
            out = out + _einsum("to,no->tn", rows, by_output(bias))[..., None]
        return out.reshape(len(rows), -1)


@struct.dataclass
class Joined(Weight):
    """Weights of several forms beside each other along ``axis``, -1 (outputs) or -2."""

    parts: tuple[Weight, ...]
    axis: int = struct.field(pytree_node=False, default=-1)

    @property
    def shape(self) -> tuple[int, ...]:
        """See ``Weight``."""
        shape = list(self.parts[0].shape)
        shape[self.axis] = sum(part.shape[self.axis] for part in self.parts)
        return tuple(shape)

    @property
    def dtype(self) -> jnp.dtype:
        """See ``Weight``."""
        return self.parts[0].dtype

    def array(self) -> Array:
        """See ``Weight``."""
        return jnp.concatenate([part.array() for part in self.parts], self.axis)

    def linear(self, x: Array, *, transposed: bool) -> Array:
        """See ``linear``."""
        if self.axis == (-2 if transposed else -1):
            outs = [part.linear(x, transposed=transposed) for part in self.parts]
            return jnp.concatenate(outs, -1)
        cuts = np.cumsum([part.shape[self.axis] for part in self.parts])[:-1]
        pairs = zip(self.parts, jnp.split(x, cuts, -1), strict=True)
        return sum(part.linear(each, transposed=transposed) for part, each in pairs)


def grouped(x: Array, stack: Array | Weight, sizes: Array, multiply: Callable[..., Array]) -> Array:
    """Return the product of each row with the matrix [I, O] of its group, of a stack of any kind.

    ``multiply`` is ``ops.grouped_matmul``; see there. XLA multiplies quantised stacks out.
    """
    is_swapped = isinstance(stack, Transposed)
    stored = stack.stored if is_swapped else stack
    if isinstance(stored, Quantized) and stored.axis == (-1 if is_swapped else -2):
        return stored.grouped(x, sizes, multiply)
    return multiply(x, as_array(stack), sizes)


def _einsum(equation: str, x: Array, w: Array) -> Array:
    """Return an einsum with the precision of ``linear``; see there."""
    dtype = jnp.promote_types(w.dtype, jnp.float32)
    precision = lax.Precision.HIGHEST if w.dtype == jnp.float32 else None
    narrow = functools.partial(
        jnp.einsum, equation, precision=precision, preferred_element_type=dtype
    )
    if w.dtype == dtype:
        return narrow(x, w)
    # XLA's CPU backend has no batched bfloat16 product that accumulates in float32.
    return lax.platform_dependent(
        x.astype(w.dtype),
        w,
        cpu=lambda x, w: narrow(x.astype(dtype), w.astype(dtype)),
        default=narrow,
    )


def is_multiplied_out(count: int, size: int) -> bool:
    """Return whether ``grouped_product`` with ``count`` rows multiplies groups of ``size`` out."""
    return count > size // 2


def grouped_product(rows: Array, weight: Quantized) -> Array:
    """Return the product of rows [T, I], of each group by itself; sums are scaled.

    The sums of all groups are [G, T, O] in float32. For many rows they would take more memory than
    the matrix, which is then multiplied out.
    """
    count, axis, groups = len(rows), weight.axis, weight.num_groups
    size = weight.shape[axis] // groups
    bias, by_input = weight._bias(), axis == -2
    if groups > 1 and is_multiplied_out(count, size):
        wide = weight._in_float32().astype(weight.dtype)
        return _einsum("ti,io->to" if by_input else "ti,oi->to", rows, wide)
    of_group = rows.reshape(count, groups, size)
    values = weight._grouped(weight.dtype)
    out = _einsum("tng,ngo->nto" if by_input else "tng,ong->nto", of_group, values)
    scales = weight.scales.array(axis)
    out = (out * (scales if by_input else scales.T)[:, None]).sum(0)
    if bias is not None:
        sums = of_group.astype(jnp.float32).sum(-1)
        out = out + _einsum("tn,no->to", sums, bias if by_input else bias.T)
    return out


def _product_by_blocks(rows: Array, weight: Quantized) -> Array:
    """Return the product of rows [T, I], a block of outputs after the other.

    The halves of bytes are multiplied apart, because XLA joins them slowly. The block is the left
    operand of a product, as XLA multiplies it with several rows in half of the time.
    """
    outputs_axis, rows = -3 - weight.axis, rows.astype(jnp.float32)
    inputs, outputs = weight.shape[weight.axis], weight.shape[outputs_axis]
    size = min(max(_BLOCK // inputs, 1), outputs)
    size = max(_divisor(outputs, size), size // 2)
    of_group, apart = rows.reshape(len(rows), weight.num_groups, -1), weight.replace(order=None)
    halves = jnp.split(of_group, 2, -1) if weight.code else [of_group]
    halves, sums = [half.reshape(len(rows), -1).T for half in halves], of_group.sum(-1).T

    def turn(index: Array, out: Array) -> Array:
        # The last block begins earlier, if it were not whole.
        begin = jnp.minimum(index * size, outputs - size)
        block = jax.tree.map(
            lambda x: lax.dynamic_slice_in_dim(x, begin, size, x.ndim + outputs_axis), apart
        )
        product = _product_of_block(halves, sums, block)
        return lax.dynamic_update_slice_in_dim(out, product, begin, 0)

    out = jnp.zeros((outputs, len(rows)), jnp.float32)
    return lax.fori_loop(0, -(-outputs // size), turn, out).T


def _product_of_block(halves: list[Array], sums: Array, block: Quantized) -> Array:
    """Return a block's product with halves of rows, [O, T], given the sums [G, T] of groups."""
    axis = block.axis
    product = functools.partial(
        lax.dot_general,
        dimension_numbers=(((2 + axis,), (0,)), ((), ())),
        precision=lax.Precision.HIGHEST,
    )
    scales, bias = block.scales.array(axis), block._bias()
    shape = list(block.shape)
    shape[axis] //= len(halves)
    values = block._halves(jnp.float32)
    if block.num_groups > 1:
        values = [half * jnp.expand_dims(scales, axis) for half in values]
    pairs = zip(halves, values, strict=True)
    out = sum(product(half.reshape(shape), rows) for rows, half in pairs)
    out = out if block.num_groups > 1 else out * scales.reshape(-1, 1)
    return out if bias is None else out + product(bias, sums)


def _divisor(number: int, most: int) -> int:
    """Return the largest divisor of a number that is at most ``most``."""
    return next(size for size in range(most, 0, -1) if number % size == 0)


def _decoded(codes: Array, code: str, dtype: jnp.dtype) -> Array:
    """Return the numbers of half-bytes, uint8 from 0 to 15."""
    if code == "uint4":
        return codes.astype(dtype)
    signed = codes.astype(jnp.int8)
    if code == "int4":
        return (signed - ((signed & 8) << 1)).astype(dtype)
    # e2m1: a sign, two bits of exponent, one of mantissa. Twice the number is whole.
    twice = jnp.where(signed & 6 == 0, signed & 1, ((2 + (signed & 1)) << (signed >> 1 & 3)) >> 1)
    return (jnp.where(signed & 8, -twice, twice).astype(jnp.float32) * 0.5).astype(dtype)


def stored_nibbles(values: np.ndarray, axis: int, groups: int, *, packed: bool) -> np.ndarray:
    """Return values of one of ``NIBBLES`` as ``Quantized.values`` has them.

    ``packed`` puts two into a byte, as a CPU reads them fastest; accelerators take the dtype.
    """
    if not packed:
        return values
    codes = values if values.dtype == np.uint8 else values.view(np.uint8)
    codes = codes & 15
    shape = list(codes.shape)
    at = len(shape) + axis
    apart = codes.reshape(*shape[:at], groups, 2, -1, *shape[at + 1 :])
    low, high = np.take(apart, 0, at + 1), np.take(apart, 1, at + 1)
    shape[at] //= 2
    return (low | high << 4).reshape(shape)


@dataclasses.dataclass(frozen=True)
class Scheme:
    """A quantisation that takes nothing but the weights.

    Attributes:
      name: of ``quantization``.
      values: dtype of the values.
      most: largest value.
      groups: sizes of groups, in order of preference; () for one group of all inputs.
    """

    name: str
    values: str
    most: float
    groups: tuple[int, ...] = ()

    def group(self, inputs: int) -> int | None:
        """Return the size of a group of a matrix; None if no size divides its inputs."""
        sizes = self.groups or (inputs,)
        return next((size for size in sizes if inputs % size == 0), None)


SCHEMES = {
    scheme.name: scheme
    for scheme in (
        Scheme("int8", "int8", 127.0),
        Scheme("fp8", "float8_e4m3fn", 448.0),
        Scheme("int4", "int4", 8.0, (128, 64, 32)),
    )
}


@functools.partial(jax.jit, static_argnames=("scheme", "swapped", "packed"))
def quantize(
    weight: Array, scheme: Scheme, *, swapped: bool = False, packed: bool = False
) -> Weight:
    """Return a matrix [I, O], or a stack [E, I, O], quantised by groups of its inputs.

    Args:
      weight: floats.
      scheme: values and groups.
      swapped: whether it is stored as [O, I], as a CPU reads it fastest.
      packed: whether values of half a byte are two in a byte.
    """
    axis, wide = -1 if swapped else -2, weight.astype(jnp.float32)
    wide = wide.swapaxes(-1, -2) if swapped else wide
    at, inputs = wide.ndim + axis, wide.shape[axis]
    size = scheme.group(inputs)
    apart = wide.reshape(*wide.shape[:at], inputs // size, size, *wide.shape[at + 1 :])
    largest = jnp.abs(apart).max(axis, keepdims=True)
    if scheme.groups:  # The largest gets the one value of largest size, the least.
        index = jnp.abs(apart).argmax(axis, keepdims=True)
        largest = -jnp.take_along_axis(apart, index, axis)
    # Scales are few, but those of small groups count.
    dtype = jnp.bfloat16 if scheme.groups else jnp.float32
    scales = (largest / scheme.most).astype(dtype)
    values = apart / jnp.where(scales == 0, 1, scales).astype(jnp.float32)
    code = ""
    if scheme.values.startswith("int"):
        values = jnp.clip(jnp.round(values), -scheme.most, scheme.most - bool(scheme.groups))
    values = jnp.clip(values, -scheme.most, scheme.most)
    if packed and scheme.values in NIBBLES:
        code, codes = scheme.values, values.astype(jnp.int8).astype(jnp.uint8) & 15
        low, high = jnp.split(codes, 2, axis)
        values = low | high << 4
    else:
        values = values.astype(scheme.values)
    shape = list(wide.shape)
    shape[axis] = values.shape[at] * values.shape[at + 1]
    stored = Quantized(
        values=values.reshape(shape),
        scales=Factors(scales.squeeze(axis)),
        axis=axis,
        name=weight.dtype.name,
        code=code,
    )
    return Transposed(stored) if swapped else stored

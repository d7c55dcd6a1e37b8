"""Quantised weights in the form that kernels read: ``ops.quantized_matmul``, ``grouped_matmul``."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from jspec import ops, sharding
from jspec.core.quantized import KERNEL_ROWS, Factors, Quantized
from jspec.core.types import Array
from jspec.core.weights import Transposed, Weight, as_stored, bits_of
from jspec.sharding.placement import Placement


@struct.dataclass
class Bits(Factors):
    """Factors, those in float16 as their bits in int16: kernels of TPUs load no float16."""

    def numbers(self) -> Factors:
        """Return the factors as numbers."""
        return _bitcast(Factors(self.inner, self.outer), jnp.int16, jnp.float16)

    def array(self, axis: int) -> Array:
        """See ``Factors``."""
        return self.numbers().array(axis)


@struct.dataclass
class ForKernel(Quantized):
    """A quantised matrix of bfloat16 numbers, or a stack of them.

    On GPUs its values have a sign. Stacks, there [E, O, I], have no minima and no outer factors.

    Attributes:
      implementation: of ``ops.quantized_matmul`` or ``ops.grouped_matmul``; None for the device's
        default.
      spec: how the devices of a mesh divide the values of a matrix.
      offset: added to values, which had no sign and no zero points.
    """

    implementation: str | None = struct.field(pytree_node=False, default=None)
    spec: PartitionSpec = struct.field(pytree_node=False, default=PartitionSpec())
    offset: int = struct.field(pytree_node=False, default=0)

    def over_groups(self, rows: Array) -> Array:
        """See ``Quantized``; XLA takes many rows. Each device multiplies its part of the matrix."""
        name = self.implementation if len(rows) <= KERNEL_ROWS else "xla"
        axes = (*self.spec, None, None)[:2]
        outputs, inputs = axes if self.axis == -1 else axes[::-1]

        def multiply(rows: Array, part: Quantized) -> Array:
            scales = part.scales.numbers() if isinstance(part.scales, Bits) else part.scales
            minima = part.minima or Factors(None)
            out = ops.quantized_matmul(
                rows,
                part.values,
                scales.inner,
                part.zeros,
                scales.outer,
                minima.inner,
                minima.outer,
                offset=self.offset,
                implementation=name,
            )
            return out if inputs is None else lax.psum(out, inputs)

        def division(x: Array) -> PartitionSpec:
            pairs = zip(axes, x.shape, strict=True)
            return PartitionSpec(*(axis if size > 1 else None for axis, size in pairs))

        matrix = self.replace(order=None)
        if sharding.num_shards() > 1:
            multiply = jax.shard_map(
                multiply,
                in_specs=(PartitionSpec(None, inputs), jax.tree.map(division, matrix)),
                out_specs=PartitionSpec(None, outputs),
                check_vma=False,
            )
        return multiply(rows, matrix)

    def grouped(self, x: Array, sizes: Array, multiply: Callable[..., Array]) -> Array:
        """See ``Quantized``; XLA takes stacks that devices divide."""
        if sharding.num_shards() > 1:
            return super().grouped(x, sizes, multiply)
        named = {"implementation": self.implementation} if self.implementation else {}
        return multiply(x, self.values, sizes, self.scales.inner, self.zeros, **named)

    def matrix(self, index: Array) -> Quantized:
        """See ``Weight``; only the loop over experts for CPUs takes them one by one."""
        return super().matrix(index).replace(implementation="xla")

    def swapped(self) -> Quantized:
        """Return the transpose of the matrix, which no kernel takes."""
        fields = _fields(self)
        if self.offset:
            fields["values"] = _moved(self.values, self.offset)
        return Quantized(**fields).swapped()

    def _grouped(self, dtype: jnp.dtype) -> Array:
        return super()._grouped(dtype) + self.offset


def for_kernel(
    weight: Weight, implementation: str | None = None, placement: Placement | None = None
) -> Weight:
    """Return a weight in the form of a kernel that runs on this device, else as it is.

    Whole numbers without a sign become numbers with one, and so do their zero points: kernels
    convert no others.

    Args:
      weight: of any kind; kernels take quantised ones, for GPUs ``Transposed`` ones.
      implementation: as of ``ForKernel``.
      placement: of the stored values; None for one device.
    """
    if not kernel_takes(weight, implementation):
        return weight
    is_swapped = isinstance(weight, Transposed)
    stored = weight.stored if is_swapped else weight
    fields = _fields(_signed(stored))
    if not is_swapped:
        bits = _bitcast(fields["scales"], jnp.float16, jnp.int16)
        fields["scales"] = Bits(bits.inner, bits.outer)
    made = ForKernel(
        **fields,
        implementation=implementation,
        spec=_spec(placement),
        offset=_offset(stored),
    )
    return Transposed(made) if is_swapped else made


def kernel_takes(weight: Weight, implementation: str | None = None) -> bool:
    """Return whether a kernel that runs on this device takes a weight; its shapes suffice."""
    is_swapped = isinstance(weight, Transposed)
    stored, axis = (weight.stored, -1) if is_swapped else (weight, -2)
    if type(stored) is not Quantized or stored.axis != axis or stored.name != "bfloat16":
        return False
    if stored.code:
        return False
    signed = jax.eval_shape(_signed, stored)
    stack, scales, minima = signed.shape[:-2], signed.scales, signed.minima or Factors(None)
    x = jax.ShapeDtypeStruct((KERNEL_ROWS, signed.shape[axis]), jnp.bfloat16)
    if stack:
        is_plain = signed.order is signed.minima is scales.outer is None and not _offset(stored)
        sizes = jax.ShapeDtypeStruct(stack, jnp.int32)
        return is_plain and ops.has_kernel(
            "grouped_matmul",
            implementation,
            x,
            signed.values,
            sizes,
            scales.inner,
            signed.zeros,
        )
    return ops.has_kernel(
        "quantized_matmul",
        implementation,
        x,
        signed.values,
        scales.inner,
        signed.zeros,
        scales.outer,
        minima.inner,
        minima.outer,
    )


def as_divided(weight: Array | Weight, placement: Placement) -> tuple[Array | Weight, Placement]:
    """Return a weight as devices divide it, and the placement of what it stores.

    Its inputs are before its outputs then, but for a matrix of a kernel.

    Args:
      weight: of any kind, or an array.
      placement: of the weight as an array.
    """
    if len(weight.shape) > 2:
        return as_stored(weight), placement
    if isinstance(weight, ForKernel):
        return weight.replace(spec=_spec(placement)), placement
    if isinstance(weight, Transposed) and isinstance(weight.stored, ForKernel):
        stored, swapped = as_divided(weight.stored, placement.swapped())
        return Transposed(stored), swapped
    return as_stored(weight), placement


def by_xla(params: Any) -> Any:
    """Return weights whose products XLA makes."""

    def one(leaf: Any) -> Any:
        is_kernels = isinstance(leaf, ForKernel)
        return leaf.replace(implementation="xla") if is_kernels else leaf

    return jax.tree.map(one, params, is_leaf=lambda x: isinstance(x, ForKernel))


def _spec(placement: Placement | None) -> PartitionSpec:
    is_divided = placement is not None and isinstance(placement.sharding, NamedSharding)
    return placement.sharding.spec if is_divided else PartitionSpec()


def _fields(weight: Quantized) -> dict[str, Any]:
    return {name: getattr(weight, name) for name in Quantized.__dataclass_fields__}


def _bitcast(factors: Factors, before: jnp.dtype, after: jnp.dtype) -> Factors:
    """Return factors with the bits of numbers of one dtype as those of another."""

    def one(x: Array) -> Array:
        return lax.bitcast_convert_type(x, after) if x.dtype == before else x

    return jax.tree.map(one, factors)


def _offset(weight: Quantized) -> int:
    """Return what is added to values that get a sign; zero points have it in them."""
    return _half(weight.values) if _gets_sign(weight) and weight.zeros is None else 0


def _gets_sign(weight: Quantized) -> bool:
    """Return whether a kernel takes the values with a sign; those of TPUs take both."""
    is_unsigned = jnp.issubdtype(weight.values.dtype, jnp.unsignedinteger)
    return is_unsigned and (weight.axis == -1 or weight.zeros is not None)


def _signed(weight: Quantized) -> Quantized:
    values, zeros = weight.values, weight.zeros
    if _gets_sign(weight):
        half = _half(values)
        values = _moved(values, -half)
        zeros = None if zeros is None else zeros.astype(jnp.int16) - half
    zeros = None if zeros is None else zeros.astype(jnp.bfloat16)
    return weight.replace(values=values, zeros=zeros)


def _half(values: Array) -> int:
    return 1 << (bits_of(values.dtype) - 1)


def _moved(values: Array, by: int) -> Array:
    """Return whole numbers plus a number that takes their sign away, or gives them one."""
    if isinstance(values, jax.ShapeDtypeStruct):
        return jax.eval_shape(functools.partial(_moved, by=by), values)
    sign = "int" if by < 0 else "uint"
    return (values.astype(jnp.int16) + by).astype(f"{sign}{bits_of(values.dtype)}")

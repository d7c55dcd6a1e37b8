"""Quantised weights in the form that kernels read: ``ops.quantized_matmul``, ``grouped_matmul``."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from jspec import ops, sharding
from jspec.core.quantized import KERNEL_ROWS, Quantized
from jspec.core.types import Array
from jspec.core.weights import Transposed, Weight, bits_of


@struct.dataclass
class ForKernel(Quantized):
    """A quantised matrix [O, I] of bfloat16 numbers, without minima and outer factors.

    Or a stack of them, [E, O, I].

    Attributes:
      implementation: of ``ops.quantized_matmul`` or ``ops.grouped_matmul``; None for the device's
        default.
    """

    implementation: str | None = struct.field(pytree_node=False, default=None)

    def over_groups(self, rows: Array) -> Array:
        """See ``Quantized``; XLA takes many rows, and weights that devices divide."""
        if sharding.num_shards() > 1:
            return super().over_groups(rows)
        name = self.implementation if len(rows) <= KERNEL_ROWS else "xla"
        return ops.quantized_matmul(
            rows, self.values, self.scales.inner, self.zeros, implementation=name
        )

    def grouped(self, x: Array, sizes: Array, multiply: Callable[..., Array]) -> Array:
        """See ``Quantized``; XLA takes stacks that devices divide."""
        if sharding.num_shards() > 1:
            return super().grouped(x, sizes, multiply)
        named = {"implementation": self.implementation} if self.implementation else {}
        return multiply(x, self.values, sizes, self.scales.inner, self.zeros, **named)

    def swapped(self) -> Quantized:
        """Return the transpose of the matrix, which no kernel takes."""
        return Quantized(**_fields(self)).swapped()


def for_kernel(weight: Weight, implementation: str | None = None) -> Weight:
    """Return a weight in the form of a kernel that runs on this device, else as it is.

    Whole numbers without a sign become numbers with one, and so do their zero points: kernels
    convert no others.

    Args:
      weight: of any kind; kernels take ``Transposed`` quantised ones.
      implementation: as of ``ForKernel``.
    """
    stored = weight.stored if isinstance(weight, Transposed) else None
    if type(stored) is not Quantized or stored.axis != -1 or stored.name != "bfloat16":
        return weight
    if stored.code or not (stored.minima is stored.scales.outer is None):
        return weight
    made = ForKernel(**_fields(_signed(stored)), implementation=implementation)
    return Transposed(made) if _has_kernel(made) else weight


def _has_kernel(weight: ForKernel) -> bool:
    *stack, _, inputs = weight.shape
    x, scales = jax.ShapeDtypeStruct((1, inputs), jnp.bfloat16), weight.scales.inner
    if not stack:
        return ops.has_kernel(
            "quantized_matmul", weight.implementation, x, weight.values, scales, weight.zeros
        )
    sizes = jax.ShapeDtypeStruct(tuple(stack), jnp.int32)
    return weight.order is None and ops.has_kernel(
        "grouped_matmul", weight.implementation, x, weight.values, sizes, scales, weight.zeros
    )


def by_xla(params: Any) -> Any:
    """Return weights whose products XLA makes."""

    def one(leaf: Any) -> Any:
        is_kernels = isinstance(leaf, ForKernel)
        return leaf.replace(implementation="xla") if is_kernels else leaf

    return jax.tree.map(one, params, is_leaf=lambda x: isinstance(x, ForKernel))


def _fields(weight: Quantized) -> dict[str, Any]:
    return {name: getattr(weight, name) for name in Quantized.__dataclass_fields__}


def _signed(weight: Quantized) -> Quantized:
    values, zeros = weight.values, weight.zeros
    if zeros is None:
        return weight
    if jnp.issubdtype(values.dtype, jnp.unsignedinteger):
        bits = bits_of(values.dtype)
        half = 1 << (bits - 1)
        values = (values.astype(jnp.int16) - half).astype(f"int{bits}")
        zeros = zeros.astype(jnp.int16) - half
    return weight.replace(values=values, zeros=zeros.astype(jnp.bfloat16))

"""Placements of weights: the devices that hold an array, the order of its entries, its layout."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.experimental.layout import Format, Layout
from jax.sharding import NamedSharding, PartitionSpec, Sharding

from jspec.sharding import TENSOR


@dataclasses.dataclass(frozen=True, eq=False)
class Placement:
    """The placement of an array of weights.

    Attributes:
      sharding: the devices, and the part of the array that each has.
      order: the entries of the divided axis, by their indices in the checkpoint, as the devices
        take them in turn. They may repeat. None for all in turn.
      layout: of matrices of two-byte numbers in a device's memory; None for the device's own.
    """

    sharding: Sharding
    order: np.ndarray | None = None
    layout: Layout | None = None

    def put(self, x: Any) -> jax.Array:
        """Return a whole array at its placement; a process puts the parts of its own devices."""
        if getattr(x, "sharding", None) != self.sharding:
            whole = np.asarray(x)
            if self.order is not None:
                whole = np.take(whole, self.order, list(self.sharding.spec).index(TENSOR))
            x = jax.make_array_from_callback(whole.shape, self.sharding, whole.__getitem__)
        return self.laid(x)

    def of_part(self, shape: tuple[int, ...], rank: int) -> "Placement":
        """Return the placement of an array that belongs to one of ``rank`` axes, as its factors do.

        Its axes are those of the other, in other sizes. An axis of one entry is not divided, and
        neither is an array of other rank.

        Raises:
          ValueError: devices cannot divide it.
        """
        if not isinstance(self.sharding, NamedSharding):
            return Placement(self.sharding)
        spec = (*self.sharding.spec, *[None] * (len(shape) - len(self.sharding.spec)))
        divided = [at for at, name in enumerate(spec) if name is not None]
        if len(shape) != rank or any(shape[at] == 1 for at in divided):
            return Placement(NamedSharding(self.sharding.mesh, PartitionSpec()))
        ways = self.sharding.mesh.shape[TENSOR]
        if self.order is None and any(shape[at] % ways for at in divided):
            raise ValueError(
                f"{ways} devices cannot divide the {shape[divided[0]]} groups of a quantised "
                "weight; use fewer devices, or weights that are not quantised."
            )
        return Placement(self.sharding, self.order)

    def swapped(self) -> "Placement":
        """Return the placement of the transpose of a matrix."""
        if not isinstance(self.sharding, NamedSharding):
            return Placement(self.sharding)
        inputs, outputs = (*self.sharding.spec, None, None)[:2]
        swapped = NamedSharding(self.sharding.mesh, PartitionSpec(outputs, inputs))
        return Placement(swapped, self.order)

    def laid(self, x: jax.Array) -> jax.Array:
        """Return an array of these devices in the layout."""
        if self.layout is None or x.ndim != 2 or x.dtype.itemsize != 2:
            return x
        return jax.block_until_ready(jax.device_put(x, Format(self.layout, self.sharding)))


# The placement of an array by its path in the weights, such as ("layers", 0, "mixer", "qkv").
Placements = Callable[[tuple[str | int, ...]], Placement]


def as_placement(sharding: Sharding | Placement) -> Placement:
    """Return a sharding as the placement of an array whose entries come in turn."""
    return sharding if isinstance(sharding, Placement) else Placement(sharding)

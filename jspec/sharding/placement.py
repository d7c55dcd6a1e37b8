"""Placements of weights: the devices that hold an array, the order of its entries, its layout."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.experimental.layout import Format, Layout
from jax.sharding import Sharding

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

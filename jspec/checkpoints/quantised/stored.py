"""A quantised tensor of a file, whatever its format: arrays that ``core.quantized`` can take."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import ml_dtypes
import numpy as np

NIBBLES = {name: np.dtype(getattr(ml_dtypes, name)) for name in ("int4", "uint4", "float4_e2m1fn")}


@dataclasses.dataclass(frozen=True, eq=False)
class Rows:
    """An array [..., R, C] that is decoded row by row when it is indexed.

    Attributes:
      shape: of the array.
      dtype: of the array.
      read: maps an index of all axes but the last to the numbers.
    """

    shape: tuple[int, ...]
    dtype: np.dtype
    read: Callable[..., np.ndarray]

    def __getitem__(self, index: Any) -> np.ndarray:
        """Return the numbers at slices, of which those of leading axes may be left out."""
        index = index if isinstance(index, tuple) else (index,)
        leading = len(self.shape) - 1
        rows = self.read(*index[:leading], *[slice(None)] * (leading - len(index)))
        return rows[(..., *index[leading:])]


@dataclasses.dataclass(frozen=True, eq=False)
class StoredTensor:
    """A quantised tensor [out, in], or a stack of them; it can be read as floats too.

    Attributes:
      shape: of the floats, as their entry has it.
      arrays: the fields of ``Quantized`` by name, each [..., out, in] or [..., out, G]: "values",
        "scales", "outer_scales", "zeros", "minima" and "outer_minima".
      order: the column of each stored column; None for the same.
      flipped: whether the floats of a stack are [E, in, out], unlike the arrays.
      by_token: whether products quantise rows too; see ``ByToken``.
    """

    shape: tuple[int, ...]
    arrays: Mapping[str, np.ndarray | Rows]
    order: np.ndarray | None = None
    flipped: bool = False
    by_token: bool = False

    dtype = np.dtype(np.float32)

    @property
    def form(self) -> tuple:
        """The kind of the tensor; those of one kind can be joined."""
        inputs = self.arrays["values"].shape[-1]
        kinds = ((n, x.dtype.name, inputs // x.shape[-1]) for n, x in self.arrays.items())
        return *sorted(kinds), None if self.order is None else self.order.tobytes()

    def __getitem__(self, index: Any) -> np.ndarray:
        """Return floats at slices; whole rows are multiplied out."""
        index = index if isinstance(index, tuple) else (index,)
        leading = len(self.shape) - 1
        if self.flipped:
            *stack, inputs, outputs = (*index, *[slice(None)] * (leading + 1 - len(index)))
            floats = self._floats((*stack, outputs))[..., inputs]
            return floats.swapaxes(-1, -2)
        return self._floats(index[:leading])[(..., *index[leading:])]

    def _floats(self, rows: tuple) -> np.ndarray:
        part = {name: np.asarray(array[rows]) for name, array in self.arrays.items()}
        values = part["values"].astype(np.float32)
        spread = lambda x: np.repeat(x, values.shape[-1] // x.shape[-1], -1)
        if "zeros" in part:
            values = values - spread(part["zeros"].astype(np.float32))
        values = values * spread(_factors(part, "scales"))
        if "minima" in part:
            values = values + spread(_factors(part, "minima"))
        return values if self.order is None else values[..., np.argsort(self.order)]


def _factors(part: Mapping[str, np.ndarray], name: str) -> np.ndarray:
    inner, outer = part[name].astype(np.float32), part.get(f"outer_{name}")
    if outer is None:
        return inner
    return inner * np.repeat(outer.astype(np.float32), inner.shape[-1] // outer.shape[-1], -1)


def nibbles(words: np.ndarray, bits: int = 4) -> np.ndarray:
    """Return the numbers of whole words along the last axis, uint8; the lowest bits come first."""
    count = words.dtype.itemsize * 8 // bits
    shifts = np.arange(count, dtype=np.uint32) * bits
    apart = words.view(f"uint{8 * words.dtype.itemsize}")[..., None] >> shifts
    return (apart & (2**bits - 1)).astype(np.uint8).reshape(*words.shape[:-1], -1)

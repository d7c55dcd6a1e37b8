"""Numeric parameters of a sequence: their ranges, and the arrays that a batch makes of them."""

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from jspec.util.messages import shown
from jspec.util.values import is_real


@dataclasses.dataclass(frozen=True)
class Parameter:
    """A number that every sequence sets, under the same name in ``SamplingParams``."""

    name: str
    neutral: float  # the value that changes nothing; idle rows of a batch have it
    allows: Callable[[Any], bool]  # whether a value is in range
    words: str  # the range, for error messages
    convert: Callable[[Any], float] = float  # maps a value in range to the one in the array
    dtype: type = np.float32  # dtype of the array [B]

    def resolve(self, value: Any) -> float:
        """Return ``value`` as the array holds it; raise ValueError if it is out of range."""
        if not self.allows(value):
            raise ValueError(f"{self.name}={shown(value)} must be {self.words}.")
        return self.convert(value)

    def value(self, sequence: Any) -> float:
        """Return the value that a ``SequenceParams`` or ``SamplingParams`` has."""
        return getattr(sequence, self.name)

    def array(self, sequences: Sequence[Any]) -> np.ndarray:
        """Return the values of the sequences, [B]."""
        return column(map(self.value, sequences), self.dtype)


def between(least: float, most: float) -> Callable[[Any], bool]:
    """Return a test for finite numbers from ``least`` to ``most``."""
    return lambda value: is_real(value) and least <= value <= most


def column(values: Iterable, dtype: type) -> np.ndarray:
    """Return one value per sequence, [B]."""
    return np.array(list(values), dtype)


def padded(lists: Iterable, width: int, dtype: type = np.int32) -> np.ndarray:
    """Return one list per sequence, padded with -1 to [B, width]."""
    lists = list(map(list, lists))
    array = np.full((len(lists), width), -1, dtype)
    for index, values in enumerate(lists):
        array[index, : len(values)] = values
    return array

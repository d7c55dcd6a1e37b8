"""Numeric parameters of a sequence: their ranges, and the arrays that a batch makes of them."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from jspec.util.buckets import bucket
from jspec.util.messages import shown
from jspec.util.values import is_real


@dataclasses.dataclass(frozen=True)
class Parameter:
    """A number that every sequence sets, under the same name in ``SamplingParams``."""

    name: str
    neutral: float  # the value that changes nothing; padding rows of a batch have it
    allows: Callable[[Any], bool]  # whether a value is in range
    words: str  # the range, for error messages
    convert: Callable[[Any], float] = float  # of a value in range to the one in the array
    dtype: type = np.float32  # of the array [B]

    def resolve(self, value: Any) -> float:
        """Return ``value`` as the array holds it; raise ValueError if it is out of range."""
        if not self.allows(value):
            raise ValueError(f"{self.name}={shown(value)} must be {self.words}.")
        return self.convert(value)

    def value(self, sequence: Any) -> float:
        """Return the value that a ``SequenceParams`` or ``SamplingParams`` has."""
        return getattr(sequence, self.name)

    def array(self, sequences: Sequence[Any], size: int) -> np.ndarray:
        """Return the values of the sequences, padded to [size]."""
        return column(map(self.value, sequences), size, self.neutral, self.dtype)


def between(least: float, most: float) -> Callable[[Any], bool]:
    """Return a test for finite numbers from ``least`` to ``most``."""
    return lambda value: is_real(value) and least <= value <= most


def column(values: Any, size: int, fill: float, dtype: type) -> np.ndarray:
    """Return one value per sequence, padded with ``fill`` to [size]."""
    values = list(values)
    return np.array(values + [fill] * (size - len(values)), dtype)


def padded(lists: Any, size: int, dtype: type = np.int32) -> np.ndarray:
    """Return one list per sequence, padded with -1 to [size, E]."""
    lists = list(map(list, lists))
    array = np.full((size, bucket(max(map(len, lists), default=0), smallest=1)), -1, dtype)
    for index, values in enumerate(lists):
        array[index, : len(values)] = values
    return array

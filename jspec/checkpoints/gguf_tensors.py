"""Tensors of a family that are made of other ones in GGUF files, where they are read."""

import dataclasses
from typing import Any, Protocol

import numpy as np


class Readable(Protocol):
    """A tensor that slices read."""

    shape: tuple[int, ...]
    dtype: np.dtype

    def __getitem__(self, index: Any) -> np.ndarray:
        """Return numbers at slices."""


@dataclasses.dataclass(frozen=True, eq=False)
class Alternating:
    """Two stacks [E, R, ...] as one [E, 2 R, ...] whose rows are of the one and of the other."""

    parts: tuple[Readable, Readable]

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the stack."""
        count, rows, *rest = self.parts[0].shape
        return (count, 2 * rows, *rest)

    @property
    def dtype(self) -> np.dtype:
        """Dtype of both."""
        return self.parts[0].dtype

    def __getitem__(self, index: Any) -> np.ndarray:
        """Return numbers at a number or a slice of the stack, and slices of other axes."""
        index = index if isinstance(index, tuple) else (index,)
        number, rows, *rest = (*index, slice(None))[: max(len(index), 2)]
        begin, end, _ = rows.indices(self.shape[1])
        pairs = slice(begin // 2, -(-end // 2))
        both = [part[(number, pairs, *rest)] for part in self.parts]
        axis = 0 if isinstance(number, int) else 1
        joined = np.stack(both, axis + 1)
        shape = joined.shape
        joined = joined.reshape(*shape[:axis], -1, *shape[axis + 2 :])
        first = begin - 2 * pairs.start
        part = slice(first, first + end - begin)
        return joined[(slice(None),) * axis + (part,)]


@dataclasses.dataclass(frozen=True, eq=False)
class Gathered:
    """The rows of several matrices, in an order."""

    parts: tuple[Readable, ...]
    order: np.ndarray  # For each row, its number among the rows of all matrices.

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the joined matrix."""
        return len(self.order), *self.parts[0].shape[1:]

    @property
    def dtype(self) -> np.dtype:
        """Dtype of all."""
        return self.parts[0].dtype

    def __getitem__(self, index: Any) -> np.ndarray:
        """Return rows, or columns of them."""
        rows, *columns = index if isinstance(index, tuple) else (index,)
        numbers, begin = self.order[rows], 0
        joined = np.empty((len(numbers), *self.shape[1:]), self.dtype)[:, *columns]
        for part in self.parts:
            mine = (numbers >= begin) & (numbers < begin + part.shape[0])
            if mine.any():
                joined[mine] = part[(numbers[mine] - begin, *columns)]
            begin += part.shape[0]
        return joined


@dataclasses.dataclass(frozen=True, eq=False)
class KeysAndValues:
    """DeepSeek's ``kv_b_proj`` [H (K + V), R], of keys [H, R, K] and of values [H, V, R].

    llama.cpp has the keys transposed, and multiplies queries with them.
    """

    keys: Readable
    values: Readable

    dtype = np.dtype(np.float32)

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the joined matrix."""
        heads, rank, width = self.keys.shape
        return heads * (width + self.values.shape[1]), rank

    def __getitem__(self, index: Any) -> np.ndarray:
        """Return rows, or columns of them; whole heads are read."""
        rows, *columns = index if isinstance(index, tuple) else (index,)
        begin, end, _ = rows.indices(self.shape[0])
        width = self.keys.shape[2] + self.values.shape[1]
        heads = slice(begin // width, -(-end // width))
        joined = np.concatenate([self.keys[heads].swapaxes(1, 2), self.values[heads]], 1)
        first = begin - heads.start * width
        return joined.reshape(-1, self.shape[1])[first : first + end - begin][:, *columns]


@dataclasses.dataclass(frozen=True, eq=False)
class Columns:
    """A matrix with its columns in another order."""

    matrix: Readable
    order: np.ndarray  # For each column, that in the file.

    dtype = np.dtype(np.float32)

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the matrix."""
        return self.matrix.shape

    def __getitem__(self, index: Any) -> np.ndarray:
        """Return rows, or columns of them; whole rows are read."""
        rows, *columns = index if isinstance(index, tuple) else (index,)
        return self.matrix[rows][:, self.order][:, *columns]

"""The contract of a format of quantised tensors, and what several formats share."""

import abc
import dataclasses
import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from jspec.checkpoints.quantised.stored import Rows, StoredTensor
from jspec.util.messages import shown
from jspec.util.values import is_whole

# By the name of a tensor: its shapes and its dtypes, of which it has one each.
Expected = dict[str, tuple[tuple[tuple[int, ...], ...], tuple[str, ...]]]
FLOATS = ("float32", "bfloat16", "float16")
SCALES = FLOATS[::-1]
GGUF = "gguf"  # the ``quantization`` that keeps the blocks of a GGUF file
W8A8 = "w8a8"  # the ``quantization`` of products of 8 bits by 8
OUTPUT = "lm_head"  # module of the output matrix, which most formats leave as it is


class Format(abc.ABC):
    """A format as a config.json sets it; a frozen dataclass with ``ignored``."""

    # Names of modules, or parts of them, that are not quantised. Only outlines need them, because
    # tensors that files have as floats are read as floats.
    ignored: tuple[str, ...]
    rank = 2  # Axes of a tensor that is quantised; stacks have three.
    by_token = False  # whether products quantise rows too

    @abc.abstractmethod
    def expected(self, module: str, shape: tuple[int, ...]) -> Expected:
        """Return the tensors of a module's weight [out, in].

        Raises:
          ValueError: the format cannot divide such a shape.
        """

    @abc.abstractmethod
    def stored(
        self, module: str, shape: tuple[int, ...], tensors: Mapping[str, np.ndarray]
    ) -> StoredTensor:
        """Return the weight of a module, given its tensors: the expected, and optional ones.

        Raises:
          ValueError: their numbers do not fit the format.
        """

    def optional(self, module: str) -> tuple[str, ...]:
        """Return names of tensors that may be there too; these have no effect on weights."""
        ends = "input_scale", "input_zero_point", "activation_scale"
        return tuple(f"{module}.{end}" for end in ends)

    def named(self, tensors: Mapping[str, Any]) -> dict[str, Any]:
        """Return the tensors of files by the names that ``expected`` uses."""
        return dict(tensors)

    def quantising_rows(self) -> "Format":
        """Return the format for products that quantise each row too.

        Raises:
          ValueError: its config does not ask for that.
        """
        raise ValueError(
            f"quantization={W8A8!r} is for configs of compressed-tensors with input_activations of "
            "8 bits, dynamic and by token, and weights by channel or tensor; leave it out"
        )

    def ignores(self, module: str) -> bool:
        """Return whether a config names a module, or one around it, as not quantised."""
        return any(_names(pattern, module) for pattern in self.ignored)


def _names(pattern: str, module: str) -> bool:
    if pattern.startswith("re:"):
        return re.match(pattern[3:], module) is not None
    return f".{pattern}." in f".{module}."


def groups_of(inputs: int, size: int, module: str) -> int:
    """Return the number of groups of a matrix; ``size`` -1 is one group of all inputs.

    Raises:
      ValueError: the size does not divide the inputs.
    """
    size = inputs if size == -1 else size
    if inputs % size:
        raise ValueError(f"group_size {size} does not divide the {inputs} inputs of {module}")
    return inputs // size


def size_of_group(raw: Mapping[str, Any]) -> int:
    """Return the ``group_size`` of a config: -1 or None for one group of all inputs."""
    size = raw.get("group_size")
    size = -1 if size is None else size
    if size != -1 and not is_whole(size, 2, 1 << 16):
        raise ValueError(f"group_size={shown(size)} must be -1, or a whole number of at least 2")
    return size


def block_of(raw: Mapping[str, Any], key: str) -> tuple[int, int]:
    """Return the block (out, in) under a key."""
    block = raw.get(key)
    is_pair = isinstance(block, list) and len(block) == 2
    if not is_pair or not all(is_whole(size, 1, 1 << 16) for size in block):
        raise ValueError(f"{key}={shown(block)} must be two whole numbers")
    return block[0], block[1]


def check(raw: Mapping[str, Any], key: str, allowed: tuple, default: Any = None) -> Any:
    """Return the value under a key.

    Raises:
      ValueError: it is not one of those that are supported.
    """
    value = raw.get(key, default)
    if not any(value == each and type(value) is type(each) for each in allowed):
        known = " or ".join(map(repr, allowed))
        raise ValueError(f"{key}={shown(value)} is not supported, only {known}")
    return value


def names(raw: Mapping[str, Any], key: str) -> tuple[str, ...]:
    """Return the list of names under a key; None counts as empty."""
    value = raw.get(key) or []
    if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
        raise ValueError(f"{key}={shown(value)} must be a list of names")
    for name in value:
        try:
            re.compile(name.removeprefix("re:"))
        except re.error as error:
            raise ValueError(f"{key} has {shown(name)}, which is no pattern ({error})") from None
    return tuple(value)


def columns(tensor: np.ndarray) -> Rows:
    """Return an array whose rows are the columns of a tensor."""
    return Rows(tensor.shape[::-1], tensor.dtype, lambda rows: tensor[:, rows].T)


def repeated(tensor: np.ndarray, outputs: int, size: int) -> Rows:
    """Return the rows [out, G] of factors [out / size, G]."""
    number = np.arange(outputs) // size
    return Rows((outputs, tensor.shape[1]), tensor.dtype, lambda rows: tensor[number[rows]])


def order_of(name: str, numbers: np.ndarray, inputs: int, groups: int) -> np.ndarray | None:
    """Return the inputs by the numbers of their groups; None if they are in order.

    Raises:
      ValueError: groups have different sizes, or there is not one number for each input.
    """
    numbers, in_order = np.asarray(numbers), np.arange(inputs) // (inputs // groups)
    if numbers.shape != (inputs,) or not np.issubdtype(numbers.dtype, np.integer):
        raise ValueError(f"{name} is {numbers.dtype}{list(numbers.shape)}, not int32[{inputs}]")
    if np.array_equal(numbers, in_order):
        return None
    if not numbers.any():  # shapes alone
        numbers = in_order
    sizes = np.bincount(np.clip(numbers, 0, groups), minlength=groups)
    if len(sizes) != groups or len(set(sizes.tolist())) > 1:
        raise ValueError(
            f"{name} must name each of its {groups} groups of inputs equally often, but one of "
            f"them is named {max(sizes)} times"
        )
    return np.argsort(numbers, kind="stable").astype(np.int32)


def packed_columns(tensor: np.ndarray, outputs: int, order: tuple[int, ...], plus: int = 0) -> Rows:
    """Return the rows [out, X] of half-bytes that are packed along the outputs, [X, out / 8].

    ``order`` has the column of each half-byte of a word. ``plus`` is added.
    """
    inverse = np.argsort(order)

    def read(rows: slice) -> np.ndarray:
        begin, end, step = rows.indices(outputs)
        first = begin // 8
        words = np.ascontiguousarray(tensor[:, first : -(-end // 8)]).view(np.uint32)
        apart = words[..., None] >> (4 * np.asarray(inverse, np.uint32)) & 15
        numbers = apart.astype(np.uint8).reshape(len(words), -1)
        return numbers[:, begin - 8 * first : end - 8 * first : step].T + np.uint8(plus)

    return Rows((outputs, tensor.shape[0]), np.dtype(np.uint8), read)


def as_dtype(rows: Rows, dtype: np.dtype) -> Rows:
    """Return an array in another dtype."""
    return dataclasses.replace(
        rows, dtype=dtype, read=lambda *index: rows.read(*index).astype(dtype)
    )

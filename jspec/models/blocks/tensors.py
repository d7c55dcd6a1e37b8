"""The tensors of a part of a layer in checkpoints, under Hugging Face's names."""

import dataclasses
from collections.abc import Sequence

import numpy as np

from jspec.models.blocks.norms import Norm


@dataclasses.dataclass(frozen=True)
class Tensor:
    """One array of a part's weights, and the tensors of a checkpoint that make it up.

    Attributes:
      path: the fields, and the indices in tuples, that lead to the array.
      names: names of the tensors. They are joined along their first stored axis (the outputs),
        which is the last axis in memory. Those of a part lack the prefix of its layer.
      shapes: shapes as stored, [out, in].
      transpose: whether the array is stored transposed.
      stack: number of such arrays along a new first axis; None for a single one without it.
      float32: whether the array is float32 regardless of the dtype of the others.
      by_linear: whether only the ``linear`` of a pass reads it, so that its layout is free.
      divided: the axis that several devices divide, "outputs", "inputs" or "experts" (a stack);
        None for an array that every device has.
      unit: outputs that stay together, such as those of a head.
      sections: sizes of the parts of the outputs that are divided each for itself; by default those
        of the names.
      fused: for a stack that is one tensor of a checkpoint, the axis behind that of the stack:
        "outputs" or "inputs". None if each matrix has tensors of its own.
    """

    path: tuple[str | int, ...]
    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    transpose: bool = False
    stack: int | None = None
    float32: bool = False
    by_linear: bool = False
    divided: str | None = None
    unit: int = 1
    sections: tuple[int, ...] = ()
    fused: str | None = None

    @property
    def per_matrix(self) -> int:
        """The number of tensors that make up one matrix."""
        return len(self.names) if self.fused else len(self.names) // (self.stack or 1)

    @property
    def outputs_axis(self) -> int:
        """The axis of the outputs in memory, from the last one: -1 to -3."""
        return -1 if self.transpose else -len(self.shapes[0])

    @property
    def divided_axis(self) -> int | None:
        """The axis in memory that devices divide, from the last one: -1 to -3; None for none."""
        stack = -1 - len(self.shapes[0])
        axes = {"outputs": self.outputs_axis, "inputs": -3 - self.outputs_axis, "experts": stack}
        return axes.get(self.divided)

    def parts(self, count: int) -> np.ndarray | None:
        """Return the order of the outputs in ``count`` equal parts, each with all of the names.

        The units of a tensor with fewer than ``count`` repeat. None if the order stays.
        """
        sizes = self.sections or [shape[0] for shape in self.shapes[: self.per_matrix]]
        is_even = len(sizes) == 1 and sizes[0] % (count * self.unit) == 0
        if self.divided != "outputs" or is_even:
            return None
        begins, order = np.cumsum([0, *sizes[:-1]]), []
        for part in range(count):
            for begin, size in zip(begins, sizes, strict=True):
                width = max(size // count, self.unit)
                first = begin + part * size // count // width * width
                order.append(np.arange(first, first + width))
        return np.concatenate(order)


def matrix(
    field: str,
    modules: Sequence[str],
    outputs: Sequence[int],
    inputs: int,
    kind: str = "weight",
    **options,
) -> Tensor:
    """Return the weights of modules with ``inputs`` columns each, [inputs, outputs] in memory.

    Dots in ``field`` lead into parts; ``kind`` is the end of the names.
    """
    names = tuple(f"{module}.{kind}" for module in modules)
    shapes = tuple((size, inputs) for size in outputs)
    return Tensor(tuple(field.split(".")), names, shapes, **{"transpose": True} | options)


def vector(
    field: str, modules: Sequence[str], sizes: Sequence[int], kind: str = "weight", **options
) -> Tensor:
    """Return the vectors of modules, joined; ``kind`` is the end of their names."""
    names = tuple(f"{module}.{kind}" for module in modules)
    return Tensor(tuple(field.split(".")), names, tuple((size,) for size in sizes), **options)


def norm_of(field: str, module: str, norm: Norm | None, size: int, **options) -> tuple[Tensor, ...]:
    """Return the weights of a norm of ``size`` features; () if there is none, or it has none."""
    if norm is None or not norm.parts:
        return ()
    names = tuple(f"{module}.{part}" for part in norm.parts)
    return (Tensor(tuple(field.split(".")), names, ((size,),) * len(names), **options),)

"""MXFP4 of gpt-oss: stacks of experts, [E, out, in / 32, 16] bytes and scales [E, out, in / 32].

A byte has two numbers of type e2m1, the first one in its low half. A scale is a power of two.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import ml_dtypes
import numpy as np

from jspec.checkpoints.quantised import format as shared
from jspec.checkpoints.quantised.format import Expected, Format
from jspec.checkpoints.quantised.stored import NIBBLES, Rows, StoredTensor, nibbles

METHODS = ("mxfp4",)
_GROUP = 32


@dataclasses.dataclass(frozen=True)
class Mxfp4(Format):
    """Groups of 32 inputs."""

    ignored: tuple[str, ...] = ()

    rank = 3

    def expected(self, module: str, shape: tuple[int, ...]) -> Expected:
        """See ``Format``; stacks are [E, in, out]."""
        count, inputs, outputs = shape
        groups = shared.groups_of(inputs, _GROUP, module)
        return {
            f"{module}_blocks": (((count, outputs, groups, _GROUP // 2),), ("uint8",)),
            f"{module}_scales": (((count, outputs, groups),), ("uint8",)),
        }

    def stored(
        self, module: str, shape: tuple[int, ...], tensors: Mapping[str, np.ndarray]
    ) -> StoredTensor:
        """See ``Format``."""
        blocks, scales = tensors[f"{module}_blocks"], tensors[f"{module}_scales"]
        kind = NIBBLES["float4_e2m1fn"]

        def values(*rows: Any) -> np.ndarray:
            numbers = nibbles(np.ascontiguousarray(blocks[rows]))
            return numbers.reshape(*numbers.shape[:-2], -1).view(kind)

        arrays = {
            "values": Rows((*blocks.shape[:2], shape[1]), kind, values),
            "scales": scales.view(ml_dtypes.float8_e8m0fnu),
        }
        return StoredTensor(shape, arrays, flipped=True)


def read(raw: Mapping[str, Any]) -> Mxfp4:
    """Return the format of a config."""
    return Mxfp4(shared.names(raw, "modules_to_not_convert"))

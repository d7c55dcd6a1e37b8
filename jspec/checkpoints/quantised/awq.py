"""AWQ's gemm packing: eight outputs in a word, [in, out / 8], in an order of their own."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np

from jspec.checkpoints.quantised import format as shared
from jspec.checkpoints.quantised.format import SCALES, Expected, Format
from jspec.checkpoints.quantised.stored import NIBBLES, StoredTensor

METHODS = ("awq",)
_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # The column of each half-byte of a word.


@dataclasses.dataclass(frozen=True)
class Awq(Format):
    """Groups of inputs with a scale and a zero point."""

    group_size: int
    ignored: tuple[str, ...] = ()

    def expected(self, module: str, shape: tuple[int, ...]) -> Expected:
        """See ``Format``."""
        outputs, inputs = shape
        groups = shared.groups_of(inputs, self.group_size, module)
        words = shared.groups_of(outputs, 8, f"the outputs of {module}")
        return {
            f"{module}.qweight": (((inputs, words),), ("int32",)),
            f"{module}.qzeros": (((groups, words),), ("int32",)),
            f"{module}.scales": (((groups, outputs),), SCALES),
        }

    def stored(
        self, module: str, shape: tuple[int, ...], tensors: Mapping[str, np.ndarray]
    ) -> StoredTensor:
        """See ``Format``."""
        part = lambda name: tensors[f"{module}.{name}"]
        values = shared.packed_columns(part("qweight"), shape[0], _ORDER)
        return StoredTensor(
            shape,
            {
                "values": shared.as_dtype(values, NIBBLES["uint4"]),
                "zeros": shared.packed_columns(part("qzeros"), shape[0], _ORDER),
                "scales": shared.columns(part("scales")),
            },
        )


def read(raw: Mapping[str, Any]) -> Awq:
    """Return the format of a config."""
    shared.check(raw, "bits", (4,))
    shared.check(raw, "version", ("gemm", "GEMM"), "gemm")
    shared.check(raw, "zero_point", (True,), True)
    ignored = shared.names(raw, "modules_to_not_convert")
    return Awq(shared.size_of_group(raw), (*ignored, shared.OUTPUT))

"""GPTQ: inputs packed into words, [in / 8, out], and with act-order a group number for each."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np

from jspec.checkpoints.quantised import format as shared
from jspec.checkpoints.quantised.format import SCALES, Expected, Format
from jspec.checkpoints.quantised.stored import NIBBLES, Rows, StoredTensor, nibbles
from jspec.util.messages import shown

METHODS = ("gptq",)


@dataclasses.dataclass(frozen=True)
class Gptq(Format):
    """Groups of inputs with a scale and a zero point."""

    bits: int
    group_size: int
    act_order: bool
    plus: int  # added to each word of zero points
    ignored: tuple[str, ...] = ()

    def expected(self, module: str, shape: tuple[int, ...]) -> Expected:
        """See ``Format``."""
        (outputs, inputs), count = shape, 32 // self.bits
        groups = shared.groups_of(inputs, self.group_size, module)
        words = shared.groups_of(inputs, count, module)
        columns = shared.groups_of(outputs, count, f"the outputs of {module}")
        return {
            f"{module}.qweight": (((words, outputs),), ("int32",)),
            f"{module}.qzeros": (((groups, columns),), ("int32",)),
            f"{module}.scales": (((groups, outputs),), SCALES),
            **({f"{module}.g_idx": (((inputs,),), ("int32",))} if self.act_order else {}),
        }

    def optional(self, module: str) -> tuple[str, ...]:
        """See ``Format``; group numbers count, if a file has them without act-order too."""
        return (f"{module}.g_idx",)

    def stored(
        self, module: str, shape: tuple[int, ...], tensors: Mapping[str, np.ndarray]
    ) -> StoredTensor:
        """See ``Format``."""
        words, zeros, scales = (
            tensors[f"{module}.{name}"] for name in ("qweight", "qzeros", "scales")
        )
        order, name = None, f"{module}.g_idx"
        if name in tensors:
            order = shared.order_of(name, tensors[name], shape[1], len(scales))
        kind = NIBBLES["uint4"] if self.bits == 4 else np.dtype(np.uint8)

        def values(rows: slice) -> np.ndarray:
            numbers = nibbles(np.ascontiguousarray(words[:, rows].T), self.bits)
            return (numbers if order is None else numbers[:, order]).astype(kind)

        def points(rows: slice) -> np.ndarray:
            # gptqmodel subtracts 1 of each number by words, so that those of 0 borrow.
            whole = np.ascontiguousarray(zeros).view(np.uint32) + np.uint32(self.plus)
            return nibbles(whole, self.bits)[:, rows].T

        return StoredTensor(
            shape,
            {
                "values": Rows(shape, kind, values),
                "zeros": Rows(scales.shape[::-1], np.dtype(np.uint8), points),
                "scales": shared.columns(scales),
            },
            order,
        )


def read(raw: Mapping[str, Any]) -> Gptq:
    """Return the format of a config."""
    bits = shared.check(raw, "bits", (4, 8))
    kind = shared.check(raw, "checkpoint_format", ("gptq", "gptq_v2"), "gptq")
    order = shared.check(raw, "desc_act", (True, False), False)
    size = shared.size_of_group(raw)
    ignored = () if shared.check(raw, "lm_head", (True, False), False) else (shared.OUTPUT,)
    ones = {4: 0x11111111, 8: 0x01010101}[bits]
    return Gptq(
        bits=bits,
        group_size=size,
        act_order=order and size != -1,
        plus=ones if kind == "gptq" else 0,
        ignored=(*_excluded(raw), *ignored),
    )


def _excluded(raw: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the patterns under ``dynamic`` of modules that are not quantised.

    Raises:
      ValueError: one that is quantised has settings of its own.
    """
    dynamic = raw.get("dynamic") or {}
    if not isinstance(dynamic, dict):
        raise ValueError(f"dynamic={shown(dynamic)} must be an object")
    for name, settings in dynamic.items():
        if settings and not name.startswith("-:"):
            raise ValueError(f"dynamic has {shown(name)} with settings of its own, only -: is read")
    patterns = [f"re:{name[2:]}" for name in dynamic if name.startswith("-:")]
    return shared.names({"dynamic": patterns}, "dynamic")

"""fp8 of DeepSeek-V3 and Qwen3: float8_e4m3fn with a scale for each block, output or tensor.

``weight_scale_inv`` [out / 128, in / 128] multiplies blocks, ``weight_scale`` outputs or all. Files
of transformers have the first name for one scale of all too.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np

from jspec.checkpoints.quantised import format as shared
from jspec.checkpoints.quantised.format import FLOATS, Expected, Format
from jspec.checkpoints.quantised.stored import StoredTensor

METHODS = ("fp8", "fbgemm_fp8")
_SCALES = (*FLOATS, "float8_e8m0fnu")


@dataclasses.dataclass(frozen=True)
class Fp8(Format):
    """Blocks (out, in) that share a scale; None for a scale of each output, or one for all."""

    block: tuple[int, int] | None
    ignored: tuple[str, ...] = ()

    def expected(self, module: str, shape: tuple[int, ...]) -> Expected:
        """See ``Format``."""
        weight = {f"{module}.weight": ((shape,), ("float8_e4m3fn",))}
        if self.block is None:
            scales = (shape[0], 1), (shape[0],), (), (1,), (1, 1)
            return weight | {f"{module}.weight_scale": (scales, _SCALES)}
        outputs, inputs = self.block
        groups = shared.groups_of(shape[1], inputs, module)
        return weight | {
            f"{module}.weight_scale_inv": (((-(-shape[0] // outputs), groups),), _SCALES)
        }

    def named(self, tensors: Mapping[str, Any]) -> dict[str, Any]:
        """See ``Format``."""
        other, usual = ".weight_scale_inv", ".weight_scale"
        if self.block is not None:
            return dict(tensors)
        return {
            name.removesuffix(other) + usual * name.endswith(other): x
            for name, x in tensors.items()
        }

    def stored(
        self, module: str, shape: tuple[int, ...], tensors: Mapping[str, np.ndarray]
    ) -> StoredTensor:
        """See ``Format``."""
        if self.block is None:
            scale = tensors[f"{module}.weight_scale"].reshape(-1, 1)
            rows = np.broadcast_to(scale, (shape[0], 1))
            return StoredTensor(shape, {"values": tensors[f"{module}.weight"], "scales": rows})
        scale = tensors[f"{module}.weight_scale_inv"]
        scales = shared.repeated(scale, shape[0], self.block[0])
        return StoredTensor(shape, {"values": tensors[f"{module}.weight"], "scales": scales})


def read(raw: Mapping[str, Any]) -> Fp8:
    """Return the format of a config."""
    has_blocks = raw.get("weight_block_size") is not None
    shared.check(raw, "fmt", ("e4m3", "float8_e4m3fn"), "e4m3")
    shared.check(raw, "scale_fmt", (None, "float", "ue8m0"))
    return Fp8(
        block=shared.block_of(raw, "weight_block_size") if has_blocks else None,
        ignored=(*shared.names(raw, "modules_to_not_convert"), shared.OUTPUT),
    )

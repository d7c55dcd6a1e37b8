"""compressed-tensors: whole numbers or fp8 with scales, packed into words or not.

Activations keep their dtype, also if the config quantises them, but with ``quantization`` "w8a8".
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np

from jspec.checkpoints.quantised import format as shared
from jspec.checkpoints.quantised.format import SCALES, Expected, Format
from jspec.checkpoints.quantised.stored import NIBBLES, Rows, StoredTensor, nibbles
from jspec.util.messages import shown

METHODS = ("compressed-tensors",)
_FORMATS = ("pack-quantized", "int-quantized", "float-quantized", "naive-quantized")


@dataclasses.dataclass(frozen=True)
class CompressedTensors(Format):
    """One config group; ``block`` is that of the strategy "block", (out, in)."""

    bits: int
    is_float: bool
    packed: bool
    strategy: str
    group_size: int = -1
    symmetric: bool = True
    act_order: bool = False  # Each input has a group number.
    block: tuple[int, int] | None = None
    ignored: tuple[str, ...] = ()
    asks_for_rows: bool = False  # Activations have 8 bits, and scales by token.
    by_token: bool = False

    def quantising_rows(self) -> Format:
        """See ``Format``."""
        is_whole = self.bits == 8 and not self.packed and self.strategy in ("channel", "tensor")
        if not (self.asks_for_rows and is_whole):
            return super().quantising_rows()
        return dataclasses.replace(self, by_token=True)

    def expected(self, module: str, shape: tuple[int, ...]) -> Expected:
        """See ``Format``."""
        outputs, inputs = shape
        count, kind = 32 // self.bits, "float8_e4m3fn" if self.is_float else "int8"
        groups = shared.groups_of(inputs, self.group_size, module)
        scales: tuple = ((outputs, groups),)
        if self.strategy == "tensor":
            scales = (1,), (), (1, 1)
        if self.block is not None:
            groups = shared.groups_of(inputs, self.block[1], module)
            scales = ((-(-outputs // self.block[0]), groups),)
        result: Expected = {f"{module}.weight_scale": (scales, SCALES)}
        if not self.packed:
            return {f"{module}.weight": ((shape,), (kind,))} | result
        words = -(-inputs // count)
        result[f"{module}.weight_packed"] = ((outputs, words),), ("int32",)
        result[f"{module}.weight_shape"] = ((2,),), ("int64", "int32")
        if not self.symmetric:
            words = -(-outputs // count)
            result[f"{module}.weight_zero_point"] = ((words, groups),), ("int32",)
        if self.act_order:
            result[f"{module}.weight_g_idx"] = ((inputs,),), ("int32", "int64")
        return result

    def stored(
        self, module: str, shape: tuple[int, ...], tensors: Mapping[str, np.ndarray]
    ) -> StoredTensor:
        """See ``Format``."""
        scale = tensors[f"{module}.weight_scale"]
        if self.block is not None:
            scale = shared.repeated(scale, shape[0], self.block[0])
        elif self.strategy == "tensor":
            scale = np.broadcast_to(scale.reshape(1, 1), (shape[0], 1))
        if not self.packed:
            arrays = {"values": tensors[f"{module}.weight"], "scales": scale}
            return StoredTensor(shape, arrays, by_token=self.by_token)
        words, bits, order = tensors[f"{module}.weight_packed"], self.bits, None
        kind = NIBBLES["int4"] if bits == 4 else np.dtype(np.int8)
        half = 1 << (bits - 1)
        if self.act_order:
            name = f"{module}.weight_g_idx"
            order = shared.order_of(name, tensors[name], shape[1], scale.shape[1])

        def values(rows: slice) -> np.ndarray:
            numbers = nibbles(np.ascontiguousarray(words[rows]), bits)[:, : shape[1]]
            numbers = numbers if order is None else numbers[:, order]
            return (numbers.astype(np.int16) - half).astype(kind)

        arrays = {"values": Rows(shape, kind, values), "scales": scale}
        if not self.symmetric:
            zeros = tensors[f"{module}.weight_zero_point"]

            def points(rows: slice) -> np.ndarray:
                numbers = nibbles(np.ascontiguousarray(zeros.T), bits).T[rows]
                return (numbers.astype(np.int16) - half).astype(np.int8)

            arrays["zeros"] = Rows((shape[0], zeros.shape[1]), np.dtype(np.int8), points)
        return StoredTensor(shape, arrays, order)


def read(raw: Mapping[str, Any]) -> CompressedTensors:
    """Return the format of a config."""
    groups = raw.get("config_groups")
    if not isinstance(groups, dict) or len(groups) != 1:
        raise ValueError(f"config_groups={shown(groups)} must have one group")
    (group,) = groups.values()
    weights = group.get("weights") if isinstance(group, dict) else None
    if not isinstance(weights, dict):
        raise ValueError(f"config_groups={shown(groups)} must have 'weights'")
    targets = shared.names(group, "targets")
    if targets != ("Linear",):
        raise ValueError(f"targets={shown(list(targets))} is not supported, only ['Linear']")
    kind = group.get("format") or raw.get("format")
    kind = shared.check({"format": kind}, "format", _FORMATS)
    is_float = shared.check(weights, "type", ("int", "float"), "int") == "float"
    packed = kind == "pack-quantized"
    bits = shared.check(weights, "num_bits", (8,) if is_float else (4, 8))
    strategies = ("tensor", "channel", "group", "block")
    strategy = shared.check(weights, "strategy", strategies, "tensor")
    symmetric = shared.check(weights, "symmetric", (True, False) if packed else (True,), True)
    order = shared.check(
        weights, "actorder", (None, False, True, "group", "weight", "static", "dynamic"), None
    )
    inputs = group.get("input_activations")
    wanted = {"type": weights.get("type", "int"), "num_bits": 8, "strategy": "token"}
    wanted |= {"dynamic": True, "symmetric": True}
    return CompressedTensors(
        asks_for_rows=isinstance(inputs, dict) and wanted.items() <= inputs.items(),
        bits=bits,
        is_float=is_float,
        packed=packed,
        strategy=strategy,
        group_size=shared.size_of_group(weights) if strategy == "group" else -1,
        symmetric=symmetric,
        act_order=order in (True, "group", "dynamic"),
        block=shared.block_of(weights, "block_structure") if strategy == "block" else None,
        ignored=shared.names(raw, "ignore"),
    )

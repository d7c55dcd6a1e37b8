"""Blocks of GGUF tensors as quantised weights: Q4_0, Q4_1, Q8_0, MXFP4, Q4_K and Q6_K.

``quantization="gguf"`` keeps these kinds; tensors of others are multiplied out when they are read.
ggml's docs of the layouts are ggml-common.h and ggml-quants.c of llama.cpp.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from jspec.checkpoints.gguf_files import GgufTensor
from jspec.checkpoints.gguf_tensors import Alternating, Columns, Gathered
from jspec.checkpoints.quantised.stored import NIBBLES, Rows, StoredTensor

_HALF = np.dtype(np.float16)


class _Array(NamedTuple):
    """An array of a kind: numbers of a block, their dtype, and their place in blocks [n, bytes]."""

    count: int
    dtype: np.dtype
    read: Callable[[np.ndarray], np.ndarray]


def _half(begin: int, sign: int = 1) -> _Array:
    """Return a float16 of each block, at a byte."""
    return _Array(1, _HALF, lambda blocks: sign * blocks[:, begin : begin + 2].copy().view(_HALF))


def _nibbles(blocks: np.ndarray, run: int) -> np.ndarray:
    """Return half-bytes: of each run of bytes the low ones, and then the high ones."""
    bytes_ = blocks.reshape(len(blocks), -1, 1, run)
    return (bytes_ >> np.array([[0], [4]], np.uint8) & 15).reshape(len(blocks), -1)


def _signed(values: np.ndarray, half: int, dtype: Any) -> np.ndarray:
    return (values.astype(np.int8) - half).astype(dtype)


def _six_bits(blocks: np.ndarray, *, minima: bool) -> np.ndarray:
    """Return the 8 scales or minima of Q4_K, of which the last 4 have their bits in two bytes."""
    first, second, rest = (blocks[:, begin : begin + 4] for begin in (4, 8, 12))
    if minima:
        return np.concatenate([second & 63, rest >> 4 | second >> 2 & 48], 1)
    return np.concatenate([first & 63, rest & 15 | first >> 2 & 48], 1)


def _q6_k(blocks: np.ndarray) -> np.ndarray:
    low = _nibbles(blocks[:, :128], 64).reshape(len(blocks), 2, 4, 32)
    high = blocks[:, 128:192].reshape(len(blocks), 2, 1, 32)
    high = high >> np.array([[0], [2], [4], [6]], np.uint8) & 3
    return _signed((low | high << 4).reshape(len(blocks), -1), 32, np.int8)


_INT4, _UINT4, _FLOAT4 = (NIBBLES[name] for name in ("int4", "uint4", "float4_e2m1fn"))
_POWER = np.dtype(ml_dtypes.float8_e8m0fnu)
_INT8, _UINT8 = np.dtype(np.int8), np.dtype(np.uint8)
KINDS: Mapping[str, Mapping[str, _Array]] = {
    "Q8_0": {
        "values": _Array(32, _INT8, lambda blocks: blocks[:, 2:].copy().view(_INT8)),
        "scales": _half(0),
    },
    "Q4_0": {
        "values": _Array(32, _INT4, lambda x: _signed(_nibbles(x[:, 2:], 16), 8, _INT4)),
        "scales": _half(0),
    },
    "Q4_1": {
        "values": _Array(32, _UINT4, lambda x: _nibbles(x[:, 4:], 16).astype(_UINT4)),
        "scales": _half(0),
        "minima": _half(2),
    },
    "MXFP4": {
        "values": _Array(32, _FLOAT4, lambda x: _nibbles(x[:, 1:], 16).view(_FLOAT4)),
        "scales": _Array(1, _POWER, lambda blocks: blocks[:, :1].copy().view(_POWER)),
    },
    "Q4_K": {
        "values": _Array(256, _UINT4, lambda x: _nibbles(x[:, 16:], 32).astype(_UINT4)),
        "scales": _Array(8, _UINT8, lambda blocks: _six_bits(blocks, minima=False)),
        "outer_scales": _half(0),
        "minima": _Array(8, _UINT8, lambda blocks: _six_bits(blocks, minima=True)),
        "outer_minima": _half(2, sign=-1),
    },
    "Q6_K": {
        "values": _Array(256, _INT8, _q6_k),
        "scales": _Array(16, _INT8, lambda blocks: blocks[:, 192:208].copy().view(_INT8)),
        "outer_scales": _half(208),
    },
}


def opened(tensors: Mapping[str, Any]) -> dict[str, Any]:
    """Return tensors with those of the kinds above as ``StoredTensor``."""
    return {name: _stored(tensor) for name, tensor in tensors.items()}


def _stored(tensor: Any) -> Any:
    if isinstance(tensor, Alternating | Gathered):
        return _of_parts(tensor)
    if isinstance(tensor, Columns):
        stored = _stored(tensor.matrix)
        is_kept = isinstance(stored, StoredTensor)
        return dataclasses.replace(stored, order=np.argsort(tensor.order)) if is_kept else tensor
    arrays = KINDS.get(tensor.kind.name) if isinstance(tensor, GgufTensor) else None
    if arrays is None or len(tensor.shape) < 2 or tensor.offset:
        return tensor
    blocks = tensor.shape[-1] // arrays["values"].count
    made = {
        name: Rows((*tensor.shape[:-1], blocks * array.count), array.dtype, _reader(tensor, array))
        for name, array in arrays.items()
    }
    return StoredTensor(tensor.shape, made)


def _of_parts(tensor: Alternating | Gathered) -> Any:
    """Return a tensor of others as a quantised one, if all of them have one form."""
    stored = [_stored(part) for part in tensor.parts]
    if not all(isinstance(part, StoredTensor) for part in stored):
        return tensor
    if len({part.form for part in stored}) > 1:
        return tensor
    arrays = {
        name: dataclasses.replace(tensor, parts=tuple(part.arrays[name] for part in stored))
        for name in stored[0].arrays
    }
    return StoredTensor(tensor.shape, arrays)


def _reader(tensor: GgufTensor, array: _Array) -> Callable[..., np.ndarray]:
    def read(*rows: Any) -> np.ndarray:
        index = rows if tensor.order is None else (tensor.order[rows[0]], *rows[1:])
        stored = np.ascontiguousarray(tensor.data[index])
        size = tensor.shape[-1] // KINDS[tensor.kind.name]["values"].count
        numbers = array.read(stored.reshape(-1, stored.shape[-1] // size))
        return numbers.reshape(*stored.shape[:-1], -1).astype(array.dtype, copy=False)

    return read

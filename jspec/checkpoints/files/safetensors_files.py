"""Reading and writing ``.safetensors`` files: an 8-byte length, a JSON header, raw tensors.

This reader maps every dtype to NumPy without torch (bfloat16 and float8 through ml_dtypes), loads
only the pages that are read, and names the fault of a damaged file.
"""

import json
import math
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

import ml_dtypes
import numpy as np

from jspec.util import values
from jspec.util.messages import printable, shown

_WIDTHS = ("8", "16", "32", "64")
DTYPES = {
    "BOOL": np.dtype(np.bool_),
    **{f"U{bits}": np.dtype(f"uint{bits}") for bits in _WIDTHS},
    **{f"I{bits}": np.dtype(f"int{bits}") for bits in _WIDTHS},
    **{f"F{bits}": np.dtype(f"float{bits}") for bits in _WIDTHS[1:]},
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
    "F8_E8M0": np.dtype(ml_dtypes.float8_e8m0fnu),
}
_CODES = {dtype: code for code, dtype in DTYPES.items()}
_PREFIX = 8  # bytes of the header's length, little endian
_MAX_HEADER = 100_000_000  # the format's own limit
_MOST_DIMENSIONS = 32  # NumPy's limit, before 2.0

Layout = Iterable[tuple[str, tuple[int, ...], np.dtype]]  # name, shape and dtype, in file order


class _Corrupt(ValueError):
    """The fault of a damaged file."""


def read(path: str | Path) -> dict[str, np.ndarray]:
    """Return the tensors of a file as read-only views of the mapped file, without copies.

    Raises:
      ValueError: the file is missing, truncated or corrupt.
    """
    path = Path(path)
    if not os.path.isfile(path):
        raise ValueError(f"{path} {'is no file' if os.path.exists(path) else 'does not exist'}")
    try:
        header, data = _split(path)
        header.pop("__metadata__", None)
        tensors = {name: _view(name, entry, data) for name, entry in header.items()}
        _check_cover(header, data.size)
    except _Corrupt as error:
        raise ValueError(
            f"{path} is not a whole safetensors file: {error}; download or save it again"
        ) from None
    return tensors


def write(path: str | Path, layout: Layout, tensors: Iterator[np.ndarray]) -> None:
    """Write ``tensors`` in the order of ``layout``, one at a time.

    Raises:
      ValueError: a tensor differs from its place in the layout, or a dtype has no code.
    """
    layout = list(layout)
    header, offset = {"__metadata__": {"format": "pt"}}, 0  # `transformers` insists on the format
    for name, shape, dtype in layout:
        size = math.prod(shape) * dtype.itemsize
        if dtype not in _CODES:
            raise ValueError(f"tensor {name} is {dtype}, which a safetensors file cannot hold")
        offsets = [offset, offset + size]
        header[name] = {"dtype": _CODES[dtype], "shape": list(shape), "data_offsets": offsets}
        offset += size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # the tensors start aligned
    with open(path, "wb") as file:
        file.write(len(text).to_bytes(_PREFIX, "little") + text)
        for (name, shape, dtype), tensor in zip(layout, tensors, strict=True):
            if tensor.shape != shape or tensor.dtype != dtype:
                raise ValueError(
                    f"tensor {name} is {tensor.dtype}{list(tensor.shape)}, "
                    f"its layout says {dtype}{list(shape)}"
                )
            file.write(np.ascontiguousarray(tensor).reshape(-1).view(np.uint8))


def _split(path: Path) -> tuple[dict, np.ndarray]:
    """Return the parsed header and the bytes after it."""
    size = path.stat().st_size
    if size < _PREFIX:
        raise _Corrupt(f"it holds {size} bytes, fewer than the {_PREFIX} of its first field")
    data = np.memmap(path, np.uint8, mode="r")
    length = int.from_bytes(data[:_PREFIX].tobytes(), "little")
    if length > min(size - _PREFIX, _MAX_HEADER):
        raise _Corrupt(f"its header claims {length} bytes, the file holds {size}")
    try:
        header = values.json_of(data[_PREFIX : _PREFIX + length].tobytes(), unique=True)
    except ValueError as error:
        raise _Corrupt(f"its header is not JSON ({shown(str(error))})") from None
    if not isinstance(header, dict):
        raise _Corrupt("its header is not a JSON object")
    return header, data[_PREFIX + length :]


def _view(name: str, entry: object, data: np.ndarray) -> np.ndarray:
    try:
        code, shape, (begin, end) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
        valid = all(type(n) is int and 0 <= n < 2**63 for n in (*shape, begin, end))
        valid = valid and len(shape) <= _MOST_DIMENSIONS and isinstance(code, str)
    except (TypeError, KeyError, ValueError):
        valid = False
    if not valid:
        raise _Corrupt(f"the header's entry of {printable(name)} is malformed: {shown(entry)}")
    if code not in DTYPES:
        raise _Corrupt(f"{printable(name)} has dtype {shown(code)}; known: {', '.join(DTYPES)}")
    name, dtype = printable(name), DTYPES[code]
    if end - begin != math.prod(shape) * dtype.itemsize:
        raise _Corrupt(f"{name} {code}{list(shape)} does not fill its {end - begin} bytes")
    if end > data.size:
        raise _Corrupt(
            f"it is truncated: {name} ends at byte {end} of the data, {data.size} are there"
        )
    try:
        return data[begin:end].view(dtype).reshape(shape)
    except ValueError as error:  # dimensions beyond NumPy's limits
        raise _Corrupt(f"{name} has the shape {list(shape)}: {error}") from None


def _check_cover(header: dict, size: int) -> None:
    """Check that the tensors are contiguous and end with the file, as the format requires."""
    position = 0
    for name, entry in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
        begin, end = entry["data_offsets"]
        if begin != position:
            fault = "overlaps its neighbour" if begin < position else "leaves a gap before it"
            raise _Corrupt(f"{printable(name)} at bytes {begin} to {end} {fault}")
        position = end
    if position != size:
        raise _Corrupt(f"{size - position} bytes follow its last tensor")

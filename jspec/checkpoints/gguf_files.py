"""GGUF files, the format of llama.cpp: weights, sizes and tokenizer of a model in one file.

The ``gguf`` package reads them. Weights are dequantised when they are read, a few rows at a time.
"""

import dataclasses
import functools
import math
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from jspec.checkpoints.files import model_files
from jspec.util.messages import first_line, printable, shown

_END = ".gguf"
_SPLIT = re.compile(r"(?P<stem>.*)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf", re.DOTALL)
_ON_HUB = re.compile(r"([\w-][\w.-]*/[\w-][\w.-]*)/(\S+\.gguf)")
_QUANT_ON_HUB = re.compile(r"([\w-][\w.-]*/[\w-][\w.-]*):([A-Za-z0-9_]+)")


@dataclasses.dataclass(frozen=True, eq=False)
class GgufTensor:
    """One tensor of a file; its numbers are dequantised when they are indexed.

    Attributes:
      data: the stored bytes, or floats; rows are on the first axis.
      kind: ggml's type of the tensor, a member of ``gguf.GGMLQuantizationType``.
      shape: shape of the weights.
      order: the stored row of each row; None if they are the same.
      offset: number that is added to what is stored.
    """

    data: np.ndarray
    kind: Any
    shape: tuple[int, ...]
    order: np.ndarray | None = None
    offset: float = 0.0

    @property
    def dtype(self) -> np.dtype:
        """The dtype of rows that are read."""
        return np.dtype(np.float32)

    def __getitem__(self, index: Any) -> np.ndarray:
        """Return rows, or columns of them, of which whole blocks of a quantisation are read.

        The first of three axes, that of a stack, may have a number.
        """
        import gguf

        if self.offset:
            return dataclasses.replace(self, offset=0.0)[index] + np.float32(self.offset)
        index = index if isinstance(index, tuple) else (index,)
        rows, columns = index[: len(self.shape) - 1], index[len(self.shape) - 1 :]
        if self.order is not None:
            first, *rest = rows or columns
            rows, columns = (self.order[first], *rest), columns if rows else ()
        stored = self.data[rows]
        if not columns:
            return gguf.dequantize(np.ascontiguousarray(stored), self.kind)
        begin, end, _ = columns[0].indices(self.shape[-1])
        block = gguf.GGML_QUANT_SIZES[self.kind][0]
        unit = stored.shape[-1] * block // self.shape[-1]  # stored numbers of a block
        first, last = begin // block, -(-end // block)
        blocks = np.ascontiguousarray(stored[..., first * unit : last * unit])
        return gguf.dequantize(blocks, self.kind)[..., begin - first * block : end - first * block]


@dataclasses.dataclass(frozen=True, eq=False)
class GgufFile:
    """The metadata and the tensors of a file, or of all files of a split one."""

    path: Path
    metadata: Mapping[str, Any]
    tensors: Mapping[str, GgufTensor]

    def get(self, key: str, default: Any = None) -> Any:
        """Return the value under ``key``, or under ``{arch}.`` and the key, or the default."""
        if "{arch}" in key:
            key = key.format(arch=self.metadata.get("general.architecture"))
        return self.metadata.get(key, default)

    @property
    def dtype(self) -> str:
        """Name of the dtype to hold the weights in: that of floats, bfloat16 for quantised ones."""
        kinds = {tensor.kind.name for tensor in self.tensors.values() if len(tensor.shape) > 1}
        stored = {"F32": "float32", "F16": "float16"}
        return stored.get(kinds.pop(), "bfloat16") if len(kinds) == 1 else "bfloat16"


def find(path: model_files.PathLike) -> Path | None:
    """Return the GGUF file that ``path`` names, fetched from the hub if need be; None if none.

    ``path`` is a file, a directory whose weights are one GGUF file, or on the hub
    ``owner/name/file.gguf`` or ``owner/name:Q4_K_M``. Of a split file, it is any part.

    Raises:
      ValueError: there is no such file, or the directory has several.
    """
    name = str(path)
    if os.path.isdir(name):
        return _only_file(Path(name))
    if name.endswith(_END) and os.path.isfile(name):
        return _parts(Path(name))[0]
    if os.path.exists(name):
        return None
    if match := _ON_HUB.fullmatch(name):
        files = [str(part) for part in _parts(Path(match[2]))]
        return model_files.fetch(match[1], files) / files[0]
    if match := _QUANT_ON_HUB.fullmatch(name):
        return _only_file(model_files.fetch(match[1], [f"*{match[2]}*{_END}"]), match[2])
    if name.endswith(_END):
        raise ValueError(
            f"model {shown(name)} does not exist; give a GGUF file, or one on the hub as "
            "owner/name/file.gguf"
        )
    return None


def _only_file(directory: Path, quant: str = "") -> Path | None:
    """Return the one GGUF file of a directory without other weights."""
    others = any((directory / name).is_file() for name in model_files.READERS)
    if not quant and (others or any(directory.glob("*.safetensors"))):
        return None
    files = sorted(directory.rglob(f"*{quant}*{_END}") if quant else directory.glob(f"*{_END}"))
    firsts = [file for file in files if not (m := _SPLIT.fullmatch(str(file))) or int(m[2]) == 1]
    if quant and not firsts:
        raise ValueError(f"{directory} has no GGUF file of {quant}; name another quantisation")
    if len(firsts) > 1:
        names = ", ".join(printable(str(file.relative_to(directory))) for file in firsts[:10])
        raise ValueError(f"{directory} has several GGUF files ({names}); give one of them")
    return firsts[0] if firsts else None


def _parts(file: Path) -> list[Path]:
    """Return the files of a split model, by the name of one of them."""
    match = _SPLIT.fullmatch(str(file))
    if match is None:
        return [file]
    end = f"-of-{match['count']}{_END}"
    numbers = range(1, max(int(match["count"]), 1) + 1)
    return [Path(f"{match['stem']}-{number:05d}{end}") for number in numbers]


def open_file(path: Path) -> GgufFile:
    """Read the metadata of a GGUF file, and find the tensors in it and in its other parts.

    Raises:
      ValueError: it is damaged or cut short, parts are missing, or a quantisation is not supported.
    """
    parts = _parts(path)
    missing = [part.name for part in parts if not part.is_file()]
    if missing:
        raise ValueError(f"{path} lacks its other parts {', '.join(missing[:10])}; fetch them")
    stats = [part.stat() for part in parts]
    return _open(tuple(parts), tuple((stat.st_size, stat.st_mtime_ns) for stat in stats))


@functools.lru_cache(maxsize=2)  # reading the vocabulary takes seconds
def _open(parts: tuple[Path, ...], _: tuple) -> GgufFile:
    path = parts[0]
    metadata, tensors = _read(path)
    count = metadata.get("split.count") or 1
    if count != len(parts):
        raise ValueError(
            f"{path} is one of {count} files; name them NAME-00001-of-{count:05d}.gguf"
        )
    for part in parts[1:]:
        tensors |= _read(part)[1]
    expected = metadata.get("split.tensors.count", len(tensors))
    if expected != len(tensors):
        raise ValueError(
            f"{path} and its parts have {len(tensors)} of {expected} tensors; fetch them again"
        )
    unknown = sorted(kind.name for kind in {t.kind for t in tensors.values()} if not _known(kind))
    if unknown:
        raise ValueError(
            f"{path} holds tensors of type {', '.join(unknown)}, which the gguf package does not "
            "dequantise; take a file in another quantisation, such as Q4_K_M or Q8_0"
        )
    return GgufFile(path, metadata, tensors)


def _known(kind: Any) -> bool:
    import gguf

    _, size = gguf.GGML_QUANT_SIZES[kind]
    try:
        gguf.dequantize(np.zeros((1, size), np.uint8), kind)
    except NotImplementedError:
        return False
    return True


def _read(path: Path) -> tuple[dict[str, Any], dict[str, GgufTensor]]:
    reader = _reader(path)
    try:
        metadata = {name: field.contents() for name, field in reader.fields.items()}
    except Exception as error:  # bytes that are no UTF-8, ...
        raise _damaged(path, error) from None
    tensors = {}
    for tensor in reader.tensors:
        shape = tuple(int(size) for size in reversed(tensor.shape))
        if math.prod(shape) == 0:
            raise ValueError(f"{path} has a tensor {printable(tensor.name)} without elements")
        tensors[tensor.name] = GgufTensor(tensor.data, tensor.tensor_type, shape)
    return metadata, tensors


def _reader(path: Path) -> Any:
    try:
        import gguf
    except ModuleNotFoundError:
        raise ValueError(
            f"{path} is a GGUF file; install the package that reads it: "
            "pip install 'jspec-decoding[gguf]'"
        ) from None
    try:
        return gguf.GGUFReader(path)
    except Exception as error:  # the package raises IndexError, KeyError, ValueError, ...
        raise _damaged(path, error) from None


def _damaged(path: Path, error: Exception) -> ValueError:
    return ValueError(f"{path} is not a whole GGUF file ({first_line(error)}); download it again")

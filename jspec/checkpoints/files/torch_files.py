"""Reading and writing the ``.bin`` and ``.pt`` files of torch, without torch.

A file is an uncompressed zip archive. ``data.pkl`` is a pickle of a dict that names the tensors;
``data/0``, ``data/1``, … hold their numbers. A pickle is a program, and unpickling it runs
arbitrary code. This module unpickles nothing: ``_Machine`` interprets the few instructions that a
dict of tensors needs, calls and imports nothing, and refuses the rest.

Files from torch before version 1.6 are no zip archives and raise.
"""

import io
import math
import os
import pickletools
import struct
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from jspec.util.messages import shown

_STORAGES = {
    "FloatStorage": np.dtype(np.float32),
    "HalfStorage": np.dtype(np.float16),
    "BFloat16Storage": np.dtype(ml_dtypes.bfloat16),
    "DoubleStorage": np.dtype(np.float64),
    "LongStorage": np.dtype(np.int64),
    "IntStorage": np.dtype(np.int32),
    "ShortStorage": np.dtype(np.int16),
    "CharStorage": np.dtype(np.int8),
    "ByteStorage": np.dtype(np.uint8),
    "BoolStorage": np.dtype(np.bool_),
}
_STORAGE_OF = {dtype: name for name, dtype in _STORAGES.items()}
_ORDERED_DICT = "collections OrderedDict"
_TENSOR, _PARAMETER = "torch._utils _rebuild_tensor_v2", "torch._utils _rebuild_parameter"
# zipfile raises more types for damaged archives than it documents.
_BAD_ZIP = (zipfile.BadZipFile, NotImplementedError, OSError, EOFError, struct.error, ValueError)
_MOST_INSTRUCTIONS = 1_000_000  # a tensor needs 20
_MOST_DIMENSIONS = 32
_MOST_REPEATED = 1 << 20  # elements of a tensor that is larger than its storage


def read(path: str | Path) -> dict[str, np.ndarray]:
    """Return the tensors of a file as read-only views of the mapped file, without copies.

    Raises:
      ValueError: the file is missing, truncated or corrupt, older than torch 1.6, or holds anything
        but a dict of tensors.
    """
    path = Path(path)
    if not os.path.isfile(path):
        raise ValueError(f"{path} does not exist")
    try:
        with zipfile.ZipFile(path) as archive:
            records = _Records(path, archive)
            return _Machine(records).run(records.program())
    except _Refused as error:
        raise ValueError(
            f"{path} is not a plain dict of tensors as torch saves it: {error}; nothing of it was "
            "run. Save the tensors alone, best as safetensors"
        ) from None
    except _BAD_ZIP as error:
        raise ValueError(
            f"{path} is not a whole file of torch 1.6 or later ({str(error)[:200]}); download it "
            "again, or load it with torch and save it as safetensors"
        ) from None


def write(path: str | Path, tensors: Mapping[str, np.ndarray]) -> None:
    """Write tensors as ``torch.save`` does; raise ValueError for a dtype that torch lacks."""
    root = Path(path).stem
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as archive:
        archive.writestr(f"{root}/data.pkl", _program(tensors))
        archive.writestr(f"{root}/byteorder", "little")
        for index, tensor in enumerate(tensors.values()):
            archive.writestr(f"{root}/data/{index}", np.ascontiguousarray(tensor).tobytes())
        archive.writestr(f"{root}/version", "3\n")


class _Refused(ValueError):
    """The reason why a file is not one of tensors alone."""


class _Records:
    """The records of an archive, by their names in its one folder."""

    def __init__(self, path: Path, archive: zipfile.ZipFile):
        self.data = np.memmap(path, np.uint8, mode="r")
        self.infos = {info.filename: info for info in archive.infolist()}
        programs = [name for name in self.infos if name.split("/")[1:] == ["data.pkl"]]
        if len(programs) != 1:
            raise _Refused("it is a zip archive without a data.pkl of torch")
        self.root = programs[0].removesuffix("data.pkl")
        if self.has("byteorder") and self.bytes("byteorder").tobytes() != b"little":
            raise _Refused("its numbers are not little endian")

    def program(self) -> bytes:
        return self.bytes("data.pkl").tobytes()

    def has(self, name: str) -> bool:
        return self.root + name in self.infos

    def bytes(self, name: str) -> np.ndarray:
        """Return a view of a record's bytes."""
        if not self.has(name):
            raise _Refused(f"it lacks the record {shown(name)}")
        info = self.infos[self.root + name]
        header = self.data[info.header_offset : info.header_offset + 30].tobytes()
        if len(header) < 30 or header[:4] != b"PK\x03\x04" or info.compress_type != 0:
            raise _Refused(f"its record {shown(name)} is compressed or damaged")
        start = info.header_offset + 30 + sum(struct.unpack("<HH", header[26:]))
        if not 0 <= start <= start + info.file_size <= self.data.size:
            raise _Refused(f"it is truncated within the record {shown(name)}")
        return self.data[start : start + info.file_size]


class _Global(NamedTuple):
    """The name of an object that the pickle imports; it is never imported."""

    name: str


class _Storage(NamedTuple):
    numbers: np.ndarray


_MARK = object()


class _Machine:
    """An interpreter of the pickle instructions that build a dict of tensors."""

    def __init__(self, records: _Records):
        self.records = records
        self.stack: list[Any] = []
        self.memo: dict[int, Any] = {}

    def run(self, program: bytes) -> dict[str, np.ndarray]:
        """Return the dict that ``program`` builds."""
        try:
            for count, (opcode, argument, _) in enumerate(pickletools.genops(program)):
                if count > _MOST_INSTRUCTIONS:
                    raise _Refused("its pickle is too long")
                self.step(opcode.name, argument)
            (result,) = self.stack
        # Errors of pickletools and Python for a malformed program.
        except _Refused:
            raise
        except (LookupError, TypeError, AttributeError, ValueError, OverflowError) as error:
            raise _Refused(f"its pickle is damaged ({str(error)[:200]})") from None
        return self.checked(result)

    def step(self, opcode: str, argument: Any) -> None:
        """Run one instruction, by its name in ``pickletools``."""
        push = self.stack.append
        if opcode in _CONSTANTS:
            push(_CONSTANTS[opcode]())
        elif opcode in _LITERALS:
            push(argument)
        elif opcode == "GLOBAL":
            push(self.known(argument))
        elif opcode == "STACK_GLOBAL":
            attribute, module = self.text(self.stack.pop()), self.text(self.stack.pop())
            push(self.known(f"{module} {attribute}"))
        elif opcode in ("BINPUT", "LONG_BINPUT", "PUT"):
            self.memo[argument] = self.stack[-1]
        elif opcode == "MEMOIZE":
            self.memo[len(self.memo)] = self.stack[-1]
        elif opcode in ("BINGET", "LONG_BINGET", "GET"):
            push(self.memo[argument])
        elif opcode in ("TUPLE1", "TUPLE2", "TUPLE3"):
            push(tuple([self.stack.pop() for _ in range(int(opcode[-1]))][::-1]))
        elif opcode == "TUPLE":
            push(tuple(self.above_mark()))
        elif opcode in ("SETITEM", "SETITEMS"):
            self.set_items(opcode)
        elif opcode == "BINPERSID":
            push(self.storage(self.stack.pop()))
        elif opcode == "REDUCE":
            arguments, function = self.stack.pop(), self.stack.pop()
            push(self.rebuild(function, arguments))
        elif opcode == "BUILD":
            self.drop_attributes()
        elif opcode not in ("PROTO", "FRAME", "STOP"):
            raise _Refused(f"its pickle has the instruction {opcode}")

    def known(self, name: str) -> _Global:
        module, _, attribute = name.partition(" ")
        if name in (_ORDERED_DICT, _TENSOR, _PARAMETER):
            return _Global(name)
        if module == "torch" and attribute in _STORAGES:
            return _Global(attribute)
        raise _Refused(f"it asks for {shown(name.replace(' ', '.'))[1:-1]}")

    def text(self, value: Any) -> str:
        """Return a name; other values, such as nested tuples, may be too large to hash or print."""
        if not isinstance(value, str):
            raise _Refused(f"it has a {type(value).__name__} for a name")
        return value

    def above_mark(self) -> list[Any]:
        """Pop the values above the last mark."""
        mark = len(self.stack) - 1
        while self.stack[mark] is not _MARK:
            mark -= 1
        values = self.stack[mark + 1 :]
        del self.stack[mark:]
        return values

    def set_items(self, opcode: str) -> None:
        single = opcode == "SETITEM"
        pairs = [self.stack.pop(-2), self.stack.pop()] if single else self.above_mark()
        owner = self.stack[-1]
        if not isinstance(owner, dict):
            raise _Refused("its pickle sets items of something that is no dict")
        owner.update(zip(map(self.text, pairs[::2]), pairs[1::2], strict=True))

    def drop_attributes(self) -> None:
        """Drop ``_metadata`` of a state dict, the version numbers of modules."""
        self.stack.pop()
        if not isinstance(self.stack[-1], dict):
            raise _Refused("its pickle sets attributes of something that is no dict")

    def storage(self, identity: Any) -> _Storage:
        """Return the numbers of ("storage", type, record, device, count)."""
        kind, storage, key, _, count = identity
        types = [type(part) for part in (kind, storage, key, count)]
        if types != [str, _Global, str, int] or kind != "storage":
            raise _Refused("it asks for the persistent object of no storage")
        if storage.name not in _STORAGES:
            raise _Refused(f"it asks for a storage of type {storage.name}")
        raw, dtype = self.records.bytes(f"data/{key}"), _STORAGES[storage.name]
        if raw.size != count * dtype.itemsize:
            raise _Refused(f"its record data/{key} holds {raw.size} bytes, not {count} {dtype}")
        return _Storage(raw.view(dtype))

    def rebuild(self, function: Any, arguments: Any) -> Any:
        """Return the result of one of the three functions that may be called."""
        name = function.name if isinstance(function, _Global) else type(function).__name__
        if not isinstance(function, _Global) or type(arguments) is not tuple:
            raise _Refused(f"it calls {name}")
        if name == _ORDERED_DICT and arguments == ():
            return {}
        if name == _PARAMETER and arguments and isinstance(arguments[0], np.ndarray):
            return arguments[0]
        if name != _TENSOR or not arguments or not isinstance(arguments[0], _Storage):
            raise _Refused(f"it calls {name} with damaged arguments")
        (numbers,), offset, shape, strides = arguments[:4]
        if arguments[6:] not in ((), ({},)):
            raise _Refused("it holds a tensor with properties of its own")
        valid = type(shape) is type(strides) is tuple
        valid = valid and all(type(n) is int and 0 <= n < 2**63 for n in (offset, *shape, *strides))
        if not valid or len(shape) != len(strides) or len(shape) > _MOST_DIMENSIONS:
            raise _Refused("it has a tensor with an invalid shape or strides")
        last = offset + sum((n - 1) * step for n, step in zip(shape, strides, strict=True))
        if math.prod(shape) and last >= numbers.size:
            raise _Refused(f"it has a tensor {list(shape)} that reaches past its storage")
        if math.prod(shape) > max(numbers.size, _MOST_REPEATED):
            raise _Refused(f"it has a tensor {list(shape)} that repeats {numbers.size} numbers")
        steps = [step * numbers.itemsize for step in strides]
        return np.lib.stride_tricks.as_strided(numbers[offset:], shape, steps, writeable=False)

    def checked(self, result: Any) -> dict[str, np.ndarray]:
        """Check that ``result`` is a flat dict of tensors, and return it."""
        if not isinstance(result, dict):
            raise _Refused(f"it holds a {type(result).__name__}, not a dict of tensors")
        for name, tensor in result.items():
            if not isinstance(name, str) or not isinstance(tensor, np.ndarray):
                kind = type(tensor).__name__
                raise _Refused(f"its entry {shown(name, 40)} is a {kind}, not a tensor")
        return result


_CONSTANTS = {
    "MARK": lambda: _MARK,
    "NONE": lambda: None,
    "NEWTRUE": lambda: True,
    "NEWFALSE": lambda: False,
    "EMPTY_DICT": dict,
    "EMPTY_TUPLE": tuple,
}
_LITERALS = ("BININT", "BININT1", "BININT2", "LONG1", "BINUNICODE", "SHORT_BINUNICODE")


def _program(tensors: Mapping[str, np.ndarray]) -> bytes:
    """Return a pickle of protocol 2 that builds ``tensors`` from the records 0, 1, … ."""
    out = io.BytesIO()
    out.write(b"\x80\x02}(")  # protocol, empty dict, mark
    for index, (name, tensor) in enumerate(tensors.items()):
        if tensor.dtype not in _STORAGE_OF:
            raise ValueError(f"tensor {name} is {tensor.dtype}, which torch has no storage for")
        out.write(_text(name))
        out.write(b"c" + _TENSOR.replace(" ", "\n").encode() + b"\n((")  # function, two marks
        out.write(_text("storage"))
        out.write(f"ctorch\n{_STORAGE_OF[tensor.dtype]}\n".encode())
        out.write(_text(str(index)) + _text("cpu") + _number(tensor.size) + b"tQ")  # persistent id
        steps = [step // tensor.itemsize for step in np.empty(tensor.shape, tensor.dtype).strides]
        out.write(_number(0) + _numbers(tensor.shape) + _numbers(steps))
        out.write(b"\x89" + b"ccollections\nOrderedDict\n)R" + b"tR")  # no gradient, no hooks
    out.write(b"u.")  # set items, stop
    return out.getvalue()


def _text(text: str) -> bytes:
    raw = text.encode()
    return b"X" + struct.pack("<I", len(raw)) + raw


def _number(number: int) -> bytes:
    raw = number.to_bytes(number.bit_length() // 8 + 1, "little", signed=True)
    return b"\x8a" + struct.pack("<B", len(raw)) + raw


def _numbers(numbers: Any) -> bytes:
    return b"(" + b"".join(map(_number, numbers)) + b"t"

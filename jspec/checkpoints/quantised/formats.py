"""The formats of quantised checkpoints: a new one is a file here and its name in ``_MODULES``."""

from collections.abc import Iterator, Mapping
from typing import Any

import ml_dtypes
import numpy as np

from jspec.checkpoints.families.names import HEAD, Entry
from jspec.checkpoints.quantised import awq, compressed_tensors, fp8, gptq, mxfp4
from jspec.checkpoints.quantised.format import FLOATS, W8A8, Expected, Format
from jspec.util.messages import printable, shown

_MODULES = (fp8, compressed_tensors, awq, gptq, mxfp4)
METHODS = {name: module for module in _MODULES for name in module.METHODS}
KEYS = ("quantization_config", "compression_config")
_FLOATS = ("embedding", "router")  # The last fields of paths that are never quantised.
# Scales of caches in fp8, which store the numbers themselves here: weights do not depend on them.
_OF_CACHES = (".k_scale", ".v_scale")
_MOST = 20  # names in a message


def method_of(raw: Mapping[str, Any]) -> Any:
    """Return the ``quant_method`` of a config.json; None for weights that are not quantised."""
    config = _config(raw)
    return None if config is None else config.get("quant_method")


def of(raw: Mapping[str, Any], quantization: str | None = None) -> Format | None:
    """Return the format of a config.json; None for weights that are not quantised.

    Raises:
      ValueError: it is unknown, or has settings that are not supported; or ``quantization`` is
        "w8a8" and the config does not ask for it.
    """
    config = _config(raw)
    if config is None:
        return None
    method = config.get("quant_method")
    module = METHODS.get(method) if isinstance(method, str) else None
    if module is None:
        known = ", ".join(METHODS)
        raise ValueError(
            f"quantised weights (quant_method {shown(method)}) are not read; take a checkpoint in "
            f"bfloat16 or in one of {known}"
        )
    try:
        kind = module.read(config)
        return kind.quantising_rows() if quantization == W8A8 else kind
    except ValueError as error:
        raise ValueError(f"quantization_config of quant_method {method!r}: {error}") from None


def without(raw: Mapping[str, Any]) -> dict:
    """Return a config.json of floats."""
    return {key: value for key, value in raw.items() if key not in KEYS}


def _config(raw: Mapping[str, Any]) -> Mapping[str, Any] | None:
    given = [(key, raw[key]) for key in KEYS if raw.get(key) not in (None, {})]
    if not given:
        return None
    key, config = given[0]
    if not isinstance(config, dict):
        raise ValueError(f"{key}={shown(config)} must be an object")
    default = {"quant_method": "compressed-tensors"} if key == "compression_config" else {}
    return default | config


def opened(
    kind: Format | None, entries: tuple[Entry, ...], tensors: Mapping[str, Any], source: Any
) -> Mapping[str, Any]:
    """Return tensors by the names of entries, quantised ones as ``StoredTensor``.

    A tensor that the files have as floats is one of these.

    Raises:
      ValueError: quantised tensors are missing or misshapen (all listed), or a size of groups does
        not divide.
    """
    if kind is None:
        return tensors
    tensors = kind.named(tensors)
    result, faults = {key: x for key, x in tensors.items() if not key.endswith(_OF_CACHES)}, []
    for name, shape in _matrices(kind, entries):
        plain, module = tensors.get(name), _module(name)
        if plain is not None and plain.dtype.name in FLOATS:
            continue
        expected = kind.expected(module, shape)
        if name == HEAD and not expected.keys() & tensors.keys():
            continue
        wrong = list(_faults(expected, tensors))
        faults += wrong
        if wrong:
            continue
        keys = {*expected, *kind.optional(module)} & tensors.keys()
        result[name] = kind.stored(module, shape, {key: tensors[key] for key in keys})
        for key in keys - {name}:
            del result[key]
    if faults:
        rest = f", … and {len(faults) - _MOST} more" if len(faults) > _MOST else ""
        raise ValueError(
            f"the tensors of {source} do not fit its quantization_config: "
            f"{', '.join(faults[:_MOST])}{rest}"
        )
    return result


def outlined(kind: Format | None, entries: tuple[Entry, ...]) -> Mapping[str, Any]:
    """Return ``opened`` for files that need not be there, with zeros for numbers."""
    result = {}
    for name, shape in _matrices(kind, entries) if kind else ():
        module = _module(name)
        if kind.ignores(module):
            continue
        zeros = {
            key: np.broadcast_to(np.zeros((), _dtype(dtypes[0])), shapes[0])
            for key, (shapes, dtypes) in kind.expected(module, shape).items()
        }
        result[name] = kind.stored(module, shape, zeros)
    return result


def _matrices(kind: Format, entries: tuple[Entry, ...]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield names and shapes of the tensors that a format may quantise."""
    for entry in entries:
        if entry.float32 or len(entry.shapes[0]) < 2 or entry.path[-1] in _FLOATS:
            continue
        if entry.stack and kind.by_token:
            raise ValueError(f"quantization={W8A8!r} takes no experts; leave it out")
        for name, shape in zip(entry.names, entry.stored_shapes, strict=True):
            if len(shape) == kind.rank:
                yield name, shape


def _faults(expected: Expected, tensors: Mapping[str, Any]) -> Iterator[str]:
    for name, (shapes, dtypes) in expected.items():
        tensor = tensors.get(name)
        if tensor is None:
            yield f"{printable(name)} is missing"
        elif tensor.shape not in shapes or tensor.dtype.name not in dtypes:
            actual = f"{tensor.dtype}{list(tensor.shape)}"
            yield f"{printable(name)} is {actual}, not {dtypes[0]}{list(shapes[0])}"


def _module(name: str) -> str:
    return name.removesuffix(".weight")


def _dtype(name: str) -> np.dtype:
    return np.dtype(getattr(ml_dtypes, name, name))

"""Directories of model files: finding them, reading and writing their JSON and their tensors.

Checkpoints of whole models and of draft heads share this code. Functions raise ValueError for
files that are missing, damaged or out of reach, and for tensors that do not fit.
"""

import dataclasses
import itertools
import json
import os
import re
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from jspec.checkpoints.families.names import HARMLESS, Entry
from jspec.checkpoints.files import safetensors_files, torch_files
from jspec.models.decoder import DecoderConfig
from jspec.util import staging, values
from jspec.util.messages import first_line, printable, shown
from jspec.util.platforms import default_backend

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
SHARD = "model-{:05d}-of-{:05d}.safetensors"
ANY_WEIGHTS = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors(\.index\.json)?")
_DTYPES = ("float32", "bfloat16", "float16")
_MOST_JSON = 100_000_000  # bytes; 100 times the index of a thousand files
_MOST_NAMES = 100  # in one message
_SMALL_FILES = ("*.json", "*.jinja", "*.txt", "*.model")

_INDEX_END = ".index.json"
_ADAPTER = "adapter_config.json"
_NUMBERED = re.compile(r".*-\d{5}-of-(?P<count>\d{5})\.safetensors")

PathLike = str | Path
Reader = Callable[[Path], dict[str, np.ndarray]]

# Files of weights, or indices of several, and their readers, in order of preference: published
# directories often hold a .bin beside.
READERS: dict[str, Reader] = {
    WEIGHTS: safetensors_files.read,
    INDEX: safetensors_files.read,
    "pytorch_model.bin": torch_files.read,
    "pytorch_model.bin.index.json": torch_files.read,
}


def locate(path: PathLike, patterns: tuple[str, ...] = ()) -> Path:
    """Return the local directory of a checkpoint; the hub gives ``patterns`` and small files."""
    directory = Path(path)
    if path != "" and os.path.isdir(directory):  # Path.is_dir raises for names that are too long
        staging.finish_interrupted(directory, ANY_WEIGHTS)
        return directory
    if os.path.exists(directory) or not re.fullmatch(r"[\w-][\w.-]*(/[\w-][\w.-]*)?", str(path)):
        raise ValueError(
            f"model {shown(str(path))} is neither a directory nor an id on the hub; give a "
            "directory with config.json, or an id such as Qwen/Qwen3-0.6B"
        )
    return fetch(str(path), [*_SMALL_FILES, *patterns])


def fetch(repository: str, patterns: list[str]) -> Path:
    """Return the local directory of a repository on the hub, with the files of ``patterns``."""
    import huggingface_hub

    try:
        return Path(huggingface_hub.snapshot_download(repository, allow_patterns=patterns))
    except Exception as error:  # network, permissions, unknown id
        raise ValueError(
            f"model {shown(repository)} is not a local directory and cannot be fetched from the "
            f"hub ({first_line(error)}); check the name and the connection, log in with "
            "`hf auth login` if it is gated, or give a local directory"
        ) from None


def locate_weights(path: PathLike) -> Path:
    """Return ``locate`` with the files of weights that ``open_tensors`` reads, and no others."""
    directory = locate(path, (WEIGHTS,))  # and indices, which are small
    files = [file for file in READERS if os.path.isfile(directory / file)]
    if files and not files[0].endswith(_INDEX_END):
        return directory
    if files:
        return locate(path, tuple(sorted(set(_weight_map(directory / files[0]).values()))))
    directory = locate(path, ("pytorch_model.bin",))
    if os.path.isfile(directory / "pytorch_model.bin"):
        return directory
    return locate(path, ("*.safetensors",))


def stated_dtype(raw: dict) -> str | None:
    """Return the dtype that a config.json names, under its new or its old key."""
    stated = raw.get("dtype") or raw.get("torch_dtype")
    return stated and str(stated).removeprefix("torch.")


def known_dtype(dtype: Any) -> np.dtype:
    """Return a dtype by name or type; raise ValueError if it is not one for weights."""
    try:
        dtype = jnp.dtype(dtype)
    except TypeError:
        pass
    else:
        if dtype.name in _DTYPES:
            return dtype
    raise ValueError(
        f"dtype {shown(getattr(dtype, 'name', dtype))} is not supported; pass one of "
        f"{', '.join(_DTYPES)}"
    )


def working_dtype(weights_dtype: np.dtype) -> str:
    """Return the dtype of activations: float32 on a CPU, that of the weights elsewhere."""
    return "float32" if default_backend() == "cpu" else weights_dtype.name


def with_precision(config: DecoderConfig, weights_dtype: np.dtype) -> DecoderConfig:
    """Return the config with the working dtypes for weights of ``weights_dtype``."""
    working = working_dtype(weights_dtype)
    return dataclasses.replace(config, cache_dtype=working, activation_dtype=working)


def common_dtype(entries: tuple[Entry, ...], params: Any) -> np.dtype:
    """Return the one dtype of all weights; raise ValueError if there are several."""
    dtypes = {entry.pick(params).dtype for entry in entries if not entry.float32}
    if len(dtypes) > 1:
        names = ", ".join(sorted(dtype.name for dtype in dtypes))
        raise ValueError(f"params mix {names}; pass the dtype to save them in")
    return dtypes.pop()


def _is_float(tensor: Any) -> bool:
    return jnp.issubdtype(tensor.dtype, jnp.floating)


def read_json(path: Path) -> dict:
    """Return the JSON object in a file; raise ValueError if there is none."""
    if not os.path.isfile(path):  # excludes pipes, which would block
        inside = sorted(str(file.parent) for file in path.parent.glob(f"*/{path.name}"))
        remedy = f"; give {' or '.join(inside)}" if inside else ""
        reason = f"{path} does not exist; a checkpoint is a directory with {path.name}"
        raise ValueError(reason + remedy)
    if path.stat().st_size > _MOST_JSON:
        raise ValueError(f"{path} has more than {_MOST_JSON} bytes; download or save it again")
    try:
        content = values.json_of(path.read_text(encoding="utf-8-sig"))
    except ValueError as error:
        raise ValueError(f"{path} is not valid JSON ({error}); download or save it again") from None
    if not isinstance(content, dict):
        raise ValueError(f"{path} is not a JSON object; download or save it again")
    return content


def read_config(directory: Path) -> dict:
    """Return the config.json of a model; raise ValueError for an adapter of one."""
    if not (directory / "config.json").is_file() and (directory / _ADAPTER).is_file():
        base = read_json(directory / _ADAPTER).get("base_model_name_or_path")
        raise ValueError(
            f"{directory} is a LoRA adapter of {shown(base)}, not a model; merge it into that "
            "model and save the result (merge_and_unload and save_pretrained of peft)"
        )
    return read_json(directory / "config.json")


def open_tensors(directory: Path, readers: Mapping[str, Reader] = READERS) -> dict[str, np.ndarray]:
    """Return views of every tensor in the first files of ``readers`` that exist.

    Without any, those of the directory's safetensors files, whatever their names.
    """
    for file, read in readers.items():
        if os.path.isfile(directory / file):
            sharded = file.endswith(_INDEX_END)
            return _open_shards(directory, file, read) if sharded else read(directory / file)
    if files := sorted(directory.glob("*.safetensors")):
        return _open_unnamed(directory, files)
    raise ValueError(
        f"{directory} has none of {', '.join(readers)}; a checkpoint is a directory with "
        "config.json and one of these"
    )


def check_complete(directory: Path) -> None:
    """Raise ValueError if an index of ``open_tensors`` names files that are missing."""
    first = next((file for file in READERS if os.path.isfile(directory / file)), "")
    if first.endswith(_INDEX_END):
        _shards(directory, first)


def _shards(directory: Path, index: str) -> dict[str, str]:
    """Return the file of each tensor; raise ValueError if files are missing."""
    weight_map = _weight_map(directory / index)
    files = sorted(set(weight_map.values()))
    missing = [file for file in files if not os.path.isfile(directory / file)]
    if missing:
        raise ValueError(
            f"{directory} lacks {_some(missing)} of the {len(files)} files that {index} names; "
            "download or save it again"
        )
    return weight_map


def _open_shards(directory: Path, index: str, read: Reader) -> dict[str, np.ndarray]:
    """Return views of every tensor of the files that ``index`` names."""
    weight_map, tensors = _shards(directory, index), {}
    for file in sorted(set(weight_map.values())):
        for name, tensor in read(directory / file).items():
            # A tensor that the index places in another file is unexpected under this name.
            tensors[name if weight_map.get(name, file) == file else f"{file}:{name}"] = tensor
    return tensors


def _open_unnamed(directory: Path, files: list[Path]) -> dict[str, np.ndarray]:
    """Return views of the tensors of safetensors files that no index names."""
    tensors: dict[str, np.ndarray] = {}
    for file in files:
        if match := _NUMBERED.fullmatch(file.name):
            missing = int(match["count"]) - len(files)
            if missing > 0:
                raise ValueError(
                    f"{directory} lacks {missing} of the {int(match['count'])} files that "
                    f"{file.name} belongs to; download or save it again"
                )
        for name, tensor in safetensors_files.read(file).items():
            if name in tensors:
                names = ", ".join(printable(each.name) for each in files[:10])
                raise ValueError(
                    f"{directory} has several files with a tensor {printable(name)} ({names}); "
                    "keep the one to load, or add its index"
                )
            tensors[name] = tensor
    return tensors


def _weight_map(index: Path) -> dict[str, str]:
    """Return the file beside an index for each tensor."""
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not all(
        isinstance(file, str) and Path(file).name == file and file.isprintable()
        for file in weight_map.values()
    ):
        beside = "weight_map of names to files beside it"
        raise ValueError(f"{index} has no {beside}; download or save it again")
    return weight_map


def _some(names: list[str]) -> str:
    """Join names for a message; a hostile file may have thousands."""
    rest = f", … and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else ""
    return ", ".join(map(printable, names[:_MOST_NAMES])) + rest


def check_fit(
    source: PathLike,
    entries: tuple[Entry, ...],
    tensors: Mapping[str, np.ndarray],
    ignored: Collection[str] = (),
    wrong: tuple[str, ...] = (),
) -> None:
    """Raise one ValueError that lists every tensor that is missing, unexpected or misshapen.

    ``source`` is the name of the files in the error. ``ignored`` names are neither needed nor
    unexpected. ``wrong`` holds other complaints for the list.
    """
    pairs = (zip(entry.names, entry.stored_shapes, strict=True) for entry in entries)
    expected = dict(itertools.chain.from_iterable(pairs))
    missing = [name for name in expected if name not in tensors]
    known = {*expected, *ignored}
    extra = [name for name in tensors if name not in known and not name.endswith(HARMLESS)]
    misshapen = [
        f"{name} is {tensors[name].dtype}{list(tensors[name].shape)}, not {list(shape)}"
        for name, shape in expected.items()
        if name in tensors and (tensors[name].shape != shape or not _is_float(tensors[name]))
    ]
    faults = {"missing": missing, "unexpected": extra, "misshapen": [*misshapen, *wrong]}
    problems = [f"{len(names)} {fault}: {_some(names)}" for fault, names in faults.items() if names]
    if problems:
        hint = ""
        if any(name.split(".")[-2:] == ["fc", "weight"] for name in extra):
            hint = ". It looks like an EAGLE head; is method='eagle' or 'eagle3' meant?"
        if any(name.endswith("attention.wq.weight") for name in extra):
            hint = ". They have the names of Meta or Mistral; take the Hugging Face files"
        listed = "; ".join(problems)
        raise ValueError(f"the tensors of {source} do not fit its config.json: {listed}{hint}")


def write_json(path: Path, content: dict) -> None:
    """Write a JSON object with sorted keys."""
    path.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def check_params(entries: tuple[Entry, ...], params: Any) -> None:
    """Raise one ValueError that lists every array of ``params`` that does not fit its entry."""
    wrong = []
    for entry in entries:
        array = entry.pick(params)
        shape = None if array is None else array.shape
        if shape != entry.shape:
            wrong.append(f"{entry.label} is {shape}, not {entry.shape}")
    if wrong:
        raise ValueError(f"params do not fit config: {'; '.join(wrong)}")


def write_weights(
    directory: Path,
    entries: tuple[Entry, ...],
    params: Any,
    dtype: np.dtype,
    max_shard_bytes: int = 5 * 10**9,
    extra: Mapping[str, np.ndarray] | None = None,
) -> None:
    """Write safetensors files: one, or several with an index if it would be too large.

    The first file holds the ``extra`` tensors unchanged.
    """
    extra = extra or {}
    shards: list[list[Entry]] = [[]]
    room = max_shard_bytes - sum(tensor.nbytes for tensor in extra.values())
    for entry in entries:
        size = entry.size * entry.dtype(dtype).itemsize
        if shards[-1] and size > room:
            shards.append([])
            room = max_shard_bytes
        shards[-1].append(entry)
        room -= size
    if len(shards) == 1:
        return _write_shard(directory / WEIGHTS, shards[0], params, dtype, extra)
    weight_map = {}
    for number, shard in enumerate(shards, 1):
        file = SHARD.format(number, len(shards))
        more = extra if number == 1 else {}
        _write_shard(directory / file, shard, params, dtype, more)
        names = (*more, *(name for entry in shard for name in entry.names))
        weight_map |= dict.fromkeys(names, file)
    count = sum(each.size for each in (*entries, *extra.values()))
    size = sum(entry.size * entry.dtype(dtype).itemsize for entry in entries)
    size += sum(tensor.nbytes for tensor in extra.values())
    metadata = {"total_parameters": count, "total_size": size}
    return write_json(directory / INDEX, {"metadata": metadata, "weight_map": weight_map})


def _write_shard(path: Path, shard: list[Entry], params: Any, dtype: np.dtype, extra) -> None:
    layout = [(name, tensor.shape, tensor.dtype) for name, tensor in extra.items()]
    layout += [
        (name, shape, entry.dtype(dtype))
        for entry in shard
        for name, shape in zip(entry.names, entry.stored_shapes, strict=True)
    ]

    def pieces():
        yield from extra.values()
        for entry in shard:
            yield from entry.split(np.asarray(entry.pick(params)), dtype)

    safetensors_files.write(path, layout, pieces())

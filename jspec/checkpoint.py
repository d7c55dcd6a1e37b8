"""Checkpoints in the layout of Hugging Face ``transformers``: config.json and safetensors files.

``path`` is a local directory or the id of a model on the hub (fetched through huggingface_hub into
its cache). Loading lists everything that does not fit and raises once; saving replaces the old
files whole or not at all.
"""

import dataclasses
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jspec import ops, staging, tensor_files
from jspec.models import families
from jspec.models.decoder import DecoderConfig, DecoderParams
from jspec.models.families.names import EMBEDDING, HARMLESS, HEAD, Entry, assemble

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
SHARD = "model-{:05d}-of-{:05d}.safetensors"
_ANY_WEIGHTS = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors(\.index\.json)?")
_DTYPES = ("float32", "bfloat16", "float16")
_SMALL_FILES = ("*.json", "*.jinja", "*.txt", "*.model")
_VOCABULARIES = ("tokenizer.json", "tokenizer.model", "vocab.json", "tekken.json")

PathLike = str | Path


def load_config(path: PathLike) -> tuple[DecoderConfig, dict]:
    """The decoder that ``path``'s config.json describes, and config.json itself.

    Raises:
      ValueError: no such checkpoint, damaged JSON, or an architecture or setting not supported.
    """
    directory = locate(path, weights=False)
    raw = _read_json(directory / "config.json")
    config = _read_config(directory / "config.json", raw)
    return _with_precision(config, _known_dtype(_stated_dtype(raw) or "float32")), raw


def load_pretrained(path: PathLike, dtype: Any = None) -> tuple[DecoderConfig, DecoderParams, dict]:
    """Loads a checkpoint: the decoder's configuration, its weights, and the raw config.json.

    Args:
      path: a local directory or a hub id.
      dtype: float32, bfloat16 or float16; None takes what config.json says, else the file.

    Raises:
      ValueError: as ``load_config``; or tensors are missing, unexpected or misshapen (all listed).
    """
    directory = locate(path)
    raw = _read_json(directory / "config.json")
    config = _read_config(directory / "config.json", raw)
    entries = families.find(raw).table(config)
    tensors = _open_tensors(directory)
    _check_fit(directory, config, entries, tensors)
    dtype = _known_dtype(dtype or _stated_dtype(raw) or tensors[EMBEDDING].dtype)
    arrays = [jnp.asarray(entry.join(tensors, dtype)) for entry in entries]
    return _with_precision(config, dtype), assemble(entries, arrays, config.num_layers), raw


def save_pretrained(
    directory: PathLike,
    config: DecoderConfig,
    params: DecoderParams,
    raw_config: dict | None = None,
    dtype: Any = None,
    max_shard_bytes: int = 5 * 10**9,
) -> None:
    """Writes config.json and safetensors files, which ``transformers`` reads too.

    Other files of the directory (a tokenizer, say) stay. An interrupted call leaves the old
    checkpoint whole: everything is written aside, then takes effect in one rename.

    Args:
      directory: made if it does not exist.
      config: the decoder of ``params``.
      params: weights.
      raw_config: config.json to write; must describe ``config``. None makes one up (see
        ``hf_config``). Only its dtype is changed.
      dtype: float32, bfloat16 or float16; None keeps that of the weights, if they share one.
      max_shard_bytes: a larger model is cut into several files with an index.

    Raises:
      ValueError: ``raw_config`` describes another model, or ``params`` do not fit ``config``.
    """
    raw = dict(hf_config(config) if raw_config is None else raw_config)
    differing = families.different_fields(_read_config("raw_config", raw), config)
    if differing:
        raise ValueError(
            f"raw_config does not describe config: {', '.join(differing)} differ; "
            "pass raw_config=None to have one made up"
        )
    entries = families.find(raw).table(config)
    _check_params(entries, params)
    dtype = _known_dtype(dtype or _common_dtype(params))
    raw |= {"dtype": dtype.name, "torch_dtype": dtype.name}
    with staging.replace_files(directory, _ANY_WEIGHTS) as aside:
        _write_json(aside / "config.json", raw)
        _write_weights(aside, entries, params, dtype, max_shard_bytes)


def hf_config(config: DecoderConfig) -> dict:
    """A config.json for ``config``, of the first family that can express it; token ids are null.

    Raises:
      ValueError: no known architecture can express it.
    """
    return families.describe(config)


def load_tokenizer(path: PathLike):
    """The tokenizer of a checkpoint, through ``transformers.AutoTokenizer``.

    Raises:
      ValueError: there is none, or it cannot be read.
    """
    from transformers import AutoTokenizer  # takes a second to import, and weights need none of it

    directory = locate(path, weights=False)
    # Without any of these, transformers makes up an empty tokenizer for some architectures.
    if not any((directory / name).is_file() for name in _VOCABULARIES):
        raise ValueError(
            f"{directory} has no tokenizer (none of {', '.join(_VOCABULARIES)}); copy that of the "
            "original model, tokenizer_config.json included, or pass token ids"
        )
    try:
        return AutoTokenizer.from_pretrained(directory)
    except Exception as error:  # whatever transformers raises, its first line says it
        raise ValueError(
            f"transformers cannot read the tokenizer in {directory}: {_first_line(error)}; "
            "download or save it again"
        ) from None


def eos_token_ids(source: PathLike | dict) -> tuple[int, ...]:
    """Every token that ends a text, by config.json and generation_config.json together.

    ``source`` is a checkpoint's path, or a raw config.json alone.

    Raises:
      ValueError: an id is not a whole number.
    """
    configs = [source]
    if not isinstance(source, dict):
        directory = locate(source, weights=False)
        configs = [_read_json(directory / "config.json")]
        if (directory / "generation_config.json").is_file():
            configs.append(_read_json(directory / "generation_config.json"))
    family = families.find(configs[0])
    found: set[int] = set()
    for raw in (family.defaults | configs[0], *configs[1:]):
        ids = raw.get("eos_token_id")
        ids = [] if ids is None else ids if isinstance(ids, list) else [ids]
        if any(type(i) is not int or i < 0 for i in ids):
            raise ValueError(f"eos_token_id must be a token id or a list of them, got {ids}")
        found.update(ids)
    return tuple(sorted(found))


def locate(path: PathLike, weights: bool = True) -> Path:
    """The local directory of a checkpoint, fetched from the hub if ``path`` is no directory.

    Raises:
      ValueError: there is no such directory, and the hub has no such model or is out of reach.
    """
    directory = Path(path)
    if path != "" and directory.is_dir():
        staging.finish_interrupted(directory, _ANY_WEIGHTS)
        return directory
    if directory.exists() or not re.fullmatch(r"[\w-][\w.-]*(/[\w-][\w.-]*)?", str(path)):
        raise ValueError(
            f"model {str(path)!r} is neither a directory nor an id on the hub; give a directory "
            "with config.json, or an id such as Qwen/Qwen3-0.6B"
        )
    import huggingface_hub

    patterns = [*_SMALL_FILES, *(["*.safetensors"] if weights else [])]
    try:
        return Path(huggingface_hub.snapshot_download(str(path), allow_patterns=patterns))
    except Exception as error:  # network, permissions, unknown id: one line with the remedy
        raise ValueError(
            f"model {str(path)!r} is not a local directory and cannot be fetched from the hub "
            f"({_first_line(error)}); check the name and the connection, log in with "
            "`hf auth login` if it is gated, or give a local directory"
        ) from None


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip()}".splitlines()[0]


# Precision.


def _with_precision(config: DecoderConfig, weights_dtype: np.dtype) -> DecoderConfig:
    """On a CPU caches and activations stay float32; accelerators work in the weights' dtype."""
    working = "float32" if ops.default_backend() == "cpu" else weights_dtype.name
    return dataclasses.replace(config, cache_dtype=working, activation_dtype=working)


def _stated_dtype(raw: dict) -> str | None:
    stated = raw.get("dtype") or raw.get("torch_dtype")
    return stated and str(stated).removeprefix("torch.")


def _known_dtype(dtype: Any) -> np.dtype:
    try:
        dtype = jnp.dtype(dtype)
    except TypeError:
        pass
    else:
        if dtype.name in _DTYPES:
            return dtype
    raise ValueError(f"dtype {str(dtype)!r} is not supported; pass one of {', '.join(_DTYPES)}")


# Reading.


def _read_config(source: PathLike, raw: dict) -> DecoderConfig:
    try:
        return families.find(raw).read(raw)
    except ValueError as error:
        raise ValueError(f"{source}: {error}") from None


def _read_json(path: Path) -> dict:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(
            f"{path} does not exist; a checkpoint is a directory with {path.name}"
        ) from None
    except ValueError as error:
        raise ValueError(f"{path} is not valid JSON ({error}); download or save it again") from None
    if not isinstance(content, dict):
        raise ValueError(f"{path} is not a JSON object; download or save it again")
    return content


def _open_tensors(directory: Path) -> dict[str, np.ndarray]:
    """Views of every tensor of a checkpoint, single or sharded."""
    if (directory / WEIGHTS).is_file():
        return tensor_files.read(directory / WEIGHTS)
    if not (directory / INDEX).is_file():
        raise ValueError(
            f"{directory} has neither {WEIGHTS} nor {INDEX}; other formats are not read: "
            "save the model again with transformers' save_pretrained"
        )
    weight_map = _read_json(directory / INDEX).get("weight_map")
    plain = isinstance(weight_map, dict) and all(
        isinstance(file, str) and Path(file).name == file for file in weight_map.values()
    )
    if not plain:
        raise ValueError(f"{directory / INDEX} has no weight_map of names to files beside it")
    files = sorted(set(weight_map.values()))
    missing = [file for file in files if not (directory / file).is_file()]
    if missing:
        raise ValueError(
            f"{directory} lacks {', '.join(missing)} of the {len(files)} files that {INDEX} names; "
            "download or save it again"
        )
    tensors: dict[str, np.ndarray] = {}
    for file in files:
        for name, tensor in tensor_files.read(directory / file).items():
            # A tensor that the index places elsewhere shows up as unexpected under this name.
            tensors[name if weight_map.get(name, file) == file else f"{file}:{name}"] = tensor
    return tensors


def _check_fit(
    directory: Path, config: DecoderConfig, entries: tuple[Entry, ...], tensors: Mapping
) -> None:
    """Raises one error that lists every tensor that is missing, unexpected or misshapen."""
    wanted = {name: shape for entry in entries
              for name, shape in zip(entry.names, entry.shapes, strict=True)}  # fmt: skip
    missing = [name for name in wanted if name not in tensors]
    extra = [name for name in tensors if name not in wanted and not name.endswith(HARMLESS)]
    wrong = [
        f"{name} is {tensors[name].dtype}{list(tensors[name].shape)}, not {list(shape)}"
        for name, shape in wanted.items()
        if name in tensors and (tensors[name].shape != shape or not _is_float(tensors[name]))
    ]
    if config.tie_embeddings and HEAD in extra and EMBEDDING in tensors:
        extra.remove(HEAD)
        if not np.array_equal(tensors[HEAD], tensors[EMBEDDING]):
            wrong.append(f"{HEAD} differs from {EMBEDDING}, but tie_word_embeddings is true")
    problems = [
        f"{len(names)} {what}: {', '.join(names)}"
        for what, names in (("missing", missing), ("unexpected", extra), ("misshapen", wrong))
        if names
    ]
    if problems:
        raise ValueError(f"the tensors of {directory} do not fit its config.json: "
                         f"{'; '.join(problems)}")  # fmt: skip


def _is_float(tensor: np.ndarray) -> bool:
    return jnp.issubdtype(tensor.dtype, jnp.floating)


# Writing.


def _write_json(path: Path, content: dict) -> None:
    path.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def _check_params(entries: tuple[Entry, ...], params: DecoderParams) -> None:
    wrong = []
    for entry in entries:
        array = entry.pick(params)
        shape = None if array is None else array.shape
        if shape != entry.shape:
            where = "" if entry.layer is None else f"layers[{entry.layer}]."
            wrong.append(f"{where}{entry.field} is {shape}, not {entry.shape}")
    if wrong:
        raise ValueError(f"params do not fit config: {'; '.join(wrong)}")


def _common_dtype(params: DecoderParams) -> np.dtype:
    found = {leaf.dtype for leaf in jax.tree.leaves(params)}
    if len(found) > 1:
        names = ", ".join(sorted(dtype.name for dtype in found))
        raise ValueError(f"params mix {names}; pass the dtype to save them in")
    return found.pop()


def _write_weights(
    directory: Path,
    entries: tuple[Entry, ...],
    params: DecoderParams,
    dtype: np.dtype,
    max_shard_bytes: int,
) -> None:
    shards: list[list[Entry]] = [[]]
    room = max_shard_bytes
    for entry in entries:
        size = entry.size * dtype.itemsize
        if shards[-1] and size > room:
            shards.append([])
            room = max_shard_bytes
        shards[-1].append(entry)
        room -= size
    if len(shards) == 1:
        return _write_shard(directory / WEIGHTS, shards[0], params, dtype)
    weight_map = {}
    for number, shard in enumerate(shards, 1):
        file = SHARD.format(number, len(shards))
        _write_shard(directory / file, shard, params, dtype)
        weight_map |= {name: file for entry in shard for name in entry.names}
    count = sum(entry.size for entry in entries)
    metadata = {"total_parameters": count, "total_size": count * dtype.itemsize}
    return _write_json(directory / INDEX, {"metadata": metadata, "weight_map": weight_map})


def _write_shard(path: Path, shard: list[Entry], params: DecoderParams, dtype: np.dtype) -> None:
    layout = [(name, shape, dtype) for entry in shard
              for name, shape in zip(entry.names, entry.shapes, strict=True)]  # fmt: skip
    pieces = (piece for entry in shard
              for piece in entry.split(np.asarray(entry.pick(params)), dtype))  # fmt: skip
    tensor_files.write(path, layout, pieces)

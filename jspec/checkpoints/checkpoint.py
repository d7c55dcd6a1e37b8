"""Checkpoints in the layout of Hugging Face ``transformers``: config.json and safetensors files.

A reader that executes nothing reads files of torch (``pytorch_model.bin``) too. GGUF files are read
as if they held a config.json, and are dequantised.

``path`` is a local directory or a hub id, which huggingface_hub fetches into its cache. Loading
raises one error that lists everything that does not fit. An interrupted save leaves the old files
whole.
"""

import importlib.util
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from jax.sharding import Sharding

from jspec.checkpoints import (
    families,
    gguf_blocks,
    gguf_config,
    gguf_files,
    gguf_names,
    gguf_tokenizer,
)
from jspec.checkpoints.families import text_part
from jspec.checkpoints.families.names import (
    EMBEDDING,
    HEAD,
    as_stored,
    assemble,
    mtp_prefixes,
    shared_prefixes,
)
from jspec.checkpoints.files import model_files
from jspec.checkpoints.files.model_files import PathLike
from jspec.checkpoints.quantised import formats, on_the_fly, reading
from jspec.checkpoints.quantised.format import GGUF
from jspec.models.decoder import DecoderConfig, DecoderParams
from jspec.sharding.placement import Placement, as_placement
from jspec.util import staging
from jspec.util.messages import first_line, shown

Shardings = Callable[[tuple[str | int, ...]], Sharding | Placement]
_VOCABULARIES = ("tokenizer.json", "tokenizer.model", "vocab.json", "tekken.json")


def load_config(path: PathLike) -> tuple[DecoderConfig, dict]:
    """Return the decoder that ``path``'s config.json describes, and config.json itself.

    Raises:
      ValueError: no such checkpoint, damaged JSON, or an architecture or setting not supported.
    """
    source, raw = _raw_config(path)
    config = _read_config(source, raw)
    dtype = model_files.known_dtype(model_files.stated_dtype(raw) or "float32")
    return model_files.with_precision(config, dtype), raw


def outline(
    path: PathLike, dtype: Any = None, quantization: str | None = None
) -> tuple[DecoderConfig, DecoderParams, dict]:
    """Return ``load_pretrained`` with shapes and dtypes for weights, which need not be there.

    ``path`` may be that of a config.json too.
    """
    source, raw = _raw_config(path)
    method = GGUF if gguf_files.find(source) else formats.method_of(raw)
    scheme = on_the_fly.scheme_of(quantization, method)
    config = _read_config(source, raw)
    dtype = dtype or model_files.stated_dtype(raw) or _stored_dtype(source.parent)
    dtype = model_files.known_dtype(dtype)
    entries = families.find(raw).table(config)
    on_the_fly.check(entries, scheme)
    tensors = formats.outlined(formats.of(raw, quantization), entries)
    if quantization == GGUF:
        entries = gguf_names.stacked(entries)
        file = gguf_files.open_file(source)
        tensors = gguf_blocks.opened(gguf_names.tensors(file, raw, entries))
    shapes = [
        on_the_fly.outlined(entry, reading.outlined(entry, tensors, dtype), scheme)
        for entry in entries
    ]
    return model_files.with_precision(config, dtype), assemble(config, entries, shapes), raw


def _stored_dtype(directory: Path) -> Any:
    """Return the dtype of weights; float32 if there are none to read."""
    try:
        return text_part.tensors_of(model_files.open_tensors(directory))[EMBEDDING].dtype
    except (ValueError, KeyError):
        return "float32"


def _raw_config(path: PathLike) -> tuple[Path, dict]:
    """Return the file that describes a model, and the config.json in it, of its text part."""
    if str(path).endswith(".json") and os.path.isfile(path):
        return Path(path), text_part.config_of(model_files.read_json(Path(path)))
    if file := gguf_files.find(path):
        return file, _gguf_config(file)
    directory = model_files.locate(path)
    return directory / "config.json", text_part.config_of(model_files.read_config(directory))


def _gguf_config(file: Path) -> dict:
    try:
        return gguf_config.read(gguf_files.open_file(file))
    except ValueError as error:
        message = str(error)
        raise ValueError(
            message if message.startswith(str(file)) else f"{file}: {message}"
        ) from None


def load_pretrained(
    path: PathLike,
    dtype: Any = None,
    sharding: Shardings | None = None,
    quantization: str | None = None,
) -> tuple[DecoderConfig, DecoderParams, dict]:
    """Load a checkpoint: the decoder's configuration, its weights, and the raw config.json.

    Args:
      path: a local directory or a hub id.
      dtype: float32, bfloat16 or float16; None for that of config.json, or else of the file.
      sharding: returns the sharding of each array, or its ``Placement``, by its path in the params,
        such as ("layers", 0, "mixer", "qkv"). Only the parts that this process's devices hold are
        read, and converted one at a time. None for all on one device.
      quantization: "int8", "fp8" or "int4", of the matrices of layers; "gguf" keeps the blocks of
        a GGUF file, and "w8a8" quantises rows too where the config asks for it. None for weights
        as the files have them, and blocks multiplied out.

    Raises:
      ValueError: as ``load_config``; or tensors are missing, unexpected or misshapen (all listed).
    """
    file = gguf_files.find(path)
    directory = file or model_files.locate_weights(path)
    source, raw = _raw_config(directory)
    method = GGUF if file else formats.method_of(raw)
    scheme = on_the_fly.scheme_of(quantization, method)
    config = _read_config(source, raw)
    entries = families.find(raw).table(config)
    if file:
        entries = gguf_names.stacked(entries)
        tensors = gguf_names.tensors(gguf_files.open_file(file), raw, entries)
        tensors = gguf_blocks.opened(tensors) if quantization == GGUF else tensors
    else:
        tensors = text_part.tensors_of(model_files.open_tensors(directory))
    entries = as_stored(entries, tensors)
    tensors = formats.opened(formats.of(raw, quantization), entries, tensors, directory)
    unread = mtp_prefixes(config, raw) + shared_prefixes(config)
    ignored = {name for name in tensors if name.startswith(unread)}
    wrong = ()
    if config.tie_embeddings and {HEAD, EMBEDDING} <= tensors.keys():
        ignored.add(HEAD)
        if not _are_equal(tensors[HEAD], tensors[EMBEDDING]):
            wrong = (f"{HEAD} differs from {EMBEDDING}, but tie_word_embeddings is true",)
    model_files.check_fit(directory, entries, tensors, ignored, wrong)
    stored = tensors[EMBEDDING].dtype
    dtype = model_files.known_dtype(dtype or model_files.stated_dtype(raw) or stored)
    on_the_fly.check(entries, scheme)
    placements = [sharding and as_placement(sharding(entry.path)) for entry in entries]
    pairs = zip(entries, placements, strict=True)
    arrays = [
        on_the_fly.quantised(
            entry, reading.read(entry, tensors, dtype, placement), scheme, placement
        )
        for entry, placement in pairs
    ]
    return model_files.with_precision(config, dtype), assemble(config, entries, arrays), raw


def _are_equal(one: np.ndarray, other: np.ndarray, rows: int = 4096) -> bool:
    """Return whether two matrices are equal, a few rows at a time."""
    starts = range(0, max(len(one), len(other)), rows)
    return all(np.array_equal(one[i : i + rows], other[i : i + rows]) for i in starts)


def save_pretrained(
    directory: PathLike,
    config: DecoderConfig,
    params: DecoderParams,
    raw_config: dict | None = None,
    dtype: Any = None,
    max_shard_bytes: int = 5 * 10**9,
) -> None:
    """Write config.json and safetensors files, which ``transformers`` reads too.

    Other files of the directory, such as a tokenizer, stay. An interrupted call leaves the old
    checkpoint whole: the new files take effect in one rename.

    Args:
      directory: created if it does not exist.
      config: the decoder of ``params``.
      params: weights.
      raw_config: config.json to write; it must describe ``config``. None for that of ``hf_config``.
        The call replaces its dtype, and sets its number of MTP modules to 0, because ``params``
        holds none.
      dtype: float32, bfloat16 or float16; None keeps that of the weights, if they share one.
      max_shard_bytes: largest file; a larger model gets several files and an index.

    Raises:
      ValueError: ``raw_config`` describes another model, or ``params`` do not fit ``config``.
    """
    raw = formats.without(hf_config(config) if raw_config is None else raw_config)
    differing = families.different_fields(_read_config("raw_config", raw), config)
    if differing:
        raise ValueError(
            f"raw_config does not describe config: {', '.join(differing)} differ; "
            "pass raw_config=None to write a new one"
        )
    entries = families.find(raw).table(config)
    model_files.check_params(entries, params)
    dtype = model_files.known_dtype(dtype or model_files.common_dtype(entries, params))
    raw |= {"dtype": dtype.name, "torch_dtype": dtype.name}
    if raw.get("num_nextn_predict_layers"):
        raw["num_nextn_predict_layers"] = 0
    with staging.replace_files(directory, model_files.ANY_WEIGHTS) as aside:
        model_files.write_json(aside / "config.json", raw)
        model_files.write_weights(aside, entries, params, dtype, max_shard_bytes)


def hf_config(config: DecoderConfig) -> dict:
    """Return a config.json of the first family that fits, or raise ValueError; ids are null."""
    return families.describe(config)


def load_tokenizer(path: PathLike):
    """Return the tokenizer of a checkpoint, as ``transformers.AutoTokenizer`` does.

    Raises:
      ValueError: there is none, or it cannot be read.
    """
    if file := gguf_files.find(path):
        return gguf_tokenizer.read(gguf_files.open_file(file))
    directory = model_files.locate(path)
    # Without these files transformers returns an empty tokenizer for some architectures.
    if not any((directory / name).is_file() for name in _VOCABULARIES):
        raise ValueError(
            f"{directory} has no tokenizer (none of {', '.join(_VOCABULARIES)}); copy that of the "
            "original model, with tokenizer_config.json, or pass token ids"
        )
    _check_package(directory)
    try:
        return _tokenizer_class(directory).from_pretrained(directory, trust_remote_code=False)
    except Exception as error:  # transformers raises many types
        raise ValueError(
            f"transformers cannot read the tokenizer in {directory}: "
            f"{first_line(error)}; download or save it again"
        ) from None


def _check_package(directory: Path) -> None:
    """Raise ValueError if the tokenizer is code, or needs a package that is not installed."""
    file = directory / "tokenizer_config.json"
    named = model_files.read_json(file).get("auto_map") if file.is_file() else None
    named = named.get("AutoTokenizer") if isinstance(named, dict) else named
    for name in named if isinstance(named, list) else [named]:
        module = str(name).rpartition(".")[0]
        if module and (directory / f"{module}.py").is_file():
            raise ValueError(
                f"the tokenizer in {directory} is Python code of the checkpoint ({shown(name)}), "
                "which jspec never runs; pass tokenizer= with a directory that has a tokenizer.json"
            )
    only = (directory / "tokenizer.model").is_file()
    only = only and not (directory / "tokenizer.json").is_file()
    if only and importlib.util.find_spec("sentencepiece") is None:
        raise ValueError(
            f"{directory} has its tokenizer only as tokenizer.model; install the packages that "
            "read it: pip install 'jspec-decoding[sentencepiece]'"
        )


def _tokenizer_class(directory: Path):
    """Return AutoTokenizer, or the class that it would choose for a Llama.

    AutoTokenizer imports torch if that is installed, which takes two seconds more.
    """
    names = "tokenizer_config.json", "config.json"
    if all((directory / name).is_file() for name in (*names, "tokenizer.json")):
        settings, config = (model_files.read_json(directory / name) for name in names)
        plain = settings.get("tokenizer_class") in ("PreTrainedTokenizerFast", "TokenizersBackend")
        if plain and "auto_map" not in settings and config.get("model_type") == "llama":
            from transformers import PreTrainedTokenizerFast

            return PreTrainedTokenizerFast
    from transformers import AutoTokenizer

    return AutoTokenizer


def eos_token_ids(source: PathLike | dict) -> tuple[int, ...]:
    """Return the stop tokens of a checkpoint, or of a raw config.json alone.

    Those of config.json and of generation_config.json count. Malformed ids raise ValueError.
    """
    configs = [source]
    if not isinstance(source, dict):
        file, raw = _raw_config(source)
        configs = [raw]
        if (file.parent / "generation_config.json").is_file():
            configs.append(model_files.read_json(file.parent / "generation_config.json"))
    family = families.find(configs[0])
    stops: set[int] = set()
    for raw in (family.defaults | configs[0], *configs[1:]):
        ids = raw.get("eos_token_id")
        ids = [] if ids is None else ids if isinstance(ids, list) else [ids]
        if any(type(i) is not int or i < 0 for i in ids):
            raise ValueError(f"eos_token_id must be a token id or a list of them, got {ids}")
        stops.update(ids)
    return tuple(sorted(stops))


def generation_config(source: PathLike) -> dict | None:
    """Return the generation_config.json of a model's directory; None if it has none.

    Raises:
      ValueError: it is malformed, or there is no such directory.
    """
    file = gguf_files.find(source)
    directory = file.parent if file else model_files.locate(source)
    path = directory / "generation_config.json"
    return model_files.read_json(path) if path.is_file() else None


def _read_config(source: PathLike, raw: dict) -> DecoderConfig:
    try:
        formats.of(raw)  # raises for a format that is not read
        return families.find(raw).read(formats.without(raw))
    except ValueError as error:
        raise ValueError(f"{source}: {error}") from None

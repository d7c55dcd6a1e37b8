"""Checkpoints of draft heads: EAGLE-1, -2 and -3, and Medusa, in the layouts that people have.

``load_head`` is the one way in. What a directory holds is told by its config.json and the names of
its tensors, never by its own name; ``jspec.models.heads.eagle_format`` and ``medusa_format`` say
what each layout means, and how it is read where servers disagree. ``save_head`` writes the same
layouts, so that vLLM, SGLang and the authors' programs read them.
"""

import dataclasses
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import jax.numpy as jnp
import numpy as np

from jspec import model_files, staging, tensor_files, torch_files
from jspec.model_files import PathLike
from jspec.models.decoder import DecoderConfig
from jspec.models.families.names import Entry
from jspec.models.heads import eagle_format, medusa_format, vocabulary
from jspec.models.heads.eagle import EagleConfig, EagleParams
from jspec.models.heads.medusa import MedusaConfig, MedusaParams

Kind = Literal["eagle", "eagle3", "medusa"]
Layout = Literal["eagle", "eagle3", "speculators", "medusa", "medusa-vllm"]
HeadConfig = EagleConfig | MedusaConfig
HeadParams = EagleParams | MedusaParams

# In the order in which they are looked for: published directories often hold a .bin beside.
_SINGLE = {
    "model.safetensors": tensor_files.read,
    "medusa_lm_head.safetensors": tensor_files.read,
    "medusa_lm_head.pt": torch_files.read,
    "pytorch_model.bin": torch_files.read,
}
_SHARDED = {
    "model.safetensors.index.json": tensor_files.read,
    "pytorch_model.bin.index.json": torch_files.read,
}
_ANY_WEIGHTS = re.compile(
    r"(pytorch_)?model(-\d{5}-of-\d{5})?\.(safetensors|bin)(\.index\.json)?"
    r"|medusa_lm_head\.(safetensors|pt)"
)
_PATTERNS = ("*.safetensors", "*.bin", "*.pt")
_WRAPPERS = ("model.", "module.", "draft_model.", "medusa_heads.", "medusa_head.")
# What trainers leave in the files and no head uses.
_TRAINING_ONLY = ("verifier_lm_head.weight", "verifier_norm.weight")


@dataclasses.dataclass(frozen=True, eq=False)
class LoadedHead:
    """A draft head and its weights. Made by ``load_head``.

    Attributes:
      kind: "eagle" (EAGLE-1 and -2), "eagle3" or "medusa": the method that drafts with it.
      layout: how its files are written.
      config: sizes and switches.
      params: weights.
      raw_config: config.json.
    """

    kind: Kind
    layout: Layout
    config: HeadConfig
    params: HeadParams = dataclasses.field(repr=False)
    raw_config: dict = dataclasses.field(repr=False)


def load_head(
    path: PathLike,
    target_config: DecoderConfig,
    *,
    kind: Kind | None = None,
    dtype: Any = None,
    embedding: Any = None,
) -> LoadedHead:
    """Loads a draft head for a target.

    Args:
      path: a local directory or a hub id.
      target_config: the target: its hidden size, vocabulary and number of layers.
      kind: what it should be; None takes what is there.
      dtype: float32, bfloat16 or float16; None keeps that of the file.
      embedding: the target's [V, D]: a head that brings an equal one then shares the target's,
        which saves its memory.

    Raises:
      ValueError: it is no head or another kind, was made for another target, asks for something
        that is not supported or that servers read differently, or its tensors are missing,
        unexpected or misshapen (all listed).
    """
    directory = model_files.locate(path, _PATTERNS)
    raw = model_files.read_json(directory / "config.json")
    tensors = _canonical(directory, _open(directory))
    found, layout = _recognise(directory, raw, tensors)
    if kind not in (None, found):
        raise ValueError(
            f"{directory} holds a head of method {found!r}, not {kind!r}; ask for {found!r}"
        )
    try:
        config, params = _FORMATS[found](raw, tensors, target_config, layout, dtype, embedding)
    except ValueError as error:
        raise ValueError(f"{directory}: {error}") from None
    return LoadedHead(found, layout, config, params, raw)


def save_head(
    directory: PathLike,
    config: HeadConfig,
    params: HeadParams,
    target_config: DecoderConfig,
    *,
    layout: Layout | None = None,
    target_name: str = "",
    embedding: Any = None,
    dtype: Any = None,
) -> None:
    """Writes a head as config.json and its tensors; whole or, interrupted, not at all.

    Other files of the directory stay. ``medusa`` is one medusa_lm_head.pt, all others safetensors.

    Args:
      directory: made if it does not exist.
      config: the head of ``params``.
      params: weights.
      target_config: the target's sizes.
      layout: None for the most widely read one of the method: "eagle", "eagle3", "medusa-vllm".
      target_name: hub id or path of the target; ``speculators`` and ``medusa`` files name it.
      embedding: the target's [V, D], written for a head that shares it: ``speculators`` files must
        have one, and some servers need it in ``eagle3``.
      dtype: float32, bfloat16 or float16; None keeps that of the weights, if they share one.

    Raises:
      ValueError: the layout is unknown or cannot express the head, or ``params`` do not fit.
    """
    layout = layout or _default_layout(config)
    if isinstance(config, MedusaConfig):
        raw = describe_head(config, target_config, layout=layout, target_name=target_name)
        entries, extra = medusa_format.table(config, layout), _token_map(params)
    else:
        if embedding is not None and not config.own_embedding:
            config = dataclasses.replace(config, own_embedding=True)
            params = params.replace(embedding=embedding)
        raw = describe_head(config, target_config, layout=layout, target_name=target_name)
        first = "midlayer" if layout == "eagle3" else eagle_format.FIRST
        entries, extra = eagle_format.table(config, first), _maps(config, params)
    model_files.check_params(entries, params)
    dtype = model_files.known_dtype(dtype or model_files.common_dtype(params))
    if layout == "eagle" and not config.fc_bias:
        # SGLang always has this bias, and leaves it uninitialised where the file has none.
        extra["fc.bias"] = np.zeros(config.hidden_size, dtype)
    raw |= {"dtype": dtype.name, "torch_dtype": dtype.name}
    with staging.replace_files(directory, _ANY_WEIGHTS) as aside:
        model_files.write_json(aside / "config.json", raw)
        if layout == "medusa":
            torch_files.write(aside / "medusa_lm_head.pt", _split(entries, params, dtype))
        else:
            model_files.write_weights(aside, entries, params, dtype, extra=extra)


def describe_head(
    config: HeadConfig,
    target_config: DecoderConfig,
    *,
    layout: Layout | None = None,
    target_name: str = "",
) -> dict:
    """The config.json that ``save_head`` writes, but for dtypes: to know early that it can.

    Raises:
      ValueError: the layout is unknown or cannot express the head.
    """
    layout = layout or _default_layout(config)
    _check_saveable(config, layout, target_config, target_name)
    if isinstance(config, MedusaConfig):
        return medusa_format.describe(config, layout, target_name)
    return eagle_format.describe(config, layout, target_config, target_name)


# Reading.


def _open(directory: Path) -> dict[str, np.ndarray]:
    for file, read in _SINGLE.items():
        if (directory / file).is_file():
            return read(directory / file)
    for index, read in _SHARDED.items():
        if (directory / index).is_file():
            return model_files.open_shards(directory, index, read)
    raise ValueError(
        f"{directory} has none of {', '.join((*_SINGLE, *_SHARDED))}; a head is a directory with "
        "config.json and one of these"
    )


def _canonical(directory: Path, tensors: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The tensors without the wrappers that trainers put around names.

    Of a Medusa-2 checkpoint, a language model with heads, only the heads.
    """
    heads = {name: tensor for name, tensor in tensors.items() if "medusa_head." in name}
    result: dict[str, np.ndarray] = {}
    for name, tensor in (heads or tensors).items():
        short = name
        while short.startswith(_WRAPPERS):
            short = short.partition(".")[2]
        if short.startswith("midlayer."):
            short = f"{eagle_format.FIRST}.{short.partition('.')[2]}"
        if short in result:
            raise ValueError(
                f"{directory} has two tensors that are {short} without their prefixes, one of them "
                f"{name}; remove the one that does not belong to the head"
            )
        result[short] = tensor
    return result


def _recognise(
    directory: Path, raw: dict, tensors: Mapping[str, np.ndarray]
) -> tuple[Kind, Layout]:
    layout = medusa_format.layout(tensors)
    if layout is not None:
        return "medusa", layout
    generation = eagle_format.generation(tensors)
    if generation == 3:
        return "eagle3", "speculators" if eagle_format.SPECULATORS in raw else "eagle3"
    if generation == 1:
        return "eagle", "eagle"
    if "layers.0.input_layernorm.weight" in tensors:
        raise ValueError(
            f"{directory} holds a whole language model, not a draft head; draft with it by method "
            "'draft_model'"
        )
    some = ", ".join(sorted(tensors)[:4])
    raise ValueError(
        f"{directory} holds no draft head of a known kind (EAGLE-1, -2, -3, Medusa): its tensors "
        f"are {some}, …"
    )


def _read_eagle(raw, tensors, target_config, layout, dtype, embedding):
    del layout
    config = eagle_format.read(raw, tensors, target_config)
    if config.fc_bias and not np.any(tensors.get("fc.bias", True)):
        config = dataclasses.replace(config, fc_bias=False)  # as ``save_head`` writes it
        tensors = {name: tensor for name, tensor in tensors.items() if name != "fc.bias"}
    entries = eagle_format.table(config)
    model_files.check_fit("the file", entries, tensors, ("d2t", "t2d", *_TRAINING_ONLY))
    ids = vocabulary.from_offsets(
        tensors.get("d2t"), tensors.get("t2d"), config.vocab_size, config.target_vocab_size
    )
    dtype = model_files.known_dtype(dtype or tensors["fc.weight"].dtype)
    if embedding is not None and config.own_embedding:
        theirs = tensors["embed_tokens.weight"].astype(dtype)
        if config.hidden_size == config.target_hidden_size and np.array_equal(theirs, embedding):
            config = dataclasses.replace(config, own_embedding=False)
            entries = eagle_format.table(config)
    config = dataclasses.replace(config, network=model_files.with_precision(config.network, dtype))
    arrays = [jnp.asarray(entry.join(tensors, dtype)) for entry in entries]
    ids = None if ids is None else jnp.asarray(ids)
    return config, eagle_format.assemble(entries, arrays, ids)


def _read_medusa(raw, tensors, target_config, layout, dtype, embedding):
    del embedding
    if layout == "medusa-vllm" and "lm_head.weight" in tensors:
        tensors = dict(tensors)
        tensors["lm_heads.0.weight"] = tensors.pop("lm_head.weight")
    config, ids = medusa_format.read(raw, tensors, target_config), None
    if layout == "medusa-vllm" and medusa_format.TOKEN_MAP in tensors and config.reduced:
        ids, order = vocabulary.from_ids(
            tensors[medusa_format.TOKEN_MAP], config.vocab_size, config.target_vocab_size
        )
        tensors = medusa_format.reorder(config, tensors, order)
    elif config.reduced:
        raise ValueError(
            f"truncated_vocab_size is {config.vocab_size} of {config.target_vocab_size}, but the "
            "file has no token_map to say which tokens those are"
        )
    entries = medusa_format.table(config, layout)
    model_files.check_fit("the file", entries, tensors, (medusa_format.TOKEN_MAP,))
    dtype = model_files.known_dtype(dtype or tensors[entries[0].names[0]].dtype)
    working = model_files.with_precision(target_config, dtype).activation_dtype
    arrays = [jnp.asarray(entry.join(tensors, dtype)) for entry in entries]
    ids = None if ids is None else jnp.asarray(ids)
    params = medusa_format.assemble(entries, arrays, ids)
    return dataclasses.replace(config, activation_dtype=working), params


_FORMATS = {"eagle": _read_eagle, "eagle3": _read_eagle, "medusa": _read_medusa}


# Writing.


def _default_layout(config: HeadConfig) -> Layout:
    if isinstance(config, MedusaConfig):
        return "medusa-vllm"
    return "eagle" if config.generation == 1 else "eagle3"


def _check_saveable(
    config: HeadConfig, layout: str, target_config: DecoderConfig, target_name: str
) -> None:
    medusa = isinstance(config, MedusaConfig)
    known = ("medusa", "medusa-vllm") if medusa else ("eagle", "eagle3", "speculators")
    if layout not in known:
        raise ValueError(
            f"layout={layout!r} is none of {', '.join(known)}, the layouts of "
            f"{'Medusa' if medusa else 'EAGLE'} heads"
        )
    if layout in ("speculators", "medusa") and not target_name:
        raise ValueError(f"layout={layout!r} names the target; pass its hub id as target_name")
    if target_config.vocab_size != config.target_vocab_size:
        raise ValueError(
            f"target_config has a vocabulary of {target_config.vocab_size}, but the head is for "
            f"one of {config.target_vocab_size}; pass that of the head's target"
        )


def _maps(config: EagleConfig, params: EagleParams) -> dict[str, np.ndarray]:
    """``d2t`` and ``t2d`` of a reduced vocabulary."""
    if params.draft_to_target is None:
        return {}
    return {
        "d2t": vocabulary.to_offsets(params.draft_to_target),
        "t2d": vocabulary.to_mask(params.draft_to_target, config.target_vocab_size),
    }


def _token_map(params: MedusaParams) -> dict[str, np.ndarray]:
    if params.draft_to_target is None:
        return {}
    return {medusa_format.TOKEN_MAP: np.asarray(params.draft_to_target).astype(np.int64)}


def _split(entries: tuple[Entry, ...], params: Any, dtype: np.dtype) -> dict[str, np.ndarray]:
    return {
        name: piece
        for entry in entries
        for name, piece in zip(
            entry.names, entry.split(np.asarray(entry.pick(params)), dtype), strict=True
        )
    }

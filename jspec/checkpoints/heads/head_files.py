"""Checkpoints of draft heads, in the layouts that people have.

EAGLE-1, -2 and -3, Medusa, Hydra, DFlash, and MLP and LSTM speculators. ``load_head`` is the one
way in. What a directory holds is told by its config.json and the names of its tensors, never by its
own name; the ``*_format`` files of ``jspec.models.heads`` say what each layout means, and how it is
read where servers disagree. ``save_head`` writes the same layouts, so that vLLM, SGLang and the
authors' programs read them.
"""

import dataclasses
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from jspec.checkpoints import model_files, safetensors_files, torch_files
from jspec.checkpoints.families.names import Entry
from jspec.checkpoints.heads import eagle, head_formats, medusa, mlp_speculator, mtp, vocabulary
from jspec.checkpoints.heads.head_formats import FORMATS, HeadConfig, HeadParams, Kind, Layout
from jspec.checkpoints.model_files import PathLike
from jspec.models.decoder import DecoderConfig
from jspec.models.heads.dflash import DFlashConfig, DFlashParams
from jspec.models.heads.eagle import EagleConfig, EagleParams
from jspec.models.heads.medusa import MedusaConfig, MedusaParams
from jspec.models.heads.mtp import MtpConfig
from jspec.util import staging
from jspec.util.messages import printable

_READERS = {
    "model.safetensors": safetensors_files.read,
    "medusa_lm_head.safetensors": safetensors_files.read,
    "medusa_lm_head.pt": torch_files.read,
    "hydra_lm_head.pt": torch_files.read,
    **model_files.READERS,
}
_ANY_WEIGHTS = re.compile(
    r"(pytorch_)?model(-\d{5}-of-\d{5})?\.(safetensors|bin)(\.index\.json)?"
    r"|medusa_lm_head\.(safetensors|pt)|hydra_lm_head\.pt"
)
_PATTERNS = ("model*.safetensors", "pytorch_model*.bin", "medusa_lm_head.*", "hydra_lm_head.pt")
_WRAPPERS = (
    "model.",
    "module.",
    "draft_model.",
    "medusa_heads.",
    "medusa_head.",
    "speculator.",
    "logit_head.",
)


@dataclasses.dataclass(frozen=True, eq=False)
class LoadedHead:
    """A draft head and its weights. Made by ``load_head``.

    Attributes:
      kind: "eagle" (EAGLE-1 and -2), "eagle3", "medusa", "mlp_speculator", "hydra", "dflash",
        "dspark" or "mtp": the method that drafts with it.
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
    tensors = _canonical(directory, model_files.open_tensors(directory, _READERS))
    if kind == "mtp" and mtp.layout(tensors) is None:
        raise ValueError(
            f"{directory} has no modules for later tokens (MTP); take a target that was published "
            "with some, or train them with `python -m training.finetune_mtp`"
        )
    found, layout = head_formats.recognise(directory, raw, tensors)
    if kind not in (None, found):
        raise ValueError(
            f"{directory} holds a head of method {found!r}, not {kind!r}; ask for {found!r}"
        )
    try:
        config, params = head_formats.read(raw, tensors, target_config, layout, dtype, embedding)
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
    output: Any = None,
    dtype: Any = None,
) -> None:
    """Writes a head as config.json and its tensors; whole or, interrupted, not at all.

    Other files of the directory stay. ``medusa`` is one medusa_lm_head.pt and ``hydra`` one
    hydra_lm_head.pt, all others safetensors.

    Args:
      directory: made if it does not exist.
      config: the head of ``params``.
      params: weights.
      target_config: the target's sizes.
      layout: None for the most widely read one of the method: "eagle", "eagle3", "peagle",
        "medusa-vllm", "mlp_speculator", "arctic-lstm", "hydra", "dflash", "mimo" or "deepseek".
      target_name: hub id or path of the target; files of ``head_formats.NAMING_TARGETS`` name it.
      embedding: the target's [V, D], written for a head that shares it: ``speculators`` files must
        have one, and some servers need it in ``eagle3``.
      output: the target's [D, V], written for a head that shares it where ``dflash-speculators``
        files must have one.
      dtype: float32, bfloat16 or float16; None keeps that of the weights, if they share one.

    Raises:
      ValueError: the layout is unknown or cannot express the head, or ``params`` do not fit.
    """
    layout = layout or _default_layout(config)
    if isinstance(config, EagleConfig):
        config, params = _with_targets(config, params, embedding=embedding)
    if isinstance(config, DFlashConfig) and layout == "dflash-speculators":
        config, params = _with_targets(config, params, embedding=embedding, head=output)
    raw = describe_head(config, target_config, layout=layout, target_name=target_name)
    written = entries(config, layout)
    model_files.check_params(written, params)
    kept = [entry.pick(params) for entry in written if not entry.float32]
    dtype = model_files.known_dtype(dtype or model_files.common_dtype(kept))
    extra = _extra(config, params, layout, dtype)
    raw |= {"dtype": dtype.name, "torch_dtype": dtype.name}
    with staging.replace_files(directory, _ANY_WEIGHTS) as aside:
        model_files.write_json(aside / "config.json", raw)
        if layout in head_formats.TORCH_FILES:
            file = head_formats.TORCH_FILES[layout]
            torch_files.write(aside / file, _split(written, params, dtype) | extra)
        else:
            model_files.write_weights(aside, written, params, dtype, extra=extra)


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
    module = FORMATS[type(config)].module
    if isinstance(config, MedusaConfig):
        return module.describe(config, layout, target_name)
    return module.describe(config, layout, target_config, target_name)


# Reading.


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
            short = f"{eagle.FIRST}.{short.partition('.')[2]}"
        if short in result:
            raise ValueError(
                f"{directory} has two tensors that are {printable(short)} without their prefixes, "
                f"one of them {printable(name)}; remove the one that does not belong to the head"
            )
        result[short] = tensor
    return result


# Writing.


def _with_targets(
    config: HeadConfig, params: HeadParams, **lent: Any
) -> tuple[HeadConfig, HeadParams]:
    """The head with what it shares of the target, by the names of its own weights."""
    for name, weights in lent.items():
        if weights is not None and not getattr(config, f"own_{name}"):
            config = dataclasses.replace(config, **{f"own_{name}": True})
            params = params.replace(**{name: weights})
    return config, params


def _default_layout(config: HeadConfig) -> Layout:
    if isinstance(config, EagleConfig) and config.mask_token_id is not None:
        return "peagle"
    if isinstance(config, EagleConfig):
        return "eagle" if config.generation == 1 else "eagle3"
    if isinstance(config, MtpConfig):
        return mtp.layout_of(config)
    return FORMATS[type(config)].layouts[0]


def _check_saveable(
    config: HeadConfig, layout: str, target_config: DecoderConfig, target_name: str
) -> None:
    known = FORMATS[type(config)]
    if layout not in known.layouts:
        raise ValueError(
            f"layout={layout!r} is none of {', '.join(sorted(known.layouts))}, the layouts of "
            f"{known.name} heads"
        )
    if layout in head_formats.NAMING_TARGETS and not target_name:
        raise ValueError(f"layout={layout!r} names the target; pass its hub id as target_name")
    if target_config.vocab_size != config.target_vocab_size:
        raise ValueError(
            f"target_config has a vocabulary of {target_config.vocab_size}, but the head is for "
            f"one of {config.target_vocab_size}; pass that of the head's target"
        )


def entries(config: HeadConfig, layout: Layout) -> tuple[Entry, ...]:
    """The entries under the names that ``layout`` writes."""
    if isinstance(config, EagleConfig):
        return eagle.table(config, "midlayer" if layout == "eagle3" else eagle.FIRST)
    bare = FORMATS[type(config)].module.table(config, layout)
    prefix = mlp_speculator.PREFIX if layout == "mlp_speculator" else ""
    if isinstance(config, MtpConfig):
        prefix = "model."
    return tuple(
        dataclasses.replace(entry, names=tuple(prefix + name for name in entry.names))
        for entry in bare
    )


def _extra(
    config: HeadConfig, params: HeadParams, layout: Layout, dtype: np.dtype
) -> dict[str, np.ndarray]:
    """What a file of ``layout`` holds besides the weights."""
    if isinstance(config, EagleConfig | DFlashConfig):
        extra = _maps(config, params)
        if layout == "eagle" and not config.fc_bias:
            # SGLang always has this bias, and leaves it uninitialised where the file has none.
            extra["fc.bias"] = np.zeros(config.hidden_size, dtype)
        return extra
    if isinstance(config, MedusaConfig):
        return _token_map(params)
    if isinstance(config, MtpConfig):
        return {}
    copies = FORMATS[type(config)].module.required_repeats(config)
    if not copies:
        return {}
    written = _split(entries(config, layout), params, dtype)
    return {name: written[first] for name, first in copies.items()}


def _maps(
    config: EagleConfig | DFlashConfig, params: EagleParams | DFlashParams
) -> dict[str, np.ndarray]:
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
    return {medusa.TOKEN_MAP: np.asarray(params.draft_to_target).astype(np.int64)}


def _split(entries: tuple[Entry, ...], params: Any, dtype: np.dtype) -> dict[str, np.ndarray]:
    return {
        name: piece
        for entry in entries
        for name, piece in zip(
            entry.names, entry.split(np.asarray(entry.pick(params)), dtype), strict=True
        )
    }

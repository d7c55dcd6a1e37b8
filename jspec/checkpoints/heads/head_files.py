"""Checkpoints of draft heads, in the layouts that people have.

``load_head`` recognises a directory by its config.json and the names of its tensors, never by its
own name. ``save_head`` writes the same layouts, so that vLLM, SGLang and the authors' programs read
them. The modules in ``head_formats.FORMATS`` document each layout.
"""

import dataclasses
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from jspec.checkpoints.files import model_files, safetensors_files, torch_files
from jspec.checkpoints.files.model_files import PathLike
from jspec.checkpoints.heads import base, eagle, head_formats
from jspec.checkpoints.heads.base import HeadConfig, HeadFormat, PlacementsOf
from jspec.models.decoder import DecoderConfig
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
_WRAPPERS = ("model.", "module.", "draft_model.", "speculator.", "logit_head.")
_WRAPPERS += ("medusa_heads.", "medusa_head.")


@dataclasses.dataclass(frozen=True, eq=False)
class LoadedHead:
    """A draft head and its weights, from ``load_head``.

    Attributes:
      kind: the method that drafts with it: "eagle" (EAGLE-1 and -2), "eagle3", "medusa",
        "mlp_speculator", "hydra", "dflash", "dspark" or "mtp".
      layout: the layout of its files.
      config: sizes and switches.
      params: weights.
      raw_config: config.json.
    """

    kind: str
    layout: str
    config: HeadConfig
    params: Any = dataclasses.field(repr=False)
    raw_config: dict = dataclasses.field(repr=False)


@dataclasses.dataclass(frozen=True, eq=False)
class OpenHead:
    """The files of a draft head, with kind and layout; the weights are not read yet."""

    directory: Path
    raw_config: dict
    tensors: dict[str, np.ndarray]
    format: HeadFormat
    kind: str
    layout: str

    def fits(self, target_config: DecoderConfig) -> bool:
        """Return whether the head was made for a target of these sizes."""
        try:
            self.format.read_config(self.raw_config, self.tensors, target_config, self.layout)
        except ValueError:
            return False
        return True


def open_head(path: PathLike, kind: str | None = None) -> OpenHead:
    """Find out which head the files hold; arguments and errors are those of ``load_head``."""
    directory = model_files.locate(path, _PATTERNS)
    raw = model_files.read_json(directory / "config.json")
    tensors = _canonical(directory, model_files.open_tensors(directory, _READERS))
    for format in head_formats.FORMATS:
        if kind in format.kinds and format.missing and format.sniff(raw, tensors) is None:
            raise ValueError(f"{directory} {format.missing}")
    format, sniffed, layout = head_formats.sniff(directory, raw, tensors)
    if kind not in (None, sniffed):
        raise ValueError(
            f"{directory} holds a head of method {sniffed!r}, not {kind!r}; ask for {sniffed!r}"
        )
    return OpenHead(directory, raw, tensors, format, sniffed, layout)


def load_head(
    path: PathLike,
    target_config: DecoderConfig | None,
    *,
    kind: str | None = None,
    dtype: Any = None,
    placements: PlacementsOf | None = None,
) -> LoadedHead:
    """Load a draft head for a target.

    Args:
      path: a local directory or a hub id.
      target_config: the target's sizes; None for MTP modules in the files of their target, whose
        config.json states them.
      kind: the method it must be of; None for any.
      dtype: float32, bfloat16 or float16; None keeps that of the file.
      placements: returns those of its arrays by its config; None for one device.

    Raises:
      ValueError: it is no head or of another kind, was made for another target, has a setting that
        is not supported or that servers read differently, or its tensors are missing, unexpected
        or misshapen (the message lists all).
    """
    head = open_head(path, kind)
    try:
        target = target_config or head.format.read_target(head.raw_config)
        config, params = head.format.read(
            head.raw_config, head.tensors, target, head.layout, dtype, placements
        )
    except ValueError as error:
        raise ValueError(f"{head.directory}: {error}") from None
    return LoadedHead(head.kind, head.layout, config, params, head.raw_config)


def save_head(
    directory: PathLike,
    config: HeadConfig,
    params: Any,
    target_config: DecoderConfig,
    *,
    layout: str | None = None,
    target_name: str = "",
    embedding: Any = None,
    output: Any = None,
    dtype: Any = None,
) -> None:
    """Write a head as config.json and its tensors.

    Other files of the directory stay. An interrupted call leaves the old files whole.

    Args:
      directory: created if it does not exist.
      config: sizes and switches of the head.
      params: weights.
      target_config: the target's sizes.
      layout: None for the most widely read one of the method: "eagle", "eagle3", "peagle",
        "medusa-vllm", "mlp_speculator", "arctic-lstm", "hydra", "dflash", "mimo" or "deepseek".
      target_name: hub id or path of the target, which some layouts name.
      embedding: the target's [V, D], written for a head that shares it: ``speculators`` files
        require it, and some servers need it in ``eagle3``.
      output: the target's [D, V], written for a head that shares it: ``dflash-speculators`` files
        require it.
      dtype: float32, bfloat16 or float16; None keeps that of the weights, if they share one.

    Raises:
      ValueError: the layout is unknown or cannot express the head, or ``params`` do not fit.
    """
    chosen = head_formats.of(config).layout(layout, config)
    if chosen.holds_embedding and embedding is not None and not config.separate_embedding:
        config = dataclasses.replace(config, separate_embedding=True)
        params = params.replace(embedding=embedding)
    if chosen.holds_output and output is not None and not config.separate_head:
        config = dataclasses.replace(config, separate_head=True)
        params = params.replace(head=output)
    raw = describe_head(config, target_config, layout=chosen.name, target_name=target_name)
    entries = chosen.entries(config)
    model_files.check_params(entries, params)
    dtype = model_files.known_dtype(dtype or model_files.common_dtype(entries, params))
    extra = chosen.extra(config, params, dtype)
    raw |= {"dtype": dtype.name, "torch_dtype": dtype.name}
    with staging.replace_files(directory, _ANY_WEIGHTS) as aside:
        model_files.write_json(aside / "config.json", raw)
        if chosen.torch_file:
            tensors = base.split(entries, params, dtype) | extra
            torch_files.write(aside / chosen.torch_file, tensors)
        else:
            model_files.write_weights(aside, entries, params, dtype, extra=extra)


def describe_head(
    config: HeadConfig,
    target_config: DecoderConfig,
    *,
    layout: str | None = None,
    target_name: str = "",
) -> dict:
    """Return the config.json that ``save_head`` writes, without dtypes.

    Raises:
      ValueError: the layout is unknown or cannot express the head.
    """
    chosen = head_formats.of(config).layout(layout, config)
    if chosen.names_target and not target_name:
        raise ValueError(f"layout={chosen.name!r} names the target; pass its hub id as target_name")
    if target_config.vocab_size != config.target_vocab_size:
        raise ValueError(
            f"target_config has a vocabulary of {target_config.vocab_size}, but the head is for "
            f"one of {config.target_vocab_size}; pass that of the head's target"
        )
    return chosen.describe(config, target_config, target_name)


def _canonical(directory: Path, tensors: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Drop the wrappers that trainers put around names.

    A Medusa-2 checkpoint is a language model with heads; only the heads stay.
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

"""Medusa heads in files: which config.json makes which ``MedusaConfig``, and the tensors' names.

Two layouts, told apart by the names of the tensors:

  * ``medusa``: as published. Head i is ``{i}.0.linear``, ``{i}.1.linear``, … and then its output
    ``{i}.{number of blocks}``; without outputs the target's head serves. In a Medusa-2 checkpoint
    these stand under ``medusa_head.`` beside a whole language model.
  * ``medusa-vllm``: vLLM's ``blocks.{i}.layers.{l}`` and ``lm_heads.{i}``; under
    ``original_lm_head`` one ``lm_head`` (or ``lm_heads.0``) for all; with a ``token_map`` of
    absolute ids for a reduced vocabulary. Biases without ``medusa_fc_bias`` are refused: vLLM drops
    them without a word.

Heads and blocks are counted from the tensors, since published configs are wrong about them.
"""

import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from jspec.checkpoints.families import common
from jspec.checkpoints.families.names import Entry, nest
from jspec.models.decoder import DecoderConfig
from jspec.models.heads.medusa import BlockParams, MedusaConfig, MedusaParams
from jspec.util.messages import shown

_BLOCKS = {
    "medusa": re.compile(r"(\d+)\.(\d+)\.linear\.weight"),
    "medusa-vllm": re.compile(r"blocks\.(\d+)\.layers\.(\d+)\.weight"),
}
TOKEN_MAP = "token_map"


# Reading.


def layout(tensors: Mapping[str, np.ndarray]) -> str | None:
    """The layout that the tensors' names have, or None."""
    for name, pattern in _BLOCKS.items():
        if any(pattern.fullmatch(tensor) for tensor in tensors):
            return name
    return None


def read(raw: dict, tensors: Mapping[str, np.ndarray], target: DecoderConfig) -> MedusaConfig:
    """The heads that a config.json and its tensors describe, for ``target``.

    Raises:
      ValueError: a key is malformed or not supported, or the heads were made for another target.
    """
    kind = layout(tensors)
    matches = [match for name in tensors if (match := _BLOCKS[kind].fullmatch(name))]
    num_heads, num_layers = common.counted([match.groups() for match in matches], len(tensors))
    hidden, width = target.hidden_size, tensors[matches[0][0]].shape[-1:]
    if width != (hidden,):
        raise ValueError(
            f"the heads were made for another target: they are {width} wide, and the target's "
            f"hidden size is {hidden}"
        )
    sizes = {
        "num_heads": num_heads,
        "num_layers": num_layers,
        "hidden_size": hidden,
        "target_vocab_size": target.vocab_size,
        "capture_layers": (target.num_layers,),
    }
    if kind == "medusa":
        outputs = [name for name in tensors if re.fullmatch(r"\d+\.\d+\.weight", name)]
        return MedusaConfig(
            vocab_size=target.vocab_size, num_outputs=num_heads if outputs else 0, **sizes
        )
    return _read_vllm(raw, sizes)


def _read_vllm(raw: dict, sizes: dict) -> MedusaConfig:
    for key, name in (("num_heads", "num_heads"), ("num_hidden_layers", "num_layers")):
        if raw.get(key) not in (None, sizes[name]):
            raise ValueError(f"{key} is {shown(raw[key])}, but the file holds {sizes[name]}")
    if raw.get("logit_scale", 1.0) not in (None, 1, 1.0):
        raise ValueError(f"logit_scale={shown(raw['logit_scale'])} is not supported, only 1.0")
    whole = raw.get("vocab_size")
    if whole not in (None, sizes["target_vocab_size"]):
        raise ValueError(
            f"the heads were made for another target: vocab_size is {shown(whole)}, and that of "
            f"the target {sizes['target_vocab_size']}"
        )
    reduced = raw.get("truncated_vocab_size") is not None
    return MedusaConfig(
        vocab_size=common.whole(raw, "truncated_vocab_size")
        if reduced
        else whole or sizes["target_vocab_size"],
        num_outputs=1 if common.flag(raw, "original_lm_head") else sizes["num_heads"],
        bias=common.flag(raw, "medusa_fc_bias"),
        **sizes,
    )


def reorder(
    config: MedusaConfig, tensors: Mapping[str, np.ndarray], order: np.ndarray
) -> dict[str, np.ndarray]:
    """The tensors with the rows of the outputs in ``order``, the order of ascending target ids.

    vLLM takes outputs over the whole vocabulary, too, and picks the rows of ``token_map`` itself.
    """
    ids = np.asarray(tensors[TOKEN_MAP])[order]
    result = dict(tensors)
    for name, tensor in tensors.items():
        if name.startswith("lm_heads.") and tensor.ndim == 2:
            if len(tensor) == config.vocab_size:
                result[name] = tensor[order]
            elif len(tensor) == config.target_vocab_size:
                result[name] = tensor[ids]
    return result


# Both ways.


def table(config: MedusaConfig, kind: str) -> tuple[Entry, ...]:
    """Names of the heads' tensors in layout ``kind``; one output for all is ``lm_heads.0``."""
    size, last = config.hidden_size, config.num_layers
    block = "{}.{}.linear" if kind == "medusa" else "blocks.{}.layers.{}"
    entries = []
    for head in range(config.num_heads):
        for layer in range(config.num_layers):
            name, path = block.format(head, layer), ("blocks", head, layer)
            weight = Entry((*path, "weight"), (f"{name}.weight",), ((size, size),), transpose=True)
            entries.append(weight)
            if config.bias:
                entries.append(Entry((*path, "bias"), (f"{name}.bias",), ((size,),)))
    for index in range(config.num_outputs):
        name = f"{index}.{last}.weight" if kind == "medusa" else f"lm_heads.{index}.weight"
        shape = (config.vocab_size, size)
        entries.append(Entry(("outputs", index), (name,), (shape,), transpose=True))
    return tuple(entries)


def assemble(entries: tuple[Entry, ...], arrays: list, draft_to_target: Any) -> MedusaParams:
    """Parameters from one array for each entry."""
    nested = nest(entries, arrays)
    in_order = lambda by_index: tuple(by_index[index] for index in sorted(by_index))
    return MedusaParams(
        blocks=tuple(
            tuple(BlockParams(**block) for block in in_order(layers))
            for layers in in_order(nested["blocks"])
        ),
        outputs=in_order(nested.get("outputs", {})),
        draft_to_target=draft_to_target,
    )


# Writing.


def describe(config: MedusaConfig, kind: str, base_model: str) -> dict:
    """A config.json for ``config`` as the authors' loader, or vLLM's, reads it.

    Raises:
      ValueError: the layout cannot express the heads.
    """
    if kind == "medusa":
        lost = {
            "blocks without biases": not config.bias,
            "a reduced vocabulary": config.reduced,
            "one output for all heads": config.num_outputs == 1 < config.num_heads,
        }
    else:
        lost = {"heads without an output of their own": config.num_outputs == 0}
    found = [what for what, present in lost.items() if present]
    if found:
        raise ValueError(
            f"layout={kind!r} has no place for {', '.join(found)}; the layouts of Medusa heads are "
            "'medusa' and 'medusa-vllm'"
        )
    if kind == "medusa":
        return {
            "medusa_num_heads": config.num_heads,
            "medusa_num_layers": config.num_layers,
            "base_model_name_or_path": base_model,
        }
    return {
        "architectures": ["MedusaModel"],
        "model_type": "medusa",
        "hidden_size": config.hidden_size,
        "vocab_size": config.target_vocab_size,
        "truncated_vocab_size": config.vocab_size,
        "num_heads": config.num_heads,
        "num_hidden_layers": config.num_layers,
        "medusa_fc_bias": config.bias,
        "original_lm_head": config.num_outputs == 1 < config.num_heads,
    }

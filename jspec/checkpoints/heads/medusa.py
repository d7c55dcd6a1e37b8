"""Medusa heads in files: config.json to ``MedusaConfig``, and the names of the tensors.

Two layouts, recognised by the names of the tensors:

  * ``medusa``: as published. Head i is ``{i}.0.linear``, ``{i}.1.linear``, … and then its output
    ``{i}.{number of blocks}``. Without outputs the head uses the target's. A Medusa-2 checkpoint
    holds these tensors under ``medusa_head.`` beside a whole language model.
  * ``medusa-vllm``: vLLM's ``blocks.{i}.layers.{l}`` and ``lm_heads.{i}``. With
    ``original_lm_head`` one ``lm_head`` (or ``lm_heads.0``) serves all heads. A reduced vocabulary
    has a ``token_map`` of target ids. Biases without ``medusa_fc_bias`` raise, because vLLM drops
    them silently.

The numbers of heads and blocks come from the tensors, because published configs are wrong. Drafter:
``jspec.drafters.medusa``.
"""

import functools
import re
from typing import Any

import numpy as np

from jspec.checkpoints.families import common
from jspec.checkpoints.families.names import Entry, matrix, vector
from jspec.checkpoints.heads import base, vocabulary
from jspec.checkpoints.heads.base import HeadFormat, Layout, Tensors
from jspec.models.decoder import DecoderConfig
from jspec.models.heads.medusa import BlockParams, MedusaConfig, MedusaParams
from jspec.util.messages import shown

_BLOCKS = {
    "medusa": re.compile(r"(\d+)\.(\d+)\.linear\.weight"),
    "medusa-vllm": re.compile(r"blocks\.(\d+)\.layers\.(\d+)\.weight"),
}
_TOKEN_MAP = "token_map"
_sniff = base.by_names("medusa", _BLOCKS)


def _select(raw: dict, tensors: Tensors, config: MedusaConfig) -> Tensors:
    """Drop ``token_map``, and call vLLM's one output ``lm_heads.0``.

    Outputs over the whole vocabulary become views of the right shape; ``_reduce`` picks their rows.
    """
    selected = {name: tensor for name, tensor in tensors.items() if name != _TOKEN_MAP}
    if _sniff(raw, tensors) == ("medusa", "medusa-vllm"):
        selected.pop("lm_head.weight", None)
        for name, tensor in _outputs(tensors).items():
            whole = tensor.shape == (config.target_vocab_size, config.hidden_size)
            selected[name] = tensor[: config.vocab_size] if whole else tensor
    return selected


def _outputs(tensors: Tensors) -> dict[str, np.ndarray]:
    """Return vLLM's output matrices; ``lm_head`` takes the place of ``lm_heads.0``."""
    outputs = {n: tensors[n] for n in tensors if re.fullmatch(r"lm_heads\.\d+\.weight", n)}
    if "lm_head.weight" in tensors:
        outputs["lm_heads.0.weight"] = tensors["lm_head.weight"]
    return outputs


def _reduce(
    config: MedusaConfig, tensors: Tensors, selected: Tensors
) -> tuple[Tensors, np.ndarray | None]:
    """Sort the rows of the outputs by the target ids in ``token_map``."""
    if not config.reduced:
        return selected, None
    token_map = tensors.get(_TOKEN_MAP)
    if token_map is None:
        raise ValueError(
            f"truncated_vocab_size is {config.vocab_size} of {config.target_vocab_size}, but the "
            "file has no token_map that names those tokens"
        )
    ids, order = vocabulary.from_ids(token_map, config.vocab_size, config.target_vocab_size)
    # vLLM also takes outputs over the whole vocabulary, and picks their rows itself.
    rows = {config.vocab_size: order, config.target_vocab_size: token_map[order]}
    outputs = _outputs(tensors).items()
    return {**selected, **{name: tensor[rows[len(tensor)]] for name, tensor in outputs}}, ids


def _assemble(_: MedusaConfig, nested: dict, ids: Any) -> MedusaParams:
    blocks = tuple(
        tuple(BlockParams(**block) for block in base.by_index(layers))
        for layers in base.by_index(nested["blocks"])
    )
    return MedusaParams(blocks, base.by_index(nested.get("outputs", {})), ids)


def _read_config(raw: dict, tensors: Tensors, target: DecoderConfig, layout: str) -> MedusaConfig:
    matches = [match for name in tensors if (match := _BLOCKS[layout].fullmatch(name))]
    num_heads, num_layers = common.counted([match.groups() for match in matches], len(tensors))
    base.check_width("heads", tensors[matches[0][0]].shape[-1:], target)
    sizes = {
        "num_heads": num_heads,
        "num_layers": num_layers,
        "hidden_size": target.hidden_size,
        "target_vocab_size": target.vocab_size,
        "capture_layers": (target.num_layers,),
    }
    if layout == "medusa":
        outputs = any(re.fullmatch(r"\d+\.\d+\.weight", name) for name in tensors)
        num_outputs = num_heads if outputs else 0
        return MedusaConfig(vocab_size=target.vocab_size, num_outputs=num_outputs, **sizes)
    for key, name in (("num_heads", "num_heads"), ("num_hidden_layers", "num_layers")):
        if raw.get(key) not in (None, sizes[name]):
            raise ValueError(f"{key} is {shown(raw[key])}, but the file holds {sizes[name]}")
    if raw.get("logit_scale", 1.0) not in (None, 1, 1.0):
        raise ValueError(f"logit_scale={shown(raw['logit_scale'])} is not supported, only 1.0")
    if raw.get("vocab_size") not in (None, target.vocab_size):
        raise ValueError(
            f"the heads were made for another target: vocab_size is {shown(raw['vocab_size'])}, "
            f"and that of the target {target.vocab_size}"
        )
    return MedusaConfig(
        vocab_size=common.whole_or(raw, "truncated_vocab_size", target.vocab_size),
        num_outputs=1 if common.flag(raw, "original_lm_head") else num_heads,
        bias=common.flag(raw, "medusa_fc_bias"),
        **sizes,
    )


def _table(layout: str, config: MedusaConfig) -> tuple[Entry, ...]:
    """Return the entries of the heads; an output for all heads is ``lm_heads.0``."""
    size, last = config.hidden_size, config.num_layers
    block = "{}.{}.linear" if layout == "medusa" else "blocks.{}.layers.{}"
    entries = []
    for head in range(config.num_heads):
        for layer in range(config.num_layers):
            name, path = block.format(head, layer), ("blocks", head, layer)
            entries.append(matrix((*path, "weight"), f"{name}.weight", size, size))
            if config.bias:
                entries.append(vector((*path, "bias"), f"{name}.bias", size))
    for index in range(config.num_outputs):
        name = f"{index}.{last}.weight" if layout == "medusa" else f"lm_heads.{index}.weight"
        entries.append(matrix(("outputs", index), name, config.vocab_size, size))
    return tuple(entries)


def _describe(config: MedusaConfig, _: DecoderConfig, target_name: str) -> dict:
    """Return a config.json that the authors' loader reads."""
    features = {
        "blocks without biases": not config.bias,
        "a reduced vocabulary": config.reduced,
        "one output for all heads": config.num_outputs == 1 < config.num_heads,
    }
    base.refuse("medusa", features, "write 'medusa-vllm'")
    return {
        "medusa_num_heads": config.num_heads,
        "medusa_num_layers": config.num_layers,
        "base_model_name_or_path": target_name,
    }


def _describe_vllm(config: MedusaConfig, *_: Any) -> dict:
    """Return a config.json that vLLM reads."""
    features = {"heads without an output of their own": config.num_outputs == 0}
    base.refuse("medusa-vllm", features, "write 'medusa'")
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


def _extra(_: MedusaConfig, params: MedusaParams, _dtype: np.dtype) -> dict[str, np.ndarray]:
    if params.draft_to_target is None:
        return {}
    return {_TOKEN_MAP: np.asarray(params.draft_to_target).astype(np.int64)}


def _layout(name: str, describe, **options) -> Layout:
    return Layout(name, functools.partial(_table, name), describe, **options)


FORMAT = HeadFormat(
    title="Medusa",
    kinds=("medusa",),
    owns=lambda config: isinstance(config, MedusaConfig),
    layouts=(
        _layout("medusa-vllm", _describe_vllm, extra=_extra),
        _layout("medusa", _describe, torch_file="medusa_lm_head.pt", names_target=True),
    ),
    sniff=_sniff,
    read_config=_read_config,
    assemble=_assemble,
    select=_select,
    reduce=_reduce,
)

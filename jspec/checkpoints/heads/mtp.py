"""MTP modules in files: the tensors' names, and what each family does its own way.

Two layouts. Both lie in the files of a target, where they are numbered from 0 (``mimo``) or go on
from its last block (``deepseek``), or in files of their own under the same names:

  * ``mimo``: MiMo-7B, ``model.mtp_layers.k.*``. Takes [f; e], and hands on what its norm gives out.
    Here it also serves every target without names of its own: its blocks are those of Qwen2 and
    Llama, and a Qwen2 target with such modules is what vLLM calls a MiMo.
  * ``deepseek``: DeepSeek-V3, R1 and GLM-4.5, ``model.layers.{n + k}.*``. Takes [e; f], and hands
    on what its block gives out, without the norm: so vLLM; SGLang and transformers norm it. With as
    many tokens as modules, one in published files, the two are the same.

Copies of the target's embedding and output matrix, which ``deepseek`` files have, are not read: as
in transformers, the target's own serve. The embedding at position 0 counts as zero as in vLLM.
"""

import dataclasses
import re
from collections.abc import Mapping
from typing import Any, Literal

import numpy as np

from jspec.checkpoints import families
from jspec.checkpoints.families.names import Entry, block_table, blocks, nest
from jspec.models.decoder import DecoderConfig
from jspec.models.heads.mtp import ModuleParams, MtpConfig, MtpParams

MtpLayout = Literal["mimo", "deepseek"]
_FIRST = {
    "mimo": re.compile(r"mtp_layers\.0\.input_proj\.weight"),
    "deepseek": re.compile(r"layers\.\d+\.eh_proj\.weight"),
}
# Of the embedding's norm, the feature's norm, the projection and the norm at the end.
_OWN_NAMES = {
    "mimo": ("token_layernorm", "hidden_layernorm", "input_proj", "final_layernorm"),
    "deepseek": ("enorm", "hnorm", "eh_proj", "shared_head.norm"),
}
_COPIES = ("embed_tokens.weight", "shared_head.head.weight")
# What vLLM calls such modules, by the ``model_type`` of the target.
_CLASSES = {
    "deepseek_v3": ("deepseek_mtp", "DeepSeekMTPModel"),
    "glm4_moe": ("glm4_moe_mtp", "Glm4MoeMTPModel"),
}


# Reading.


def layout(tensors: Mapping[str, Any]) -> MtpLayout | None:
    """The layout of such names, None for something else; names without ``model.``."""
    for name, first in _FIRST.items():
        if any(map(first.fullmatch, tensors)):
            return name
    return None


def read(
    raw: dict, tensors: Mapping[str, Any], target: DecoderConfig, layout: MtpLayout
) -> MtpConfig:
    """The modules that the names say there are, for ``target``.

    Raises:
      ValueError: the modules were made for another target.
    """
    if raw.get("speculators_model_type") is not None:
        raise ValueError(
            "modules in the files of the speculators library are not supported: it trains them to "
            "be used in another way than servers do; write them into their target's files (its "
            "`stitch`), and load that"
        )
    count, projection = 0, _OWN_NAMES[layout][2]
    while f"{_prefix(layout, target.num_layers, count)}.{projection}.weight" in tensors:
        count += 1
    if count == 0:
        raise ValueError(
            f"the modules were made for another target: there is none for one of "
            f"{target.num_layers} blocks, {_prefix(layout, target.num_layers, 0)}.{projection}"
        )
    shape = tensors[f"{_prefix(layout, target.num_layers, 0)}.{projection}.weight"].shape
    if shape[:1] != (target.hidden_size,):
        raise ValueError(
            f"the modules were made for another target: they are {shape[0]} wide where the target "
            f"has {target.hidden_size}"
        )
    return config_for(target, layout, count)


def config_for(target: DecoderConfig, layout: MtpLayout, modules: int = 1) -> MtpConfig:
    """Modules for ``target`` that ``layout`` can hold."""
    experts = target.moe and dataclasses.replace(target.moe, first_dense=0)
    network = dataclasses.replace(target, num_layers=modules, windows=(), moe=experts)
    return MtpConfig(
        network,
        (target.num_layers,),
        hidden_first=layout == "mimo",
        feeds_normed=layout != "deepseek",
    )


def layout_of(config: MtpConfig) -> MtpLayout:
    """The layout that says of modules what they are."""
    return "mimo" if config.hidden_first else "deepseek"


def natural_layout(target: DecoderConfig) -> MtpLayout:
    """The layout of modules in the files of ``target``."""
    return "mimo" if target.moe is None and target.mla is None else "deepseek"


def own(config: MtpConfig, tensors: Mapping[str, Any], layout: MtpLayout) -> dict[str, Any]:
    """The tensors of the modules alone, without those of the target and the copies of them."""
    stems = [_prefix(layout, config.capture_layers[0], k) for k in range(config.n_predict)]
    copies = {f"{stem}.{name}" for stem in stems for name in _COPIES}
    starts = tuple(f"{stem}." for stem in stems)
    return {
        name: tensor
        for name, tensor in tensors.items()
        if name.startswith(starts) and name not in copies
    }


# Both ways.


def table(config: MtpConfig, layout: MtpLayout) -> tuple[Entry, ...]:
    """Names of the modules' tensors, without ``model.``."""
    hidden, first, entries = config.hidden_size, config.capture_layers[0], []
    for module in range(config.n_predict):
        stem = _prefix(layout, first, module)
        at = lambda field, module=module: ("modules", module, field)
        names = [(f"{stem}.{name}.weight",) for name in _OWN_NAMES[layout]]
        entries += [
            Entry(at("embedding_norm"), names[0], ((hidden,),)),
            Entry(at("hidden_norm"), names[1], ((hidden,),)),
            Entry(at("projection"), names[2], ((hidden, 2 * hidden),), transpose=True),
            Entry(at("norm"), names[3], ((hidden,),)),
        ]
    for module in range(config.n_predict):
        entries += block_table(config.network, module, _prefix(layout, first, module))
    return tuple(entries)


def _prefix(layout: MtpLayout, num_layers: int, module: int) -> str:
    """How the names of a module's block begin."""
    return f"mtp_layers.{module}" if layout == "mimo" else f"layers.{num_layers + module}"


def assemble(entries: tuple[Entry, ...], arrays: list) -> MtpParams:
    """Parameters from one array for each entry."""
    nested = nest(entries, arrays)
    modules = nested.pop("modules")
    return MtpParams(
        modules=tuple(ModuleParams(**modules[index]) for index in sorted(modules)),
        layers=blocks(nested),
    )


# Writing.


def describe(
    config: MtpConfig, layout: MtpLayout, target: DecoderConfig, target_name: str = ""
) -> dict:
    """A config.json for modules in files of their own: the target's, under the modules' name.

    Raises:
      ValueError: the layout cannot express the modules.
    """
    del target_name
    check(config, layout, target)
    raw = families.describe(target)
    kind, name = _CLASSES.get(raw["model_type"], ("mimo_mtp", "MiMoMTPModel"))
    return raw | {
        "architectures": [name],
        "model_type": kind,
        "num_nextn_predict_layers": config.n_predict,
    }


def check(config: MtpConfig, layout: MtpLayout, target: DecoderConfig) -> None:
    """Refuses modules that would be read back as others.

    Raises:
      ValueError: the layout cannot express the modules, or they are not for ``target``.
    """
    same = config_for(target, layout, config.n_predict)
    work = ("cache_dtype", "activation_dtype", "attention")
    plain = lambda c: dataclasses.replace(
        c, network=dataclasses.replace(c.network, **{key: "float32" for key in work})
    )
    if plain(same) != plain(config):
        raise ValueError(
            f"layout={layout!r} cannot say of modules for this target what they are: they read "
            f"back with hidden_first={same.hidden_first}, feeds_normed={same.feeds_normed} and "
            "the target's sizes"
        )


def required_repeats(
    config: MtpConfig, layout: MtpLayout, embedding: np.ndarray, head: np.ndarray
) -> dict[str, np.ndarray]:
    """Copies of the target's embedding and output matrix [V, D], which servers look for."""
    if layout != "deepseek":
        return {}
    prefixes = [_prefix(layout, config.capture_layers[0], k) for k in range(config.n_predict)]
    pairs = zip(_COPIES, (embedding, head), strict=True)
    return {f"{prefix}.{name}": tensor for name, tensor in pairs for prefix in prefixes}

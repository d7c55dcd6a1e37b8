"""MTP modules in files: the names of the tensors, and the conventions of each family.

Three layouts. The tensors lie in the files of a target, numbered from 0 (``mimo``), on from its
last block (``deepseek``) or apart from its own (``qwen``), or in files of their own under the same
names.

  * ``mimo``: MiMo-7B, ``model.mtp_layers.k.*``. A module takes [f; e] and feeds back its normed
    output. It also serves every target without names of its own: its blocks are those of Qwen2 and
    Llama, and vLLM treats a Qwen2 target with such modules as a MiMo.
  * ``deepseek``: DeepSeek-V3, R1 and GLM-4.5, ``model.layers.{n + k}.*``. A module takes [e; f] and
    feeds back the output of its block without the norm, as in vLLM. SGLang and transformers norm
    it. With one token for each module the two are equal.
  * ``qwen``: Qwen3-Next and Qwen3.5, ``mtp.*``. A module takes [e; f] and feeds back its normed
    output. It has a block of attention, as the last one of the target.

``deepseek`` files hold copies of the target's embedding and output matrix. jspec uses the target's
own instead, as transformers does. The embedding at position 0 counts as zero, as in vLLM, but for
``qwen``. Drafter: ``jspec.drafters.mtp``.
"""

import dataclasses
import functools
import re
from typing import Literal

import numpy as np

from jspec.checkpoints import families
from jspec.checkpoints.families import text_part
from jspec.checkpoints.families.names import Entry, block_table, blocks, matrix, vector
from jspec.checkpoints.heads import base
from jspec.checkpoints.heads.base import HeadFormat, Layout, Tensors
from jspec.checkpoints.quantised import formats
from jspec.models.blocks.attention import Attention
from jspec.models.blocks.delta_rule import DeltaRule
from jspec.models.blocks.mlp import GatedMlp
from jspec.models.decoder import DecoderConfig
from jspec.models.heads.mtp import ModuleParams, MtpConfig, MtpParams
from jspec.util.messages import shown

MtpLayout = Literal["mimo", "deepseek", "qwen"]
_FIRST = {
    "mimo": re.compile(r"mtp_layers\.0\.input_proj\.weight"),
    "deepseek": re.compile(r"layers\.\d+\.eh_proj\.weight"),
    "qwen": re.compile(r"mtp\.fc\.weight"),
}
# The norm of the embedding, the norm of the feature, the projection, and the final norm.
_NAMES = {
    "mimo": ("token_layernorm", "hidden_layernorm", "input_proj", "final_layernorm"),
    "deepseek": ("enorm", "hnorm", "eh_proj", "shared_head.norm"),
    "qwen": ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm"),
}
_COPIES = ("embed_tokens.weight", "shared_head.head.weight")
# vLLM's model_type and class of such modules, by the ``model_type`` of the target.
_CLASSES = {
    "deepseek_v3": ("deepseek_mtp", "DeepSeekMTPModel"),
    "glm4_moe": ("glm4_moe_mtp", "Glm4MoeMTPModel"),
    "qwen3_next": ("qwen3_next_mtp", "Qwen3NextMTP"),
    "qwen3_5_text": ("qwen3_5_mtp", "Qwen3_5MTP"),
    "qwen3_5_moe_text": ("qwen3_5_mtp", "Qwen3_5MoeMTP"),
}


def _read_config(raw: dict, tensors: Tensors, target: DecoderConfig, layout: str) -> MtpConfig:
    if raw.get("speculators_model_type") is not None:
        raise ValueError(
            "modules in the files of the speculators library are not supported, because it trains "
            "them for another use than servers make of them; write them into their target's files "
            "(its `stitch`), and load that"
        )
    projection = lambda module: f"{_prefix(layout, target.num_layers, module)}.{_NAMES[layout][2]}"
    count = 0
    while f"{projection(count)}.weight" in tensors:
        count += 1
        if layout == "qwen":  # Several blocks would share one projection.
            break
    if count == 0:
        raise ValueError(
            f"the modules were made for another target: there is none for one of "
            f"{target.num_layers} blocks, {projection(0)}"
        )
    base.check_width("modules", tensors[f"{projection(0)}.weight"].shape[:1], target)
    return config_for(target, layout, count)


def _read_target(raw: dict) -> DecoderConfig:
    """Return the target in whose files the modules lie."""
    raw = text_part.config_of(raw)
    if raw.get("model_type") not in [*families.FAMILIES]:
        raise ValueError(
            f"config.json is not a target's (model_type {shown(raw.get('model_type'))}); pass the "
            "target_config that the modules are for"
        )
    return families.find(raw).read(formats.without(raw))


def _select(_: dict, tensors: Tensors, config: MtpConfig) -> Tensors:
    """Drop the tensors of the target, and the copies of them."""
    prefixes = tuple(f"{prefix}." for prefix in _prefixes(config))
    copies = {prefix + name for prefix in prefixes for name in _COPIES}
    names = [name for name in tensors if name.startswith(prefixes) and name not in copies]
    return {name: tensors[name] for name in names}


def _assemble(config: MtpConfig, nested: dict, _: None) -> MtpParams:
    modules = tuple(ModuleParams(**fields) for fields in base.by_index(nested["modules"]))
    return MtpParams(modules, blocks(nested, config.network))


def config_for(target: DecoderConfig, layout: MtpLayout, modules: int = 1) -> MtpConfig:
    """Return the config of modules for ``target`` that ``layout`` can hold."""
    last = target.layers[-1]
    if layout == "qwen":
        last = next(x for x in reversed(target.layers) if isinstance(x.mixer, Attention))
        if modules > 1:
            raise ValueError(f"layout 'qwen' has one module, not {modules}; train one")
    if last.mixer.window is not None:
        last = dataclasses.replace(last, mixer=dataclasses.replace(last.mixer, window=None))
    return MtpConfig(
        dataclasses.replace(target, layers=(last,) * modules),
        (target.num_layers,),
        hidden_first=layout == "mimo",
        feeds_normed=layout != "deepseek",
        zeroes_first=layout != "qwen",
    )


def natural_layout(target: DecoderConfig) -> MtpLayout:
    """Return the layout of modules in the files of ``target``."""
    if any(isinstance(layer.mixer, DeltaRule) for layer in target.layers):
        return "qwen"
    last = target.layers[-1]
    plain = type(last.mixer) is Attention and type(last.feed_forward) is GatedMlp
    return "mimo" if plain else "deepseek"


def _table(config: MtpConfig) -> tuple[Entry, ...]:
    """Return the entries of the modules, without ``model.``."""
    hidden, entries, prefixes = config.hidden_size, [], _prefixes(config)
    for module, prefix in enumerate(prefixes):
        names = [f"{prefix}.{name}.weight" for name in _NAMES[_layout_of(config)]]
        path = ("modules", module)
        entries += [
            vector((*path, "embedding_norm"), names[0], hidden),
            vector((*path, "hidden_norm"), names[1], hidden),
            matrix((*path, "projection"), names[2], hidden, 2 * hidden),
            vector((*path, "norm"), names[3], hidden),
        ]
    for module, prefix in enumerate(prefixes):
        block = f"{prefix}.layers.{module}" if _layout_of(config) == "qwen" else prefix
        entries += block_table(config.network, module, block)
    return tuple(entries)


def _layout_of(config: MtpConfig) -> MtpLayout:
    """Return the only layout that can express the modules, if any can; see ``check``."""
    if config.hidden_first:
        return "mimo"
    return "deepseek" if config.zeroes_first else "qwen"


def _prefixes(config: MtpConfig) -> list[str]:
    layout, num_layers = _layout_of(config), config.capture_layers[0]
    return [_prefix(layout, num_layers, module) for module in range(config.n_predict)]


def _prefix(layout: MtpLayout, num_layers: int, module: int) -> str:
    if layout == "qwen":
        return "mtp"
    return f"mtp_layers.{module}" if layout == "mimo" else f"layers.{num_layers + module}"


def _describe(layout: MtpLayout, config: MtpConfig, target: DecoderConfig, _: str) -> dict:
    """Return a config.json for files of their own: the target's, with the modules' class."""
    check(config, layout, target)
    raw = families.describe(target)
    model_type, architecture = _CLASSES.get(raw["model_type"], ("mimo_mtp", "MiMoMTPModel"))
    names = {"architectures": [architecture], "model_type": model_type}
    return raw | names | {"num_nextn_predict_layers": config.n_predict}


def check(config: MtpConfig, layout: MtpLayout, target: DecoderConfig) -> None:
    """Check that a layout holds modules for ``target`` as they are."""
    expected = config_for(target, layout, config.n_predict)
    machine = ("cache_dtype", "activation_dtype", "attention")
    plain = lambda c: dataclasses.replace(
        c, network=dataclasses.replace(c.network, **{key: "float32" for key in machine})
    )
    if plain(expected) != plain(config):
        raise ValueError(
            f"layout={layout!r} cannot express these modules: it reads them back with "
            f"hidden_first={expected.hidden_first}, feeds_normed={expected.feeds_normed} and the "
            "target's sizes; these are modules of another target or another layout"
        )


def copies(config: MtpConfig, embedding: np.ndarray, head: np.ndarray) -> dict[str, np.ndarray]:
    """Return the copies of the target's embedding and output matrix [V, D] that servers need."""
    if _layout_of(config) != "deepseek":
        return {}
    pairs = zip(_COPIES, (embedding, head), strict=True)
    return {f"model.{pre}.{name}": tensor for name, tensor in pairs for pre in _prefixes(config)}


def _layout(name: MtpLayout) -> Layout:
    rename = str if name == "qwen" else "model.{}".format
    return Layout(name, _table, functools.partial(_describe, name), rename=rename)


FORMAT = HeadFormat(
    title="MTP",
    kinds=("mtp",),
    owns=lambda config: isinstance(config, MtpConfig),
    layouts=(_layout("mimo"), _layout("deepseek"), _layout("qwen")),
    sniff=base.by_names("mtp", _FIRST),
    read_config=_read_config,
    assemble=_assemble,
    select=_select,
    read_target=_read_target,
    default_layout=_layout_of,
    missing="has no modules for later tokens (MTP); take a target that was published with some, or "
    "train them with `python -m training.distill mtp`",
)

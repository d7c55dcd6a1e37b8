"""Model families: config.json to ``DecoderConfig``, and the names of the tensors.

A new family is one file here and its name in ``_MODULES``. Functions raise ValueError for keys that
are missing, malformed, contradictory or not supported, and for decoders that no family can express.
"""

import dataclasses
import difflib
import re
from collections.abc import Iterator
from typing import Any

from jspec.checkpoints.families import (
    apertus,
    cohere2,
    common,
    deepseek_v2,
    deepseek_v3,
    ernie4_5,
    exaone4,
    gemma2,
    gemma3_text,
    gemma4_text,
    glm4,
    glm4_moe,
    gpt_oss,
    granite,
    hunyuan_v1_dense,
    llama,
    llama4_text,
    mimo,
    minimax_m2,
    ministral3,
    mistral,
    mixtral,
    muse_glimmer_text,
    olmo2,
    olmo3,
    olmoe,
    phi3,
    phimoe,
    qwen2,
    qwen2_moe,
    qwen3,
    qwen3_5_moe_text,
    qwen3_5_text,
    qwen3_moe,
    qwen3_next,
    seed_oss,
    smollm3,
)
from jspec.checkpoints.families.common import Family
from jspec.models.decoder import DecoderConfig
from jspec.util.messages import shown

# By ``model_type``. ``describe`` uses the first family that can express a decoder.
_MODULES = (
    llama,
    mistral,
    qwen3,
    qwen2,
    mimo,
    deepseek_v3,
    glm4_moe,
    deepseek_v2,
    qwen3_moe,
    qwen2_moe,
    mixtral,
    olmoe,
    phimoe,
    minimax_m2,
    llama4_text,
    qwen3_5_text,
    qwen3_5_moe_text,
    qwen3_next,
    olmo2,
    olmo3,
    smollm3,
    phi3,
    granite,
    glm4,
    seed_oss,
    exaone4,
    cohere2,
    gpt_oss,
    gemma2,
    gemma3_text,
    gemma4_text,
    ministral3,
    hunyuan_v1_dense,
    ernie4_5,
    apertus,
    muse_glimmer_text,
)
FAMILIES: dict[str, Family] = {module.FAMILY.model_type: module.FAMILY for module in _MODULES}


def find(raw: dict) -> Family:
    """Return the family of a config.json, by ``model_type`` and ``architectures``."""
    known = ", ".join(family.architecture for family in FAMILIES.values())
    architectures = common.architectures(raw)
    kind = raw.get("model_type")
    family = FAMILIES.get(kind) if isinstance(kind, str) else None
    if "model_type" not in raw:
        family = next((f for f in FAMILIES.values() if [f.architecture] == architectures), None)
    named = shown(architectures)[1:-1].replace("'", "")
    if family is None or architectures not in ([], [family.architecture]):
        raise ValueError(
            f"architecture {named or 'unnamed'} (model_type {shown(kind)}) is not "
            f"supported; known, for text generation: {known}{_nearest(raw)}"
        )
    return family


# Keys without an effect on a network's output, or that are not of its network.
_HARMLESS = re.compile(
    r"architectures|model_type|auto_map|.*_id|.*dtype|.*drop(out)?|.*version|.*loss.*|use_cache"
    r"|initializer_range|output_.*|pretraining_tp|rope_(theta|scaling|parameters)|max_window_layers"
)


def _nearest(raw: dict) -> str:
    """Return a clause with the family whose name is the nearest to an unknown one's, or ""."""
    names = difflib.get_close_matches(str(raw.get("model_type")), FAMILIES, n=1)
    if not names or names[0] == raw.get("model_type"):
        return ""
    family = FAMILIES[names[0]]
    start = f"; the nearest is model_type {names[0]!r}, "
    try:
        keys = family.write(family.read(raw)).keys()
    except ValueError as error:
        return f"{start}but as such it fails: {error}"
    known = {*keys, *family.defaults, *family.neutral, *common.NEUTRAL}
    others = [key for key in raw if key not in known and not _HARMLESS.fullmatch(str(key))]
    if not others:
        return f"{start}which has the same keys; if the network is the same too, set model_type"
    return f"{start}which lacks {', '.join(shown(key) for key in others[:8])}"


def describe(config: DecoderConfig) -> dict:
    """Return a config.json for ``config``, of the first family that can express it."""
    losses = []
    for family in FAMILIES.values():
        try:
            raw = family.write(config)
            again = family.read(raw)
        except ValueError:  # its layers are of another kind, or lack sizes that it needs
            losses.append(f"{family.model_type} is another kind of network")
            continue
        changed = different_fields(config, again)
        if not changed:
            return raw
        losses.append(f"{family.model_type} loses {', '.join(changed)}")
    raise ValueError(f"no known architecture describes this config: {'; '.join(losses)}")


def different_fields(one: DecoderConfig, other: DecoderConfig) -> list[str]:
    """Return the names of the fields that differ, without the machine's working dtypes.

    For layers, those are fields of their parts.
    """
    machine = ("cache_dtype", "activation_dtype", "kv_cache_dtype")
    return [name for name in dict.fromkeys(_different(one, other)) if name not in machine]


def _different(one: Any, other: Any, name: str = "") -> Iterator[str]:
    """Yield the names of the fields in which two configs differ, innermost ones."""
    if one == other:
        return
    if type(one) is not type(other) or not dataclasses.is_dataclass(one):
        pairs = list(zip(one, other, strict=False)) if name == "layers" else []
        if not pairs or len(one) != len(other):
            yield name
        for pair in pairs:
            yield from _different(*pair, "layer")
        return
    for field, value in vars(one).items():
        yield from _different(value, vars(other)[field], field)

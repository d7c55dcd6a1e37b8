"""Model families: which config.json makes which decoder, and where its tensors lie in the files.

A new family is one file here and one line in ``FAMILIES``.
"""

import dataclasses

from jspec.checkpoints.families import (
    common,
    deepseek_v3,
    glm4_moe,
    llama,
    mimo,
    mistral,
    qwen2,
    qwen3,
)
from jspec.checkpoints.families.common import Family
from jspec.models.decoder import DecoderConfig
from jspec.util.messages import shown

# By ``model_type``. Writing takes the first family that can say everything about a decoder.
FAMILIES = {
    family.model_type: family
    for family in (
        llama.FAMILY,
        mistral.FAMILY,
        qwen3.FAMILY,
        qwen2.FAMILY,
        mimo.FAMILY,
        deepseek_v3.FAMILY,
        glm4_moe.FAMILY,
    )
}
# Some of their blocks keep a state that cannot be taken back when drafts are refused.
RECURRENT = ("qwen3_next", "qwen3_5", "qwen3_5_moe", "qwen3_5_text", "qwen3_5_moe_text")


def find(raw: dict) -> Family:
    """The family of a config.json, by ``model_type`` and, where given, ``architectures``.

    Raises:
      ValueError: the architecture is not one of ours; the message lists those that are.
    """
    known = ", ".join(family.architecture for family in FAMILIES.values())
    architectures = common.architectures(raw)
    if raw.get("model_type") in RECURRENT:
        raise ValueError(
            f"model_type {raw['model_type']!r} is not supported yet: its gated delta-rule blocks "
            "keep a recurrent state in place of keys and values, and a refused draft cannot be "
            f"taken back out of it; known, for text generation: {known}"
        )
    kind = raw.get("model_type")
    family = FAMILIES.get(kind) if isinstance(kind, str) else None
    if "model_type" not in raw:
        family = next((f for f in FAMILIES.values() if [f.architecture] == architectures), None)
    named = shown(architectures)[1:-1].replace("'", "")
    if family is None or architectures not in ([], [family.architecture]):
        raise ValueError(
            f"architecture {named or 'unnamed'} (model_type {shown(kind)}) is not "
            f"supported; known, for text generation: {known}"
        )
    return family


def describe(config: DecoderConfig) -> dict:
    """A config.json for ``config``, in the layout of the first family that can express it.

    Raises:
      ValueError: no family can; the message says what gets lost in each.
    """
    lost = []
    for family in FAMILIES.values():
        raw = family.write(config)
        try:
            again = family.read(raw)
        except ValueError:  # it has sizes that this decoder lacks
            lost.append(f"{family.model_type} is another kind of network")
            continue
        changed = different_fields(config, again)
        if not changed:
            return raw
        lost.append(f"{family.model_type} loses {', '.join(changed)}")
    raise ValueError(f"no known architecture describes this config: {'; '.join(lost)}")


def different_fields(one: DecoderConfig, other: DecoderConfig) -> list[str]:
    """Names of the fields that differ, apart from the precision that a machine works in."""
    return [
        field.name
        for field in dataclasses.fields(DecoderConfig)
        if field.name not in ("cache_dtype", "activation_dtype")
        and getattr(one, field.name) != getattr(other, field.name)
    ]

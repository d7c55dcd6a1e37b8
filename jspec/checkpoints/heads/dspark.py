"""DSpark heads in files: DFlash's layouts with a Markov head and a confidence head.

A DSpark head drafts from the root's slot on unless ``sample_from_anchor`` is false, as it is
trained and served. SpecForge's own loop skips that slot. Drafter: ``jspec.drafters.dflash``.
"""

import dataclasses
from typing import Any

from jspec.checkpoints.families import common
from jspec.checkpoints.families.names import Entry, matrix, vector
from jspec.checkpoints.heads import base, dflash, speculators
from jspec.checkpoints.heads.base import HeadFormat, Tensors
from jspec.models.decoder import DecoderConfig
from jspec.models.heads.dflash import DFlashConfig, DFlashParams
from jspec.models.heads.dspark import SparkConfig, SparkParams
from jspec.util.messages import shown

_MARKOV, _CONFIDENCE = "markov_head.", "confidence_head.proj"
_MIXED = {"gated": "gate_proj", "rnn": "joint_proj"}


def _sniff(raw: dict, tensors: Tensors) -> tuple[str, str] | None:
    layout = dflash.layout_of(raw, tensors)
    return ("dspark", layout) if layout and _is_spark(raw, tensors) else None


def _is_spark(raw: dict, tensors: Tensors) -> bool:
    """Return whether the tensors or, without such tensors, config.json are those of DSpark."""
    if any(name.startswith((_MARKOV, _CONFIDENCE)) for name in tensors):
        return True
    nested = raw.get("dflash_config")
    stated = [raw.get(speculators.KEY)]
    if isinstance(nested, dict):
        stated.append(nested.get("projector_type"))
    return "dspark" in stated or any("DSpark" in name for name in common.architectures(raw))


def _read_config(raw: dict, tensors: Tensors, target: DecoderConfig, layout: str) -> DFlashConfig:
    config = dflash.read_config(raw, tensors, target, layout, from_anchor=True)
    spark = _read_spark(dflash.settings(raw), tensors, config.hidden_size)
    return dataclasses.replace(config, spark=spark)


def _read_spark(settings: dict, tensors: Tensors, hidden: int) -> SparkConfig:
    """Return the config that the tensors imply; config.json must not contradict it."""
    before = tensors.get(f"{_MARKOV}markov_w1.weight")
    chances = tensors.get(f"{_CONFIDENCE}.weight")
    rank = 0 if before is None else before.shape[-1]
    kinds = [kind for kind, part in _MIXED.items() if f"{_MARKOV}{part}.weight" in tensors]
    markov = kinds[0] if kinds else "vanilla"
    stated = {"markov_rank": rank} | ({"markov_head_type": markov} if rank else {})
    for key, value in stated.items():
        if (other := settings.get(key)) not in (None, value):
            raise ValueError(f"{key} is {shown(other)}, but the tensors are those of {value!r}")
    sees_token = chances is not None and chances.shape[-1] != hidden
    return SparkConfig(rank, markov, chances is not None, sees_token and rank > 0)


def _table(config: DFlashConfig) -> tuple[Entry, ...]:
    spark, entries = config.spark, list(dflash.table(config))
    if spark.rank:
        names = [f"{_MARKOV}markov_{part}.weight" for part in ("w1", "w2")]
        shape = (config.target_vocab_size, spark.rank)
        entries.append(Entry(("spark", "before"), (names[0],), (shape,)))
        entries.append(matrix(("spark", "bias"), names[1], config.vocab_size, spark.rank))
    modules = {"mix": f"{_MARKOV}{_MIXED.get(spark.markov)}", "confidence": _CONFIDENCE}
    for field, (inputs, outputs) in spark.sizes(config.hidden_size).items():
        name = modules[field]
        entries.append(matrix(("spark", field), f"{name}.weight", outputs, inputs))
        entries.append(vector(("spark", f"{field}_bias"), f"{name}.bias", outputs))
    return tuple(entries)


def _assemble(config: DFlashConfig, nested: dict, draft_to_target: Any) -> DFlashParams:
    params = dflash.assemble(config, nested, draft_to_target)
    return params.replace(spark=SparkParams(**params.spark or {}))


def _describe(layout: str, config: DFlashConfig, target: DecoderConfig, target_name: str) -> dict:
    raw = dflash.describe(layout, config, target, target_name, kind="dspark")
    keys = {
        "markov_rank": config.spark.rank,
        "markov_head_type": config.spark.markov,
        "enable_confidence_head": config.spark.confidence,
        "confidence_head_with_markov": config.spark.confidence_sees_token,
    }
    if layout == "dflash-speculators":
        return raw | keys
    mixer = config.network.layers[0].mixer
    same = mixer.num_heads == mixer.num_kv_heads
    raw["dflash_config"] |= keys | {
        "projector_type": "dspark",
        "attention_mode": "mha" if same else "gqa",
        "sample_from_anchor": config.from_anchor,
    }
    return raw


FORMAT = HeadFormat(
    title="DSpark",
    kinds=("dspark",),
    owns=lambda config: isinstance(config, DFlashConfig) and config.spark is not None,
    layouts=dflash.layouts(_table, _describe),
    sniff=_sniff,
    read_config=_read_config,
    assemble=_assemble,
    select=base.select_weights,
    reduce=base.reduce_by_offsets,
)

"""Ministral 3: Mistral with YaRN, and queries that grow with the position."""

import dataclasses

from jspec.checkpoints.families import common, mistral, scaling
from jspec.checkpoints.families.scaling import positive
from jspec.models.decoder import DecoderConfig, Layer

_GROWTH = "llama_4_scaling_beta"
_DEFAULT_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 1e6,
    "factor": 16.0,
    "original_max_position_embeddings": 16384,
    "mscale_all_dim": 1.0,
    "mscale": 1.0,
    _GROWTH: 0.1,
}


def _respelled(raw: dict) -> dict:
    """Return a config.json whose ``_GROWTH`` is beside the rotary keys."""
    raw = scaling.with_default(raw, _DEFAULT_ROPE)
    rope = scaling.merged(raw)
    growth = rope.pop(_GROWTH, None)
    if rope.get("max_position_embeddings") == raw.get("max_position_embeddings"):
        rope.pop("max_position_embeddings", None)
    return raw | {"rope_parameters": rope, "rope_scaling": None, _GROWTH: growth}


def _layers(raw: dict) -> tuple[Layer, ...]:
    layers = mistral.FAMILY.layers(raw)
    if raw[_GROWTH] is None:
        return layers
    growth, rope = positive(_GROWTH, raw[_GROWTH]), layers[0].mixer.rope
    if not rope.original_length:
        raise ValueError(f"{_GROWTH} needs original_max_position_embeddings; give both")
    mixer = dataclasses.replace(layers[0].mixer, query_growth=growth)
    return tuple(dataclasses.replace(layer, mixer=mixer) for layer in layers)


def _describe(config: DecoderConfig) -> dict:
    mixer = common.attention_of(config)
    written = scaling.write(mixer.rope, config.max_positions)["rope_parameters"]
    rope = written | ({_GROWTH: mixer.query_growth} if mixer.query_growth else {})
    return mistral.FAMILY.describe(config) | {"rope_parameters": rope, "rope_scaling": None}


FAMILY = dataclasses.replace(
    mistral.FAMILY,
    model_type="ministral3",
    architecture="Ministral3ForCausalLM",
    defaults=mistral.FAMILY.defaults
    | {"head_dim": 128, "max_position_embeddings": 262144, "rms_norm_eps": 1e-5}
    | {"sliding_window": None},
    layers=_layers,
    describe=_describe,
    respelled=_respelled,
)

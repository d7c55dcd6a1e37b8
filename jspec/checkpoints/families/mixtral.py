"""Mixtral: Mistral with experts in every layer."""

from typing import Any

from jspec.checkpoints.families import common, experts
from jspec.checkpoints.families.common import SHARED_DEFAULTS, Family, whole
from jspec.models.blocks.experts import Experts
from jspec.models.decoder import DecoderConfig, Layer


def _layers(raw: dict) -> tuple[Layer, ...]:
    window = None if raw["sliding_window"] is None else whole(raw, "sliding_window")
    mixer = common.attention(raw, window=window)
    kind = local(raw, 8, scoring="softmax", selection_bias=False)
    return common.alike(raw, mixer, kind)


def local(raw: dict, count: int, **fields: Any) -> Experts:
    """Return the experts of a config.json in Mixtral's keys, by default ``count``."""
    return experts.built(
        num_experts=experts.count(raw, count),
        experts_per_token=whole(raw, "num_experts_per_tok"),
        intermediate_size=whole(raw, "intermediate_size"),
        names=experts.MIXTRAL_NAMES,
        **fields,
    )


def describe_local(config: DecoderConfig) -> dict:
    """Return the inverse of ``local``."""
    first = experts.first_of(config)
    return {
        "num_local_experts": first.num_experts,
        "num_experts_per_tok": first.experts_per_token,
        "intermediate_size": first.intermediate_size,
    }


def _describe(config: DecoderConfig) -> dict:
    return {"sliding_window": common.attention_of(config).window, **describe_local(config)}


FAMILY = Family(
    model_type="mixtral",
    architecture="MixtralForCausalLM",
    defaults=SHARED_DEFAULTS
    | {"num_key_value_heads": 8, "max_position_embeddings": 131072, "default_theta": 1e6}
    | {"rms_norm_eps": 1e-5, "sliding_window": None, "eos_token_id": 2}
    | {"num_experts_per_tok": 2},
    neutral=dict.fromkeys(experts.COUNTS),
    layers=_layers,
    describe=_describe,
)

"""Qwen3-Next: layers of the gated delta rule and of gated attention, with experts."""

import dataclasses

from jspec.checkpoints.families import delta_rule, experts, qwen2_moe
from jspec.checkpoints.families.common import SHARED_DEFAULTS, Family
from jspec.models.decoder import DecoderConfig, Layer


def _layers(raw: dict) -> tuple[Layer, ...]:
    mixers, norm = delta_rule.mixers(raw, by_key_heads=True), delta_rule.norm(raw)
    layers = experts.by_steps(raw, mixers[0], qwen2_moe.with_shared(raw, 512))
    pairs = zip(layers, mixers, strict=True)
    return tuple(dataclasses.replace(layer, mixer=mixer, norm=norm) for layer, mixer in pairs)


def describe(config: DecoderConfig) -> dict:
    """Return the keys of the layers of a model with experts."""
    shared = {"shared_expert_intermediate_size": experts.first_of(config).shared_size}
    return delta_rule.describe(config) | experts.describe_steps(config) | shared


FAMILY = Family(
    model_type="qwen3_next",
    architecture="Qwen3NextForCausalLM",
    defaults=SHARED_DEFAULTS
    | delta_rule.DEFAULTS
    | experts.STEP_DEFAULTS
    | {"num_key_value_heads": 2, "moe_intermediate_size": 512, "num_experts_per_tok": 10}
    | {"shared_expert_intermediate_size": 512, "norm_topk_prob": True},
    neutral=delta_rule.NEUTRAL | dict.fromkeys(experts.COUNTS),
    layers=_layers,
    describe=describe,
)

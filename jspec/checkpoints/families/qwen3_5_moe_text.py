"""Qwen3.5 and 3.6 with experts, the text part."""

import dataclasses

from jspec.checkpoints.families import delta_rule, qwen2_moe, qwen3_next
from jspec.models.decoder import Layer


def _layers(raw: dict) -> tuple[Layer, ...]:
    mixers, norm = delta_rule.mixers(raw, by_key_heads=False), delta_rule.norm(raw)
    mixture = qwen2_moe.with_shared(raw, 256)
    return tuple(Layer(mixer, mixture, norm) for mixer in mixers)


FAMILY = dataclasses.replace(
    qwen3_next.FAMILY,
    model_type="qwen3_5_moe_text",
    architecture="Qwen3_5MoeForCausalLM",
    # No layer is a plain MLP, so configs state no size of one.
    defaults=qwen3_next.FAMILY.defaults | {"num_experts_per_tok": 8, "intermediate_size": 512},
    layers=_layers,
)

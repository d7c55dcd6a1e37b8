"""Qwen2-MoE and Qwen1.5-MoE: Qwen2 with experts behind a softmax, and one shared expert."""

import dataclasses

from jspec.checkpoints.families import common, experts, qwen3_moe
from jspec.checkpoints.families.common import SHARED_DEFAULTS, WINDOW_DEFAULTS, flag, whole
from jspec.models.blocks.experts import ExpertNames, Experts
from jspec.models.decoder import DecoderConfig, Layer


def _layers(raw: dict) -> tuple[Layer, ...]:
    mixer = common.attention(raw, qkv_bias=flag(raw, "qkv_bias"))
    return experts.by_steps(raw, mixer, with_shared(raw), _windows(raw))


def with_shared(raw: dict, count: int = 60) -> Experts:
    """Return the experts of a config.json, with the shared one that has a gate."""
    return qwen3_moe.softmax(
        raw,
        count=count,
        shared_size=whole(raw, "shared_expert_intermediate_size"),
        shared_gate=True,
        names=ExpertNames(shared="mlp.shared_expert"),
    )


def _windows(raw: dict) -> tuple[int | None, ...]:
    """Return the window of each layer; without their kinds, every other one of the first has it."""
    if raw["layer_types"] is None and flag(raw, "use_sliding_window"):
        count, most = whole(raw, "num_hidden_layers"), whole(raw, "max_window_layers", least=0)
        kinds = [common.KINDS[layer % 2 == 0 and layer < most] for layer in range(count)]
        raw = raw | {"layer_types": kinds}
    return common.windows(raw)


def _describe(config: DecoderConfig) -> dict:
    first = experts.first_of(config)
    return {
        "qkv_bias": common.attention_of(config).qkv_bias,
        "shared_expert_intermediate_size": first.shared_size,
        **experts.describe_steps(config),
        **common.describe_windows(config),
    }


FAMILY = dataclasses.replace(
    qwen3_moe.FAMILY,
    model_type="qwen2_moe",
    architecture="Qwen2MoeForCausalLM",
    defaults=SHARED_DEFAULTS
    | WINDOW_DEFAULTS
    | experts.STEP_DEFAULTS
    | {"max_position_embeddings": 32768, "norm_topk_prob": False}
    | {"num_key_value_heads": 16, "qkv_bias": True, "shared_expert_intermediate_size": 5632}
    | {"num_experts_per_tok": 4, "moe_intermediate_size": 1408},
    neutral=qwen3_moe.FAMILY.neutral | {"attention_bias": (None, False)},
    layers=_layers,
    describe=_describe,
)

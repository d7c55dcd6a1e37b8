"""Qwen3-MoE: Qwen3 with experts behind a softmax, as 30B-A3B, 235B-A22B and Qwen3-Coder."""

from typing import Any

from jspec.checkpoints.families import common, experts
from jspec.checkpoints.families.common import SHARED_DEFAULTS, Family, flag, whole
from jspec.models.blocks.experts import Experts
from jspec.models.decoder import DecoderConfig, Layer


def _layers(raw: dict) -> tuple[Layer, ...]:
    bias = flag(raw, "attention_bias")
    mixer = common.attention(
        raw,
        qk_norm=common.norm(raw),
        qkv_bias=bias,
        output_bias=bias,
        window=window(raw),
    )
    return experts.by_steps(raw, mixer, softmax(raw))


def window(raw: dict) -> int | None:
    """Return the sliding window of all layers."""
    is_set = flag(raw, "use_sliding_window") and raw["sliding_window"] is not None
    return whole(raw, "sliding_window") if is_set else None


def softmax(raw: dict, count: int = 128, **fields: Any) -> Experts:
    """Return the experts of a config.json in Qwen's keys, by default ``count``."""
    return experts.built(
        num_experts=experts.count(raw, count),
        experts_per_token=whole(raw, "num_experts_per_tok"),
        intermediate_size=whole(raw, "moe_intermediate_size"),
        normalise=flag(raw, "norm_topk_prob"),
        scoring="softmax",
        selection_bias=False,
        **fields,
    )


def _describe(config: DecoderConfig) -> dict:
    mixer = common.attention_of(config)
    return {
        "attention_bias": mixer.qkv_bias,
        "use_sliding_window": mixer.window is not None,
        "sliding_window": mixer.window,
        **experts.describe_steps(config),
    }


FAMILY = Family(
    model_type="qwen3_moe",
    architecture="Qwen3MoeForCausalLM",
    defaults=SHARED_DEFAULTS
    | experts.STEP_DEFAULTS
    | {"num_key_value_heads": 4, "max_position_embeddings": 32768, "attention_bias": False}
    | {"use_sliding_window": False, "sliding_window": 4096}
    | {"num_experts_per_tok": 8, "moe_intermediate_size": 768, "norm_topk_prob": False},
    neutral=dict.fromkeys(experts.COUNTS),
    layers=_layers,
    describe=_describe,
)

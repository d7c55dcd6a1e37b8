"""Qwen3: a norm on every query and key head, a separate head_dim, optional biases."""

from jspec.checkpoints.families.common import (
    SHARED_DEFAULTS,
    Family,
    describe_windows,
    flag,
    windows,
)
from jspec.models.decoder import DecoderConfig


def _special(raw: dict) -> dict:
    bias = flag(raw, "attention_bias")
    return {"qk_norm": True, "qkv_bias": bias, "output_bias": bias, "windows": windows(raw)}


def _describe(config: DecoderConfig) -> dict:
    return {"attention_bias": config.qkv_bias, **describe_windows(config)}


FAMILY = Family(
    model_type="qwen3",
    architecture="Qwen3ForCausalLM",
    defaults=SHARED_DEFAULTS
    | {
        "num_key_value_heads": 32,
        "head_dim": 128,
        "max_position_embeddings": 32768,
        "attention_bias": False,
        "use_sliding_window": False,
        "sliding_window": 4096,
        "max_window_layers": 28,
        "layer_types": None,
        "eos_token_id": None,
    },
    neutral={"mlp_bias": (None, False)},
    special=_special,
    describe=_describe,
)

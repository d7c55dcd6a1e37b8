"""Qwen3: a norm on every query and key head, a separate head_dim, optional biases."""

import dataclasses

from jspec.checkpoints.families import common, qwen2
from jspec.models.decoder import DecoderConfig, Layer


def _layers(raw: dict) -> tuple[Layer, ...]:
    bias = common.flag(raw, "attention_bias")
    norm = common.norm(raw)
    mixer = common.attention(raw, qk_norm=norm, qkv_bias=bias, output_bias=bias)
    return common.alike(raw, mixer, common.mlp(raw), common.windows(raw))


def _describe(config: DecoderConfig) -> dict:
    bias = common.attention_of(config).qkv_bias
    return {"attention_bias": bias, **common.describe_windows(config)}


FAMILY = dataclasses.replace(
    qwen2.FAMILY,
    model_type="qwen3",
    architecture="Qwen3ForCausalLM",
    defaults=qwen2.FAMILY.defaults | {"head_dim": 128, "attention_bias": False},
    layers=_layers,
    describe=_describe,
)

"""Qwen3: a norm on every query and key head, a separate head_dim, optional biases."""

import dataclasses

from jspec.checkpoints.families import qwen2
from jspec.checkpoints.families.common import describe_windows, flag, windows
from jspec.models.decoder import DecoderConfig


def _special(raw: dict) -> dict:
    bias = flag(raw, "attention_bias")
    return {"qk_norm": True, "qkv_bias": bias, "output_bias": bias, "windows": windows(raw)}


def _describe(config: DecoderConfig) -> dict:
    return {"attention_bias": config.qkv_bias, **describe_windows(config)}


FAMILY = dataclasses.replace(
    qwen2.FAMILY,
    model_type="qwen3",
    architecture="Qwen3ForCausalLM",
    defaults=qwen2.FAMILY.defaults | {"head_dim": 128, "attention_bias": False},
    special=_special,
    describe=_describe,
)

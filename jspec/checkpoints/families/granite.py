"""Granite 3: Llama with factors on embeddings, scores, residuals and logits."""

from typing import Any

from jspec.checkpoints.families import common
from jspec.checkpoints.families.common import SHARED_DEFAULTS, Family, flag
from jspec.checkpoints.families.scaling import positive
from jspec.models.decoder import DecoderConfig, Layer

_FACTORS = (
    "attention_multiplier",
    "embedding_multiplier",
    "logits_scaling",
    "residual_multiplier",
)


def _layers(raw: dict) -> tuple[Layer, ...]:
    bias = flag(raw, "attention_bias")
    scale, _, _, residual = (positive(key, raw[key]) for key in _FACTORS)
    mixer = common.attention(raw, qkv_bias=bias, output_bias=bias, scale=scale)
    mlp = common.mlp(raw, flag(raw, "mlp_bias"))
    return common.alike(raw, mixer, mlp, residual_scale=residual)


def _fields(raw: dict) -> dict[str, Any]:
    embedding, divisor = (positive(key, raw[key]) for key in _FACTORS[1:3])
    return {"embedding_scale": embedding, "logit_scale": 1 / divisor}


def _describe(config: DecoderConfig) -> dict:
    mixer = common.attention_of(config)
    return {
        "attention_bias": mixer.qkv_bias,
        "mlp_bias": common.mlp_of(config).bias,
        "attention_multiplier": mixer.scale or mixer.head_dim**-0.5,
        "embedding_multiplier": config.embedding_scale,
        "logits_scaling": 1 / config.logit_scale,
        "residual_multiplier": config.layers[0].residual_scale,
    }


FAMILY = Family(
    model_type="granite",
    architecture="GraniteForCausalLM",
    defaults=SHARED_DEFAULTS
    | {"max_position_embeddings": 2048, "attention_bias": False, "mlp_bias": False}
    | dict.fromkeys(_FACTORS, 1.0)
    | {"eos_token_id": 2},
    neutral=dict.fromkeys(_FACTORS) | dict.fromkeys(("sliding_window", "layer_types"), (None,)),
    layers=_layers,
    describe=_describe,
    fields=_fields,
)

"""Gemma 2: norms of inputs and outputs, a window in every other layer, capped scores and logits."""

import dataclasses
from typing import Any

from jspec.checkpoints.families import common
from jspec.checkpoints.families.common import SHARED_DEFAULTS, Family, flag
from jspec.checkpoints.families.scaling import positive
from jspec.models.blocks.attention import Attention
from jspec.models.blocks.mlp import GatedMlp
from jspec.models.blocks.norms import RmsNorm
from jspec.models.decoder import DecoderConfig, Layer

ACTIVATION = "gelu_pytorch_tanh"


def norm(raw: dict) -> RmsNorm:
    """Return the norm of all inputs and outputs."""
    return dataclasses.replace(common.norm(raw), centred=True)


def mlp(raw: dict) -> GatedMlp:
    """Return the MLP of every layer."""
    return dataclasses.replace(common.mlp(raw), activation=ACTIVATION)


def attention(raw: dict, **switches: Any) -> Attention:
    """Return the attention of the first layer; ``switches`` are further fields of it."""
    bias = flag(raw, "attention_bias")
    mixer = common.attention(raw, qkv_bias=bias, output_bias=bias, **switches)
    scalar = positive("query_pre_attn_scalar", raw["query_pre_attn_scalar"])
    scale = None if scalar == mixer.head_dim else scalar**-0.5
    return dataclasses.replace(mixer, scale=scale)


def cap(raw: dict, key: str) -> float | None:
    """Return the soft cap under ``key``; None for none."""
    return None if raw[key] is None else positive(key, raw[key])


def _layers(raw: dict) -> tuple[Layer, ...]:
    mixer = attention(raw, soft_cap=cap(raw, "attn_logit_softcapping"))
    return common.alike(
        raw,
        mixer,
        mlp(raw),
        common.every(raw, 2),
        norm=norm(raw),
        output_norm=norm(raw),
    )


def fields(raw: dict) -> dict[str, Any]:
    """See ``Family.fields``."""
    return {
        "max_positions": raw["max_position_embeddings"],
        "embedding_scale": raw["hidden_size"] ** 0.5,
        "logit_cap": cap(raw, "final_logit_softcapping"),
    }


def describe(config: DecoderConfig) -> dict:
    """See ``Family.describe``."""
    mixer = common.attention_of(config)
    return common.describe_kinds(config) | {
        "hidden_act": ACTIVATION,
        "hidden_activation": ACTIVATION,
        "max_position_embeddings": config.max_positions,
        "attention_bias": mixer.qkv_bias,
        "query_pre_attn_scalar": round((mixer.scale or mixer.head_dim**-0.5) ** -2),
        "attn_logit_softcapping": mixer.soft_cap,
        "final_logit_softcapping": config.logit_cap,
    }


FAMILY = Family(
    model_type="gemma2",
    architecture="Gemma2ForCausalLM",
    defaults={key: value for key, value in SHARED_DEFAULTS.items() if key != "hidden_act"}
    | {"num_key_value_heads": 4, "head_dim": 256, "max_position_embeddings": 8192}
    | {"hidden_activation": ACTIVATION, "attention_bias": False, "query_pre_attn_scalar": 256}
    | {"sliding_window": 4096, "layer_types": None, "tie_word_embeddings": True}
    | {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}
    | {"bos_token_id": 2, "eos_token_id": 1},
    neutral=dict.fromkeys(("hidden_act", "attn_logit_softcapping", "final_logit_softcapping"))
    | {"hidden_activation": (ACTIVATION,), "use_bidirectional_attention": (None, False)},
    layers=_layers,
    describe=describe,
    renamed={
        "post_self_attn_layernorm": "post_attention_layernorm",
        "post_attention_layernorm": "pre_feedforward_layernorm",
        "post_mlp_layernorm": "post_feedforward_layernorm",
    },
    fields=fields,
)

"""OLMo 2: norms of outputs instead of inputs, and norms of queries and keys over all heads."""

from typing import Any

from jspec.checkpoints.families import common
from jspec.checkpoints.families.common import SHARED_DEFAULTS, Family, flag
from jspec.models.blocks.norms import RmsNorm
from jspec.models.decoder import DecoderConfig, Layer


def parts(raw: dict) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the particular fields of the attention and of the layers."""
    bias, norm = flag(raw, "attention_bias"), RmsNorm(common.norm(raw).eps, wide=True)
    attention = {"qk_norm": norm, "norms_all_heads": True, "qkv_bias": bias, "output_bias": bias}
    return attention, {"norm": None, "output_norm": norm}


def _layers(raw: dict) -> tuple[Layer, ...]:
    attention, layer = parts(raw)
    return common.alike(raw, common.attention(raw, **attention), common.mlp(raw), **layer)


def describe(config: DecoderConfig) -> dict:
    """See ``Family.describe``."""
    return {"attention_bias": common.attention_of(config).qkv_bias}


FAMILY = Family(
    model_type="olmo2",
    architecture="Olmo2ForCausalLM",
    defaults=SHARED_DEFAULTS
    | {"rms_norm_eps": 1e-5, "max_position_embeddings": 2048, "attention_bias": False}
    | {"eos_token_id": 50279},
    neutral={"mlp_bias": (None, False), "clip_qkv": (None,)}
    | dict.fromkeys(("sliding_window", "layer_types"), (None,)),
    layers=_layers,
    describe=describe,
    renamed={
        "post_self_attn_layernorm": "post_attention_layernorm",
        "post_mlp_layernorm": "post_feedforward_layernorm",
    },
)

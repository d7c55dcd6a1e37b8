"""Apertus: an MLP with xIELU instead of a gate, and norms of query and key heads."""

from jspec.checkpoints.families import common, scaling
from jspec.checkpoints.families.common import SHARED_DEFAULTS, Family, flag, whole
from jspec.models.blocks.xielu_mlp import XieluMlp
from jspec.models.decoder import DecoderConfig, Layer

_DEFAULT_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 12e6,
    "factor": 8.0,
    "original_max_position_embeddings": 8192,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
}


def _layers(raw: dict) -> tuple[Layer, ...]:
    bias, norm = flag(raw, "attention_bias"), common.norm(raw)
    mixer = common.attention(raw, qk_norm=norm, qkv_bias=bias, output_bias=bias)
    return common.alike(raw, mixer, XieluMlp(whole(raw, "intermediate_size")))


def _describe(config: DecoderConfig) -> dict:
    feed_forward = config.layers[0].feed_forward
    if not isinstance(feed_forward, XieluMlp):
        raise ValueError(f"its layers have {feed_forward.title}")
    return {"attention_bias": common.attention_of(config).qkv_bias, "hidden_act": "xielu"}


FAMILY = Family(
    model_type="apertus",
    architecture="ApertusForCausalLM",
    defaults=SHARED_DEFAULTS
    | {"max_position_embeddings": 65536, "rms_norm_eps": 1e-5, "hidden_act": "xielu"}
    | {"attention_bias": False, "eos_token_id": 2},
    neutral={"hidden_act": ("xielu",), "mlp_bias": (None, False), "qk_norm": (None, True)}
    | dict.fromkeys(("sliding_window", "layer_types", "post_norm"), (None, False)),
    layers=_layers,
    describe=_describe,
    renamed={
        "input_layernorm": "attention_layernorm",
        "post_attention_layernorm": "feedforward_layernorm",
    },
    respelled=lambda raw: scaling.with_default(raw, _DEFAULT_ROPE),
)

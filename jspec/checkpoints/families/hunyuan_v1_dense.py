"""Hunyuan dense: norms of query and key heads behind the rotation, and a stretched theta."""

from jspec.checkpoints.families import common, scaling
from jspec.checkpoints.families.common import SHARED_DEFAULTS, Family, flag
from jspec.checkpoints.families.scaling import positive
from jspec.models.decoder import DecoderConfig, Layer


def _respelled(raw: dict) -> dict:
    """Return a config.json without ``alpha``, which stretches theta whatever the length."""
    rope = scaling.merged(raw)
    if rope["rope_type"] != "dynamic" or not rope.get("alpha"):
        return raw
    _, _, width = common.heads(raw)
    stretch = positive("alpha", rope["alpha"]) ** (width / (width - 2)) if width > 2 else 1.0
    theta = positive("rope_theta", rope["rope_theta"]) * stretch
    rope = {"rope_type": "default", "rope_theta": theta}
    return raw | {"rope_parameters": rope, "rope_scaling": None, "rope_theta": None}


def _layers(raw: dict) -> tuple[Layer, ...]:
    bias = flag(raw, "attention_bias")
    mixer = common.attention(
        raw,
        qk_norm=common.norm(raw),
        norms_rotated=True,
        qkv_bias=bias,
        output_bias=bias,
    )
    return common.alike(raw, mixer, common.mlp(raw))


def _describe(config: DecoderConfig) -> dict:
    return {"attention_bias": common.attention_of(config).qkv_bias}


FAMILY = Family(
    model_type="hunyuan_v1_dense",
    architecture="HunYuanDenseV1ForCausalLM",
    defaults=SHARED_DEFAULTS
    | {"max_position_embeddings": 2048, "rms_norm_eps": 1e-5, "attention_bias": False}
    | {"eos_token_id": 2},
    neutral={"use_qk_norm": (None, True)}
    | dict.fromkeys(("use_cla", "mlp_bias"), (None, False))
    | dict.fromkeys(("sliding_window", "layer_types"), (None,)),
    layers=_layers,
    describe=_describe,
    renamed={
        "self_attn.q_norm": "self_attn.query_layernorm",
        "self_attn.k_norm": "self_attn.key_layernorm",
    },
    respelled=_respelled,
)

"""GLM-4 and GLM-Z1: norms before and after each part, and half of each head rotated in pairs."""

from jspec.checkpoints.families import common, phi3
from jspec.checkpoints.families.common import SHARED_DEFAULTS, Family, flag
from jspec.models.decoder import DecoderConfig, Layer


def _layers(raw: dict) -> tuple[Layer, ...]:
    bias, norm = flag(raw, "attention_bias"), common.norm(raw)
    mixer = common.attention(raw, partly_rotated=True, interleaved=True, qkv_bias=bias)
    return common.alike(raw, mixer, common.mlp(raw), output_norm=norm)


def _describe(config: DecoderConfig) -> dict:
    bias = common.attention_of(config).qkv_bias
    return common.describe_rotated(config) | {"attention_bias": bias}


FAMILY = Family(
    model_type="glm4",
    architecture="Glm4ForCausalLM",
    defaults=SHARED_DEFAULTS
    | {"num_key_value_heads": 2, "head_dim": 128, "max_position_embeddings": 131072}
    | {"rms_norm_eps": 1.5625e-7, "partial_rotary_factor": 0.5, "attention_bias": True},
    neutral={"partial_rotary_factor": None, "mlp_bias": (None, False)}
    | dict.fromkeys(("sliding_window", "layer_types"), (None,)),
    layers=_layers,
    describe=_describe,
    renamed=phi3.FUSED_MLP,
)

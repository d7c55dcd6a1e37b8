"""Seed-OSS: Llama with a switch for each kind of bias, and a separate head_dim."""

from jspec.checkpoints.families import common
from jspec.checkpoints.families.common import SHARED_DEFAULTS, Family, flag
from jspec.models.decoder import DecoderConfig, Layer


def _layers(raw: dict) -> tuple[Layer, ...]:
    qkv, output, mlp = (flag(raw, f"{each}_bias") for each in ("attention", "attention_out", "mlp"))
    mixer = common.attention(raw, qkv_bias=qkv, output_bias=output)
    return common.alike(raw, mixer, common.mlp(raw, mlp))


def _describe(config: DecoderConfig) -> dict:
    mixer = common.attention_of(config)
    return {
        "attention_bias": mixer.qkv_bias,
        "attention_out_bias": mixer.output_bias,
        "mlp_bias": common.mlp_of(config).bias,
    }


FAMILY = Family(
    model_type="seed_oss",
    architecture="SeedOssForCausalLM",
    defaults=SHARED_DEFAULTS
    | {"num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 524288}
    | {"attention_bias": True, "attention_out_bias": False, "mlp_bias": False, "eos_token_id": 2},
    neutral=dict.fromkeys(("sliding_window", "layer_types"), (None,)),
    layers=_layers,
    describe=_describe,
)

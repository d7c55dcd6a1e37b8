"""Llama 2 and 3.x: no windows; one switch for the biases of attention, one for the MLP's."""

from jspec.checkpoints.families import common
from jspec.checkpoints.families.common import SHARED_DEFAULTS, Family, flag
from jspec.models.decoder import DecoderConfig, Layer


def _layers(raw: dict) -> tuple[Layer, ...]:
    bias = flag(raw, "attention_bias")
    mixer = common.attention(raw, qkv_bias=bias, output_bias=bias)
    return common.alike(raw, mixer, common.mlp(raw, flag(raw, "mlp_bias")))


def _describe(config: DecoderConfig) -> dict:
    return {
        "attention_bias": common.attention_of(config).qkv_bias,
        "mlp_bias": common.mlp_of(config).bias,
        "pretraining_tp": 1,
    }


FAMILY = Family(
    model_type="llama",
    architecture="LlamaForCausalLM",
    defaults=SHARED_DEFAULTS
    | {"attention_bias": False, "mlp_bias": False}
    | {"max_position_embeddings": 2048, "eos_token_id": 2},
    neutral={"sliding_window": (None,), "layer_types": (None,), "use_qk_norm": (None, False)},
    layers=_layers,
    describe=_describe,
)

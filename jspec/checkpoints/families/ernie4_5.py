"""ERNIE 4.5 dense: Llama with a rotation of neighbours, and one switch for all biases."""

from jspec.checkpoints.families import common
from jspec.checkpoints.families.common import SHARED_DEFAULTS, Family, flag
from jspec.models.decoder import DecoderConfig, Layer


def _layers(raw: dict) -> tuple[Layer, ...]:
    bias = flag(raw, "use_bias")
    mixer = common.attention(raw, interleaved=True, qkv_bias=bias, output_bias=bias)
    return common.alike(raw, mixer, common.mlp(raw, bias))


def _describe(config: DecoderConfig) -> dict:
    return {"use_bias": common.attention_of(config).qkv_bias}


FAMILY = Family(
    model_type="ernie4_5",
    architecture="Ernie4_5ForCausalLM",
    defaults=SHARED_DEFAULTS
    | {"num_key_value_heads": 2, "head_dim": 128, "max_position_embeddings": 131072}
    | {"rms_norm_eps": 1e-5, "tie_word_embeddings": True, "default_theta": 5e5}
    | {"use_bias": False, "eos_token_id": 2},
    neutral=dict.fromkeys(("sliding_window", "layer_types"), (None,)),
    layers=_layers,
    describe=_describe,
)

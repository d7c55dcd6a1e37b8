"""Llama 2 and 3.x: no windows; one switch for the biases of attention, one for the MLP's."""

from jspec.checkpoints.families.common import SHARED_DEFAULTS, Family, flag
from jspec.models.decoder import DecoderConfig


def _special(raw: dict) -> dict:
    bias = flag(raw, "attention_bias")
    return {"qkv_bias": bias, "output_bias": bias, "mlp_bias": flag(raw, "mlp_bias")}


def _describe(config: DecoderConfig) -> dict:
    return {"attention_bias": config.qkv_bias, "mlp_bias": config.mlp_bias, "pretraining_tp": 1}


FAMILY = Family(
    model_type="llama",
    architecture="LlamaForCausalLM",
    defaults=SHARED_DEFAULTS
    | {"attention_bias": False, "mlp_bias": False}
    | {"max_position_embeddings": 2048, "eos_token_id": 2},
    neutral={"sliding_window": (None,), "layer_types": (None,), "use_qk_norm": (None, False)},
    special=_special,
    describe=_describe,
)

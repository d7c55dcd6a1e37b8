"""Mistral: Llama without biases, with one sliding window for all layers or none."""

from jspec.checkpoints.families.common import SHARED_DEFAULTS, Family, whole
from jspec.models.decoder import DecoderConfig


def _special(raw: dict) -> dict:
    if raw["sliding_window"] is None:
        return {}
    return {"windows": (whole(raw, "sliding_window"),) * whole(raw, "num_hidden_layers")}


def _describe(config: DecoderConfig) -> dict:
    return {"sliding_window": config.windows[0] if config.windows else None}


FAMILY = Family(
    model_type="mistral",
    architecture="MistralForCausalLM",
    defaults=SHARED_DEFAULTS
    | {"num_key_value_heads": 8, "max_position_embeddings": 131072}
    | {"sliding_window": 4096, "eos_token_id": 2},
    neutral={"layer_types": (None,)} | dict.fromkeys(("attention_bias", "mlp_bias"), (None, False)),
    special=_special,
    describe=_describe,
)

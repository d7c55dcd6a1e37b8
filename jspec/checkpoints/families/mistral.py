"""Mistral: Llama without biases, with one sliding window for all layers or none."""

from jspec.checkpoints.families import common
from jspec.checkpoints.families.common import SHARED_DEFAULTS, Family, whole
from jspec.models.decoder import DecoderConfig, Layer


def _layers(raw: dict) -> tuple[Layer, ...]:
    window = None if raw["sliding_window"] is None else whole(raw, "sliding_window")
    return common.alike(raw, common.attention(raw, window=window), common.mlp(raw))


def _describe(config: DecoderConfig) -> dict:
    return {"sliding_window": common.attention_of(config).window}


FAMILY = Family(
    model_type="mistral",
    architecture="MistralForCausalLM",
    defaults=SHARED_DEFAULTS
    | {"num_key_value_heads": 8, "max_position_embeddings": 131072}
    | {"sliding_window": 4096, "eos_token_id": 2},
    neutral={"layer_types": (None,)} | dict.fromkeys(("attention_bias", "mlp_bias"), (None, False)),
    layers=_layers,
    describe=_describe,
)

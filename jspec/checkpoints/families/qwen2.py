"""Qwen2 and Qwen2.5: biases on q, k and v always, sliding windows by layer where switched on."""

from jspec.checkpoints.families.common import SHARED_DEFAULTS, Family, describe_windows, windows
from jspec.models.decoder import DecoderConfig


def _special(raw: dict) -> dict:
    return {"qkv_bias": True, "windows": windows(raw)}


def _describe(config: DecoderConfig) -> dict:
    return describe_windows(config)


FAMILY = Family(
    model_type="qwen2",
    architecture="Qwen2ForCausalLM",
    defaults=SHARED_DEFAULTS
    | {
        "num_key_value_heads": 32,
        "max_position_embeddings": 32768,
        "use_sliding_window": False,
        "sliding_window": 4096,
        "max_window_layers": 28,
        "layer_types": None,
        "eos_token_id": None,
    },
    neutral={"mlp_bias": (None, False)},
    special=_special,
    describe=_describe,
)

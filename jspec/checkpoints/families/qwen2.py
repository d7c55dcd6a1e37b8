"""Qwen2 and Qwen2.5: biases on q, k and v, and optional sliding windows by layer."""

from jspec.checkpoints.families.common import (
    SHARED_DEFAULTS,
    WINDOW_DEFAULTS,
    Family,
    describe_windows,
    windows,
)


def _special(raw: dict) -> dict:
    return {"qkv_bias": True, "windows": windows(raw)}


FAMILY = Family(
    model_type="qwen2",
    architecture="Qwen2ForCausalLM",
    defaults=SHARED_DEFAULTS
    | WINDOW_DEFAULTS
    | {"num_key_value_heads": 32, "max_position_embeddings": 32768},
    neutral={"mlp_bias": (None, False)},
    special=_special,
    describe=describe_windows,
)

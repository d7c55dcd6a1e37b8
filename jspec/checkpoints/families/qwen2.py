"""Qwen2 and Qwen2.5: biases on q, k and v, and optional sliding windows by layer."""

from jspec.checkpoints.families import common
from jspec.checkpoints.families.common import SHARED_DEFAULTS, WINDOW_DEFAULTS, Family
from jspec.models.decoder import Layer


def _layers(raw: dict) -> tuple[Layer, ...]:
    mixer = common.attention(raw, qkv_bias=True)
    return common.alike(raw, mixer, common.mlp(raw), common.windows(raw))


FAMILY = Family(
    model_type="qwen2",
    architecture="Qwen2ForCausalLM",
    defaults=SHARED_DEFAULTS
    | WINDOW_DEFAULTS
    | {"num_key_value_heads": 32, "max_position_embeddings": 32768},
    neutral={"mlp_bias": (None, False)},
    layers=_layers,
    describe=common.describe_windows,
)

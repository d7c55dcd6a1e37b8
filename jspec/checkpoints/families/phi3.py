"""Phi-3, Phi-3.5 and Phi-4: Llama with fused tensors, long rotary scalings, partial rotation."""

from jspec.checkpoints.families import common
from jspec.checkpoints.families.common import SHARED_DEFAULTS, Family, whole
from jspec.models.decoder import DecoderConfig, Layer


def _layers(raw: dict) -> tuple[Layer, ...]:
    window = None if raw["sliding_window"] is None else whole(raw, "sliding_window")
    mixer = common.attention(raw, window=window, partly_rotated=True)
    return common.alike(raw, mixer, common.mlp(raw))


def _describe(config: DecoderConfig) -> dict:
    mixer = common.attention_of(config)
    return common.describe_rotated(config) | {
        "original_max_position_embeddings": mixer.rope.original_length or config.max_positions,
        "sliding_window": mixer.window,
    }


FUSED = {f"self_attn.{each}_proj": "self_attn.qkv_proj" for each in "qkv"}
FUSED_MLP = {f"mlp.{each}_proj": "mlp.gate_up_proj" for each in ("gate", "up")}
FAMILY = Family(
    model_type="phi3",
    architecture="Phi3ForCausalLM",
    defaults=SHARED_DEFAULTS
    | {"max_position_embeddings": 4096, "original_max_position_embeddings": 4096}
    | {"rms_norm_eps": 1e-5, "sliding_window": None, "eos_token_id": 32000},
    neutral={"partial_rotary_factor": None, "layer_types": (None,)}
    | dict.fromkeys(("attention_bias", "mlp_bias"), (None, False)),
    layers=_layers,
    describe=_describe,
    renamed=FUSED | FUSED_MLP,
)

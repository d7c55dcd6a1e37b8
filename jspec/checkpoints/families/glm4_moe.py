"""GLM-4.5: DeepSeek's experts, and attention that rotates half of each head."""

from jspec.checkpoints.families import experts, scaling
from jspec.checkpoints.families.common import SHARED_DEFAULTS, Family, flag
from jspec.models.decoder import DecoderConfig


def _special(raw: dict) -> dict:
    return {
        "qkv_bias": flag(raw, "attention_bias"),
        "qk_norm": flag(raw, "use_qk_norm"),
        "moe": experts.read(raw),
    }


def _describe(config: DecoderConfig) -> dict:
    share = (config.rotary_dim or config.head_dim) / config.head_dim
    rope = scaling.write(config.rope, config.max_positions)
    return {
        "attention_bias": config.qkv_bias,
        "use_qk_norm": config.qk_norm,
        "partial_rotary_factor": share,
        "rope_parameters": rope["rope_parameters"] | {"partial_rotary_factor": share},
        **experts.describe(config),
    }


FAMILY = Family(
    model_type="glm4_moe",
    architecture="Glm4MoeForCausalLM",
    defaults=SHARED_DEFAULTS
    | experts.DEFAULTS
    | {"num_key_value_heads": 8, "max_position_embeddings": 131072}
    | {"rms_norm_eps": 1e-5, "partial_rotary_factor": 0.5},
    neutral=experts.NEUTRAL | {"partial_rotary_factor": None, "sliding_window": (None,)},
    special=_special,
    describe=_describe,
    partly_rotated=True,
)

"""GLM-4.5: DeepSeek's experts, and attention that rotates half of each head."""

from jspec.checkpoints.families import common, experts
from jspec.checkpoints.families.common import SHARED_DEFAULTS, Family, flag
from jspec.models.decoder import DecoderConfig, Layer


def _layers(raw: dict) -> tuple[Layer, ...]:
    mixer = common.attention(
        raw,
        partly_rotated=True,
        qkv_bias=flag(raw, "attention_bias"),
        qk_norm=common.norm(raw) if flag(raw, "use_qk_norm") else None,
    )
    return experts.after_dense(raw, mixer)


def _describe(config: DecoderConfig) -> dict:
    mixer = common.attention_of(config)
    return common.describe_rotated(config) | {
        "attention_bias": mixer.qkv_bias,
        "use_qk_norm": mixer.qk_norm is not None,
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
    layers=_layers,
    describe=_describe,
)

"""Qwen3.5 and 3.6, the text part: layers of the gated delta rule and of gated attention."""

from jspec.checkpoints.families import common, delta_rule
from jspec.checkpoints.families.common import SHARED_DEFAULTS, Family
from jspec.models.decoder import DecoderConfig, Layer


def _layers(raw: dict) -> tuple[Layer, ...]:
    mlp, norm = common.mlp(raw), delta_rule.norm(raw)
    return tuple(Layer(mixer, mlp, norm) for mixer in delta_rule.mixers(raw, by_key_heads=False))


def _describe(config: DecoderConfig) -> dict:
    common.mlp_of(config)
    return delta_rule.describe(config)


FAMILY = Family(
    model_type="qwen3_5_text",
    architecture="Qwen3_5ForCausalLM",
    defaults=SHARED_DEFAULTS | delta_rule.DEFAULTS | {"num_key_value_heads": 4},
    neutral=delta_rule.NEUTRAL,
    layers=_layers,
    describe=_describe,
)

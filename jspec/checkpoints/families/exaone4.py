"""EXAONE 4: norms of outputs; beside layers with a window, the others have no rotation."""

from jspec.checkpoints.families import common, olmo2
from jspec.checkpoints.families.common import SHARED_DEFAULTS, Family
from jspec.models.decoder import DecoderConfig, Layer


def _layers(raw: dict) -> tuple[Layer, ...]:
    norm = common.norm(raw)
    mixer = common.attention(raw, qk_norm=norm)
    mixes = raw["sliding_window"] is not None
    windows = common.every(raw, raw["sliding_window_pattern"] if mixes else 1)
    ropes = [mixer.rope if window or not mixes else None for window in windows]
    return common.alike(raw, mixer, common.mlp(raw), windows, ropes, norm=None, output_norm=norm)


def _describe(config: DecoderConfig) -> dict:
    common.attention_of(config)
    return common.describe_kinds(config) | {"sliding_window_pattern": 4}


FAMILY = Family(
    model_type="exaone4",
    architecture="Exaone4ForCausalLM",
    defaults=SHARED_DEFAULTS
    | {"num_key_value_heads": 32, "max_position_embeddings": 2048, "rms_norm_eps": 1e-5}
    | {"sliding_window": 4096, "sliding_window_pattern": 4, "layer_types": None}
    | {"eos_token_id": 2},
    neutral=dict.fromkeys(("attention_bias", "mlp_bias"), (None, False)),
    layers=_layers,
    describe=_describe,
    renamed=olmo2.FAMILY.renamed,
)

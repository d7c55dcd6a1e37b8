"""SmolLM3: every fourth layer has no rotation; a window would be of these layers."""

from jspec.checkpoints.families import common
from jspec.checkpoints.families.common import KINDS, SHARED_DEFAULTS, Family, flag, whole
from jspec.models.decoder import DecoderConfig, Layer
from jspec.util.messages import shown


def _layers(raw: dict) -> tuple[Layer, ...]:
    bias, rotated = flag(raw, "attention_bias"), rotated_layers(raw)
    mixer = common.attention(raw, qkv_bias=bias, output_bias=bias)
    slides = flag(raw, "use_sliding_window") and raw["sliding_window"] is not None
    kinds = common.layer_types(raw) or [KINDS[slides and not each] for each in rotated]
    return common.alike(
        raw,
        mixer,
        common.mlp(raw, flag(raw, "mlp_bias")),
        common.windows(raw | {"layer_types": kinds}),
        [mixer.rope if each else None for each in rotated],
    )


def rotated_layers(raw: dict) -> list[int]:
    """Return whether each layer rotates queries and keys."""
    count, given = whole(raw, "num_hidden_layers"), raw["no_rope_layers"]
    if given is None:
        interval = whole(raw, "no_rope_layer_interval")
        return [int((layer + 1) % interval != 0) for layer in range(count)]
    if not isinstance(given, list) or len(given) != count or any(x not in (0, 1) for x in given):
        raise ValueError(
            f"no_rope_layers must have a 0 (no rotation) or a 1 for each of {count} layers, got "
            f"{shown(given)}"
        )
    return given


def _describe(config: DecoderConfig) -> dict:
    bias, mlp = common.attention_of(config).qkv_bias, common.mlp_of(config)
    return common.describe_windows(config) | {
        "no_rope_layers": [int(layer.mixer.rope is not None) for layer in config.layers],
        "attention_bias": bias,
        "mlp_bias": mlp.bias,
    }


FAMILY = Family(
    model_type="smollm3",
    architecture="SmolLM3ForCausalLM",
    defaults=SHARED_DEFAULTS
    | {"num_key_value_heads": 4, "max_position_embeddings": 32768, "default_theta": 2e6}
    | {"use_sliding_window": False, "sliding_window": None, "layer_types": None}
    | {"no_rope_layers": None, "no_rope_layer_interval": 4, "tie_word_embeddings": True}
    | {"attention_bias": False, "mlp_bias": False, "eos_token_id": 128001},
    neutral={},
    layers=_layers,
    describe=_describe,
)

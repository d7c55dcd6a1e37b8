"""Command R7B and Command A: attention and MLP side by side; layers without window or rotation."""

from jspec.checkpoints.families import common
from jspec.checkpoints.families.common import SHARED_DEFAULTS, Family, flag
from jspec.checkpoints.families.scaling import positive
from jspec.models.blocks.norms import LayerNorm
from jspec.models.decoder import DecoderConfig, Layer


def _layers(raw: dict) -> tuple[Layer, ...]:
    bias = flag(raw, "attention_bias")
    mixer = common.attention(raw, interleaved=True, qkv_bias=bias, output_bias=bias)
    windows = common.every(raw, raw["sliding_window_pattern"])
    return common.alike(
        raw,
        mixer,
        common.mlp(raw),
        windows,
        [mixer.rope if window else None for window in windows],
        norm=LayerNorm(positive("layer_norm_eps", raw["layer_norm_eps"])),
        parallel=True,
    )


def _describe(config: DecoderConfig) -> dict:
    return common.describe_kinds(config) | {
        "attention_bias": common.attention_of(config).qkv_bias,
        "layer_norm_eps": config.norm.eps,
        "logit_scale": config.logit_scale,
    }


FAMILY = Family(
    model_type="cohere2",
    architecture="Cohere2ForCausalLM",
    defaults={key: value for key, value in SHARED_DEFAULTS.items() if key != "rms_norm_eps"}
    | {"max_position_embeddings": 8192, "layer_norm_eps": 1e-5, "tie_word_embeddings": True}
    | {"sliding_window": 4096, "sliding_window_pattern": 4, "layer_types": None}
    | {"attention_bias": False, "logit_scale": 0.0625, "eos_token_id": 255001},
    neutral={"use_qk_norm": (None, False), "mlp_bias": (None, False)}
    | dict.fromkeys(("use_parallel_block", "use_gated_activation"), (None, True)),
    layers=_layers,
    describe=_describe,
    fields=lambda raw: {"logit_scale": positive("logit_scale", raw["logit_scale"])},
)

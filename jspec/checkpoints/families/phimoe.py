"""Phi-3.5-MoE: experts behind sparsemixer, norms that subtract the mean, and biases."""

from jspec.checkpoints.families import common, experts, mixtral, scaling
from jspec.checkpoints.families.common import SHARED_DEFAULTS, Family, flag, whole
from jspec.models.blocks.norms import LayerNorm
from jspec.models.decoder import DecoderConfig, Layer


def _layers(raw: dict) -> tuple[Layer, ...]:
    bias = flag(raw, "attention_bias")
    window = None if raw["sliding_window"] is None else whole(raw, "sliding_window")
    mixer = common.attention(raw, qkv_bias=bias, output_bias=bias, window=window)
    kind = mixtral.local(
        raw,
        16,
        scoring="sparsemixer",
        tolerance=scaling.positive("router_jitter_noise", raw["router_jitter_noise"]),
        selection_bias=False,
    )
    norm = LayerNorm(common.norm(raw).eps, bias=True)
    return common.alike(raw, mixer, kind, norm=norm)


def _describe(config: DecoderConfig) -> dict:
    mixer, first = common.attention_of(config), experts.first_of(config)
    described = {
        "attention_bias": mixer.qkv_bias,
        "lm_head_bias": config.head_bias,
        "sliding_window": mixer.window,
        "router_jitter_noise": first.tolerance,
        **mixtral.describe_local(config),
    }
    if mixer.rope.kind == "longrope":
        rope = scaling.write(mixer.rope, config.max_positions)
        for spelling in ("rope_scaling", "rope_parameters"):
            amplitude = rope[spelling].pop("attention_factor")
            described[spelling] = rope[spelling] | dict.fromkeys(scaling.MSCALES, amplitude)
    return described


FAMILY = Family(
    model_type="phimoe",
    architecture="PhimoeForCausalLM",
    defaults=SHARED_DEFAULTS
    | {"num_key_value_heads": 8, "max_position_embeddings": 131072, "default_theta": 1e6}
    | {"rms_norm_eps": 1e-5, "sliding_window": None, "eos_token_id": 2}
    | {"num_experts_per_tok": 2, "router_jitter_noise": 0.01}
    | {"attention_bias": False, "lm_head_bias": False},
    neutral=dict.fromkeys(experts.COUNTS),
    layers=_layers,
    describe=_describe,
    fields=lambda raw: {"head_bias": flag(raw, "lm_head_bias")},
)

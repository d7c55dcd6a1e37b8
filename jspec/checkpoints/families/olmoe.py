"""OLMoE: experts behind a softmax, and norms of queries and keys over all heads."""

from jspec.checkpoints.families import common, experts
from jspec.checkpoints.families.common import SHARED_DEFAULTS, Family, flag, whole
from jspec.models.decoder import DecoderConfig, Layer


def _layers(raw: dict) -> tuple[Layer, ...]:
    bias = flag(raw, "attention_bias")
    mixer = common.attention(
        raw,
        qk_norm=common.norm(raw),
        norms_all_heads=True,
        qkv_bias=bias,
        output_bias=bias,
    )
    kind = experts.built(
        num_experts=experts.count(raw, 64),
        experts_per_token=whole(raw, "num_experts_per_tok"),
        intermediate_size=whole(raw, "intermediate_size"),
        normalise=flag(raw, "norm_topk_prob"),
        scoring="softmax",
        selection_bias=False,
    )
    return common.alike(raw, mixer, kind)


def _describe(config: DecoderConfig) -> dict:
    first = experts.first_of(config)
    return {
        "attention_bias": common.attention_of(config).qkv_bias,
        "num_experts": first.num_experts,
        "num_experts_per_tok": first.experts_per_token,
        "intermediate_size": first.intermediate_size,
        "norm_topk_prob": first.normalise,
    }


FAMILY = Family(
    model_type="olmoe",
    architecture="OlmoeForCausalLM",
    defaults=SHARED_DEFAULTS
    | {"max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "eos_token_id": 50279}
    | {"attention_bias": False, "clip_qkv": None, "norm_topk_prob": False}
    | {"num_experts_per_tok": 8},
    neutral=dict.fromkeys(experts.COUNTS) | {"clip_qkv": (None,), "sliding_window": (None,)},
    layers=_layers,
    describe=_describe,
)

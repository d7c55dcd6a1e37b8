"""gpt-oss: sinks, a window in every other layer, and biased experts with a clamped SwiGLU."""

from jspec.checkpoints.families import common, experts
from jspec.checkpoints.families.common import SHARED_DEFAULTS, Family, flag, whole
from jspec.checkpoints.families.scaling import positive
from jspec.models.blocks.experts import ClampedSwiglu, ExpertNames, Experts
from jspec.models.decoder import DecoderConfig, Layer

_NAMES = ExpertNames(router="mlp.router", fused="inputs")


def _layers(raw: dict) -> tuple[Layer, ...]:
    bias = flag(raw, "attention_bias")
    mixer = common.attention(raw, qkv_bias=bias, output_bias=bias, has_sinks=True)
    mixture = experts.built(
        num_experts=experts.count(raw, 128),
        experts_per_token=whole(raw, "num_experts_per_tok"),
        intermediate_size=whole(raw, "intermediate_size"),
        scoring="softmax",
        selection_bias=False,
        router_bias=True,
        expert_bias=True,
        swiglu=ClampedSwiglu(*(positive(key, raw[key]) for key in _SWIGLU)),
        names=_NAMES,
    )
    return common.alike(raw, mixer, mixture, common.every(raw, 2))


def _describe(config: DecoderConfig) -> dict:
    mixer, mixture = common.attention_of(config), config.layers[0].feed_forward
    if not isinstance(mixture, Experts) or mixture.swiglu is None:
        raise ValueError(f"its layers have {mixture.title} without a clamped SwiGLU")
    return {
        "attention_bias": mixer.qkv_bias,
        "intermediate_size": mixture.intermediate_size,
        "num_local_experts": mixture.num_experts,
        "num_experts_per_tok": mixture.experts_per_token,
        **dict(zip(_SWIGLU, (mixture.swiglu.alpha, mixture.swiglu.limit), strict=True)),
        **common.describe_kinds(config),
    }


_SWIGLU = ("swiglu_alpha", "swiglu_limit")
# transformers' rotary scaling of a config.json without one.
_YARN = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}


class _Family(Family):
    """The family, whose config.json may leave its rotary scaling out."""

    def read(self, raw: dict) -> DecoderConfig:
        """See ``Family``."""
        keys = "rope_parameters", "rope_scaling"
        given = any(raw.get(key) is not None for key in keys)
        return super().read(raw if given else raw | {"rope_parameters": _YARN})


FAMILY = _Family(
    model_type="gpt_oss",
    architecture="GptOssForCausalLM",
    defaults=SHARED_DEFAULTS
    | {"num_key_value_heads": 8, "head_dim": 64, "max_position_embeddings": 131072}
    | {"rms_norm_eps": 1e-5, "attention_bias": True, "sliding_window": 128, "layer_types": None}
    | {"num_experts_per_tok": 4, "default_theta": 150000.0}
    | {"swiglu_alpha": 1.702, "swiglu_limit": 7.0},
    neutral=dict.fromkeys(experts.COUNTS),
    layers=_layers,
    describe=_describe,
)

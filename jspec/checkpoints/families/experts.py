"""Mixtures of experts in config.json, in the keys of DeepSeek-V3 and GLM-4.5."""

from jspec.checkpoints.families import common
from jspec.checkpoints.families.common import flag, whole
from jspec.checkpoints.families.scaling import positive
from jspec.models.blocks.block import Mixer
from jspec.models.blocks.experts import Experts
from jspec.models.decoder import DecoderConfig, Layer

# Keys that would change the computation, and the values that ``after_dense`` assumes.
NEUTRAL = {
    "scoring_func": (None, "sigmoid"),
    "topk_method": (None, "noaux_tc"),
    "moe_layer_freq": (None, 1),
}


# transformers' defaults, of GLM-4.5 where DeepSeek-V3 differs.
DEFAULTS = {
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.0,
}
_SIZES = {
    "n_routed_experts": "num_experts",
    "num_experts_per_tok": "experts_per_token",
    "moe_intermediate_size": "intermediate_size",
    "n_group": "num_groups",
    "topk_group": "groups_per_token",
}


def after_dense(raw: dict, mixer: Mixer) -> tuple[Layer, ...]:
    """Return the layers of a config.json: plain MLPs in the first ones, experts in the others."""
    sizes = {field: whole(raw, key) for key, field in _SIZES.items()}
    try:
        experts = Experts(
            **sizes,
            shared_size=sizes["intermediate_size"] * whole(raw, "n_shared_experts"),
            normalise=flag(raw, "norm_topk_prob"),
            scale=positive("routed_scaling_factor", raw["routed_scaling_factor"]),
        )
    except ValueError as error:
        raise ValueError(f"experts: {error}") from None
    dense = whole(raw, "first_k_dense_replace", least=0)
    plain = common.alike(raw, mixer, common.mlp(raw))
    return plain[:dense] + common.alike(raw, mixer, experts)[dense:]


def describe(config: DecoderConfig) -> dict:
    """Return the inverse of ``after_dense``."""
    kinds = [layer.feed_forward for layer in config.layers]
    unused = Experts(2, 1, 1, 1)  # A model of plain MLPs must state sizes of experts too.
    first = next((kind for kind in kinds if isinstance(kind, Experts)), unused)
    return {
        "num_nextn_predict_layers": 0,  # transformers assumes one
        **{key: vars(first)[field] for key, field in _SIZES.items()},
        "n_shared_experts": max(first.shared_size // first.intermediate_size, 1),
        "first_k_dense_replace": [*kinds, first].index(first),
        "norm_topk_prob": first.normalise,
        "routed_scaling_factor": first.scale,
    }

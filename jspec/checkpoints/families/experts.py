"""Mixtures of experts in config.json, in the keys of DeepSeek-V3 and GLM-4.5."""

from jspec.checkpoints.families.common import flag, whole
from jspec.checkpoints.families.scaling import positive
from jspec.models.blocks.experts import MoeConfig
from jspec.models.decoder import DecoderConfig

# Keys that would change the computation, and the values that ``read`` assumes.
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


def read(raw: dict) -> MoeConfig:
    """Return the experts of a config.json with defaults filled in."""
    sizes = {field: whole(raw, key) for key, field in _SIZES.items()}
    try:
        return MoeConfig(
            **sizes,
            shared_size=sizes["intermediate_size"] * whole(raw, "n_shared_experts"),
            first_dense=whole(raw, "first_k_dense_replace", least=0),
            normalise=flag(raw, "norm_topk_prob"),
            scale=positive("routed_scaling_factor", raw["routed_scaling_factor"]),
        )
    except ValueError as error:
        raise ValueError(f"experts: {error}") from None


def describe(config: DecoderConfig) -> dict:
    """Return the inverse of ``read``, or {} for a decoder without experts."""
    moe = config.moe
    if moe is None:
        return {}
    return {
        "num_nextn_predict_layers": 0,  # transformers assumes one
        **{key: vars(moe)[field] for key, field in _SIZES.items()},
        "n_shared_experts": max(moe.shared_size // moe.intermediate_size, 1),
        "first_k_dense_replace": moe.first_dense,
        "norm_topk_prob": moe.normalise,
        "routed_scaling_factor": moe.scale,
    }

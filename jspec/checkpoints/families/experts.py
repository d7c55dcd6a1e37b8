"""Mixtures of experts in config.json, in the keys of DeepSeek-V3 and GLM-4.5."""

from jspec.checkpoints.families.common import flag, whole
from jspec.checkpoints.families.scaling import positive
from jspec.models.decoder import DecoderConfig
from jspec.models.moe import MoeConfig

# Keys that would change the computation, and the values that ``read`` assumes.
NEUTRAL = {
    "scoring_func": (None, "sigmoid"),
    "topk_method": (None, "noaux_tc"),
    "moe_layer_freq": (None, 1),
}


def read(raw: dict) -> MoeConfig:
    """Return the experts of a config.json with defaults filled in.

    Raises:
      ValueError: a size is missing or malformed, or experts and groups do not fit each other.
    """
    wide = whole(raw, "moe_intermediate_size")
    try:
        return MoeConfig(
            num_experts=whole(raw, "n_routed_experts"),
            experts_per_token=whole(raw, "num_experts_per_tok"),
            intermediate_size=wide,
            shared_size=wide * whole(raw, "n_shared_experts"),
            first_dense=whole(raw, "first_k_dense_replace", least=0),
            num_groups=whole(raw, "n_group"),
            groups_per_token=whole(raw, "topk_group"),
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
        "moe_intermediate_size": moe.intermediate_size,
        "n_routed_experts": moe.num_experts,
        "num_experts_per_tok": moe.experts_per_token,
        "n_shared_experts": max(moe.shared_size // moe.intermediate_size, 1),
        "first_k_dense_replace": moe.first_dense,
        "n_group": moe.num_groups,
        "topk_group": moe.groups_per_token,
        "norm_topk_prob": moe.normalise,
        "routed_scaling_factor": moe.scale,
    }

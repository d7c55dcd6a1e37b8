"""Mixtures of experts in config.json, as DeepSeek-V3 names their sizes and GLM-4.5 after it."""

from jspec.checkpoints.families.common import flag, whole
from jspec.checkpoints.families.scaling import positive
from jspec.models.decoder import DecoderConfig
from jspec.models.moe import MoeConfig

# What would change the computation; published files say what ``read`` takes for granted.
NEUTRAL = {
    "scoring_func": (None, "sigmoid"),
    "topk_method": (None, "noaux_tc"),
    "moe_layer_freq": (None, 1),
}


def read(raw: dict) -> MoeConfig:
    """The experts of a config.json, defaults filled in.

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
    """The inverse of ``read``; of a decoder without experts, nothing."""
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

"""Mixtures of experts in config.json."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from jspec.checkpoints.families import common
from jspec.checkpoints.families.common import flag, whole
from jspec.checkpoints.families.scaling import positive
from jspec.models.blocks.block import Mixer
from jspec.models.blocks.experts import ExpertNames, Experts
from jspec.models.blocks.mlp import GatedMlp
from jspec.models.decoder import DecoderConfig, Layer
from jspec.util.messages import shown

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
COUNTS = ("num_experts", "num_local_experts")
# The keys of Qwen, by which some layers are plain MLPs.
STEP_DEFAULTS = {"decoder_sparse_step": 1, "mlp_only_layers": None}
# Names in the files of Mixtral and those after it.
MIXTRAL_NAMES = ExpertNames(
    router="block_sparse_moe.gate",
    bias="block_sparse_moe.e_score_correction_bias",
    experts="block_sparse_moe.experts",
    parts=("w1", "w3", "w2"),
)


def after_dense(raw: dict, mixer: Mixer, **fields: Any) -> tuple[Layer, ...]:
    """Return the layers of a config.json: plain MLPs in the first ones, experts in the others.

    ``fields`` are further ones of the experts.
    """
    sizes = {field: whole(raw, key) for key, field in _SIZES.items()}
    experts = built(
        **sizes,
        **fields,
        shared_size=sizes["intermediate_size"] * whole(raw, "n_shared_experts"),
        normalise=flag(raw, "norm_topk_prob"),
        scale=positive("routed_scaling_factor", raw["routed_scaling_factor"]),
    )
    dense = whole(raw, "first_k_dense_replace", least=0)
    plain = common.alike(raw, mixer, common.mlp(raw))
    return plain[:dense] + common.alike(raw, mixer, experts)[dense:]


def describe(config: DecoderConfig) -> dict:
    """Return the inverse of ``after_dense``."""
    kinds = [layer.feed_forward for layer in config.layers]
    first = first_of(config)
    return {
        "num_nextn_predict_layers": 0,  # transformers assumes one
        **{key: vars(first)[field] for key, field in _SIZES.items()},
        "n_shared_experts": max(first.shared_size // first.intermediate_size, 1),
        "first_k_dense_replace": [*kinds, first].index(first),
        "norm_topk_prob": first.normalise,
        "routed_scaling_factor": first.scale,
    }


def count(raw: dict, default: int) -> int:
    """Return the number of experts under either of transformers' names."""
    given = {key: raw[key] for key in COUNTS if raw.get(key) is not None}
    if len(set(map(repr, given.values()))) > 1:
        raise ValueError(f"{' and '.join(given)} must be equal, got {shown([*given.values()])}")
    return whole(raw, next(iter(given))) if given else default


def built(*, kind: type[Experts] = Experts, **fields: Any) -> Experts:
    """Return a mixture of a ``kind``; an error names it."""
    try:
        return kind(**fields)
    except ValueError as error:
        raise ValueError(f"experts: {error}") from None


def first_of(config: DecoderConfig) -> Experts:
    """Return the first mixture of a model, or one that no layer has: configs state its sizes."""
    kinds = (layer.feed_forward for layer in config.layers)
    return next((kind for kind in kinds if isinstance(kind, Experts)), Experts(2, 1, 1, 1))


def by_steps(
    raw: dict, mixer: Mixer, experts: Experts, windows: Sequence[int | None] = ()
) -> tuple[Layer, ...]:
    """Return the layers of a config.json with ``STEP_DEFAULTS``."""
    step, listed = whole(raw, "decoder_sparse_step"), raw["mlp_only_layers"] or []
    if not isinstance(listed, list) or any(type(layer) is not int for layer in listed):
        raise ValueError(f"mlp_only_layers must be a list of layers, got {shown(listed)}")
    sparse = common.alike(raw, mixer, experts, windows)
    plain = common.mlp(raw)

    def is_sparse(index: int) -> bool:
        return index not in listed and (index + 1) % step == 0

    return tuple(
        layer if is_sparse(index) else dataclasses.replace(layer, feed_forward=plain)
        for index, layer in enumerate(sparse)
    )


def describe_steps(config: DecoderConfig) -> dict:
    """Return the inverse of ``by_steps``, with the sizes of a mixture in Qwen's keys."""
    kinds, first = [layer.feed_forward for layer in config.layers], first_of(config)
    plain = next((kind for kind in kinds if isinstance(kind, GatedMlp)), first)
    return {
        "intermediate_size": plain.dense_size,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [i for i, kind in enumerate(kinds) if isinstance(kind, GatedMlp)],
        "moe_intermediate_size": first.intermediate_size,
        "num_experts": first.num_experts,
        "num_experts_per_tok": first.experts_per_token,
        "norm_topk_prob": first.normalise,
    }

"""Llama 4, the text part: chunks of attention, layers without a rotation, one expert beside one."""

import dataclasses

from jspec.checkpoints.families import common, experts
from jspec.checkpoints.families.common import FULL, SHARED_DEFAULTS, Family, flag, whole
from jspec.checkpoints.families.scaling import positive
from jspec.checkpoints.families.smollm3 import rotated_layers
from jspec.models.blocks.attention import Attention
from jspec.models.blocks.experts import ExpertNames, Experts
from jspec.models.blocks.mlp import GatedMlp
from jspec.models.blocks.norms import RmsNorm
from jspec.models.decoder import DecoderConfig, Layer
from jspec.util.messages import shown

_CHUNKED = "chunked_attention"
_NAMES = ExpertNames(
    router="feed_forward.router",
    experts="feed_forward.experts",
    shared="feed_forward.shared_expert",
    fused="inputs",
)


def _layers(raw: dict) -> tuple[Layer, ...]:
    raw = raw | {"no_rope_layers": raw["no_rope_layers"] or None}  # [] in published files
    rotated = rotated_layers(raw)
    mixers = [
        _mixer(raw, bool(turns), kind)
        for turns, kind in zip(rotated, _kinds(raw, rotated), strict=True)
    ]
    plain, size = GatedMlp(whole(raw, "intermediate_size_mlp")), whole(raw, "intermediate_size")
    mixture = experts.built(
        num_experts=experts.count(raw, 16),
        experts_per_token=whole(raw, "num_experts_per_tok"),
        intermediate_size=size,
        shared_size=size,
        selection_bias=False,
        normalise=False,
        weighs_inputs=True,
        names=_NAMES,
    )
    sparse, norm = _sparse(raw), common.norm(raw)
    return tuple(
        Layer(mixer, mixture if index in sparse else plain, norm)
        for index, mixer in enumerate(mixers)
    )


def _mixer(raw: dict, rotates: bool, kind: str) -> Attention:
    bias = flag(raw, "attention_bias")
    mixer = common.attention(raw, qkv_bias=bias, output_bias=bias)
    if kind == _CHUNKED:
        chunk = whole(raw, "attention_chunk_size")
        mixer = dataclasses.replace(mixer, window=chunk, chunked=True)
    if rotates:
        norm = RmsNorm(common.norm(raw).eps, scaled=False) if flag(raw, "use_qk_norm") else None
        return dataclasses.replace(mixer, qk_norm=norm, norms_rotated=True, interleaved=True)
    if raw["attn_temperature_tuning"] in (None, False, 0):
        return dataclasses.replace(mixer, rope=None)
    return dataclasses.replace(
        mixer,
        rope=None,
        query_growth=positive("attn_scale", raw["attn_scale"]),
        growth_length=whole(raw, "floor_scale"),
    )


def _kinds(raw: dict, rotated: list[int]) -> list[str]:
    """Return the kind of attention of each layer."""
    given = raw["layer_types"]
    if given is None:
        has_chunks = raw["attention_chunk_size"] is not None
        return [_CHUNKED if turns and has_chunks else FULL for turns in rotated]
    known = isinstance(given, list) and all(kind in (FULL, _CHUNKED) for kind in given)
    if not known or len(given) != len(rotated):
        raise ValueError(
            f"layer_types must name {FULL} or {_CHUNKED} for each of {len(rotated)} layers, got "
            f"{shown(given)}"
        )
    return given


def _sparse(raw: dict) -> list[int]:
    """Return the layers with experts."""
    given, step = raw["moe_layers"], whole(raw, "interleave_moe_layer_step")
    if given is None:
        return list(range(step - 1, whole(raw, "num_hidden_layers"), step))
    if not isinstance(given, list) or any(type(layer) is not int for layer in given):
        raise ValueError(f"moe_layers must be a list of layers, got {shown(given)}")
    return given


def _describe(config: DecoderConfig) -> dict:
    mixers = [layer.mixer for layer in config.layers]
    kinds, first = [layer.feed_forward for layer in config.layers], experts.first_of(config)
    if not all(isinstance(mixer, Attention) for mixer in mixers):
        raise ValueError(f"its layers have {mixers[0].title}")
    plain = next((kind for kind in kinds if isinstance(kind, GatedMlp)), first)
    growth = next((mixer for mixer in mixers if mixer.query_growth), None)
    return {
        "attention_bias": mixers[0].qkv_bias,
        "no_rope_layers": [int(mixer.rope is not None) for mixer in mixers],
        "layer_types": [_CHUNKED if mixer.chunked else FULL for mixer in mixers],
        "attention_chunk_size": next((mixer.window for mixer in mixers if mixer.chunked), None),
        "use_qk_norm": any(mixer.qk_norm is not None for mixer in mixers),
        "attn_temperature_tuning": growth is not None,
        "attn_scale": growth.query_growth if growth else 0.1,
        "floor_scale": (growth.growth_length if growth else None) or 8192,
        "moe_layers": [i for i, kind in enumerate(kinds) if isinstance(kind, Experts)],
        "intermediate_size": first.intermediate_size,
        "intermediate_size_mlp": plain.dense_size,
        "num_local_experts": first.num_experts,
        "num_experts_per_tok": first.experts_per_token,
    }


FAMILY = Family(
    model_type="llama4_text",
    architecture="Llama4ForCausalLM",
    defaults=SHARED_DEFAULTS
    | {"num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 131072}
    | {"default_theta": 5e5, "rms_norm_eps": 1e-5, "eos_token_id": 2, "attention_bias": False}
    | {"no_rope_layers": None, "no_rope_layer_interval": 4, "layer_types": None}
    | {"attention_chunk_size": 8192, "use_qk_norm": True}
    | {"attn_temperature_tuning": True, "attn_scale": 0.1, "floor_scale": 8192}
    | {"moe_layers": None, "interleave_moe_layer_step": 1, "num_experts_per_tok": 1}
    | {"intermediate_size_mlp": 16384},
    neutral=dict.fromkeys(experts.COUNTS) | {"sliding_window": (None,)},
    layers=_layers,
    describe=_describe,
    renamed={f"mlp.{part}_proj": f"feed_forward.{part}_proj" for part in ("gate", "up", "down")},
)

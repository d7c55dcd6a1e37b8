"""Muse Glimmer, the text part: Gemma's norms, gated attention, and layers without a rotation."""

import dataclasses
from typing import Any

from jspec.checkpoints.families import common, gemma2
from jspec.checkpoints.families.common import FULL, SHARED_DEFAULTS, SLIDING, Family, whole
from jspec.checkpoints.families.scaling import positive
from jspec.models.blocks.norms import RmsNorm
from jspec.models.decoder import DecoderConfig, Layer
from jspec.util.messages import shown


def _layers(raw: dict) -> tuple[Layer, ...]:
    count, eps = whole(raw, "num_hidden_layers"), common.norm(raw).eps
    mixer = common.attention(
        raw,
        qk_norm=RmsNorm(eps, wide=True, scaled=False),
        gated=True,
        gate_apart=True,
    )
    scale = positive("qk_scale_factor", raw["qk_scale_factor"]) * mixer.head_dim**-0.5
    mixer = dataclasses.replace(mixer, scale=scale)
    kinds = [SLIDING if (count - 1 - layer) % 4 else FULL for layer in range(count)]
    thetas = raw["layer_rope_theta"]
    if thetas is None:
        thetas = [mixer.rope.theta * (kind == SLIDING) for kind in kinds]
    if not isinstance(thetas, list) or len(thetas) != count or {*thetas} - {0, mixer.rope.theta}:
        raise ValueError(
            f"layer_rope_theta must have 0 (no rotation) or rope_theta for each of {count} layers, "
            f"got {shown(thetas)}"
        )
    output_eps = positive("post_norm_eps", raw["post_norm_eps"])
    return common.alike(
        raw,
        mixer,
        common.mlp(raw),
        common.sized(raw, common.layer_types(raw) or kinds),
        [mixer.rope if theta else None for theta in thetas],
        norm=RmsNorm(eps, centred=True),
        output_norm=RmsNorm(output_eps, centred=True),
    )


def _fields(raw: dict) -> dict[str, Any]:
    eps = common.norm(raw).eps
    return {
        "norm": RmsNorm(eps, wide=True),
        "embedding_norm": RmsNorm(eps, wide=True, scaled=False),
        "logit_scale": positive("output_multiplier", raw["output_multiplier"]),
        "logit_cap": positive("final_logit_softcapping", raw["final_logit_softcapping"]),
    }


def _describe(config: DecoderConfig) -> dict:
    mixer, layers = common.attention_of(config), config.layers
    if layers[0].output_norm is None:
        raise ValueError("its outputs have no norms")
    ropes = [layer.mixer.rope for layer in layers]
    return common.describe_kinds(config) | {
        "hidden_activation": "silu",
        "layer_rope_theta": [0 if rope is None else rope.theta for rope in ropes],
        "qk_scale_factor": round((mixer.scale or 1.0) * mixer.head_dim**0.5, 9),
        "output_multiplier": config.logit_scale,
        "final_logit_softcapping": config.logit_cap,
        "post_norm_eps": layers[0].output_norm.eps,
    }


FAMILY = Family(
    model_type="muse_glimmer_text",
    architecture="MuseGlimmerForCausalLM",
    defaults={key: value for key, value in SHARED_DEFAULTS.items() if key != "hidden_act"}
    | {"num_key_value_heads": 2, "head_dim": 128, "max_position_embeddings": 131072}
    | {"rms_norm_eps": 1e-5, "post_norm_eps": 1e-8, "hidden_activation": "silu"}
    | {"sliding_window": 2048, "layer_types": None, "layer_rope_theta": None}
    | {"qk_scale_factor": 3.87, "output_multiplier": 0.19611613513818404}
    | {"final_logit_softcapping": 20.0, "eos_token_id": 200001},
    neutral={"hidden_activation": ("silu",), "final_logit_softcapping": None}
    | dict.fromkeys(("attention_bias", "mlp_bias"), (None, False)),
    layers=_layers,
    describe=_describe,
    renamed=gemma2.FAMILY.renamed,
    fields=_fields,
)

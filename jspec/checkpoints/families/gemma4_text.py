"""Gemma 4, the text part: heads of two sizes, keys that are values, and experts beside an MLP.

Small models have an input of each layer beside the residual stream, whose embedding table is larger
than the layers. Their last layers read the keys and values of the last layer of their kind before.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

from jspec.checkpoints.families import common, experts, gemma2, scaling
from jspec.checkpoints.families.common import FULL, SLIDING, Family, flag, whole
from jspec.models.blocks.attention import Attention
from jspec.models.blocks.block import FeedForward
from jspec.models.blocks.experts import ExpertNames
from jspec.models.blocks.experts_beside import ExpertsBesideMlp
from jspec.models.blocks.layer_inputs import InputGate, LayerInputs
from jspec.models.blocks.norms import RmsNorm
from jspec.models.decoder import DecoderConfig, Layer
from jspec.util.messages import shown

_ROPES = {
    SLIDING: {"rope_type": "default", "rope_theta": 1e4},
    FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
}
_NAMES = ExpertNames(router="router.proj", experts="experts", shared="mlp", fused="outputs")
_HEADS = ("head_dim", "num_key_value_heads")


def _sizes(raw: dict, layer: int) -> dict[str, Any]:
    """Return the sizes of the heads of a layer without a window, where they differ."""
    given = raw.get("per_layer_config")
    if given is None:
        sizes = {"head_dim": raw.get("global_head_dim", 512)}
        keys = raw.get("num_global_key_value_heads")
        return sizes | ({"num_key_value_heads": keys} if keys and raw["attention_k_eq_v"] else {})
    sizes = given.get(str(layer), given.get(layer, {})) if isinstance(given, dict) else None
    if not isinstance(sizes, dict) or not set(sizes) <= set(_HEADS):
        raise ValueError(
            f"per_layer_config must have {' and '.join(_HEADS)} of layers, got {shown(given)}"
        )
    return sizes


def _feed_forward(raw: dict, norm: RmsNorm, width: int = 1) -> FeedForward:
    """Return the feed-forward of a layer, whose MLP is ``width`` times as wide as others."""
    mlp = gemma2.mlp(raw | {"intermediate_size": width * raw["intermediate_size"]})
    if not flag(raw, "enable_moe_block"):
        return mlp
    return experts.built(
        kind=ExpertsBesideMlp,
        num_experts=whole(raw, "num_experts"),
        experts_per_token=whole(raw, "top_k_experts"),
        intermediate_size=whole(raw, "moe_intermediate_size"),
        shared_size=mlp.intermediate_size,
        activation=mlp.activation,
        scoring="softmax",
        selection_bias=False,
        names=_NAMES,
        norm=norm,
    )


def _sources(raw: dict, windows: Sequence[int | None]) -> list[int | None]:
    """Return the layer whose keys and values each layer reads; None for its own."""
    shared = whole(raw, "num_kv_shared_layers", 0) if raw.get("num_kv_shared_layers") else 0
    first = windows[: max(len(windows) - shared, 0)]
    last = {window: index for index, window in enumerate(first)}
    if not set(windows) <= last.keys():
        raise ValueError(
            f"num_kv_shared_layers={shared} leaves no layer of each kind of {len(windows)} with "
            "keys and values of its own"
        )
    return [None] * len(first) + [last[window] for window in windows[len(first) :]]


def _input_size(raw: dict) -> int:
    """Return the size of the inputs of each layer; 0 for none."""
    size = raw["hidden_size_per_layer_input"] or 0
    if size and raw["vocab_size_per_layer_input"] != raw["vocab_size"]:
        raise ValueError(
            f"vocab_size_per_layer_input={shown(raw['vocab_size_per_layer_input'])} must be "
            f"vocab_size, {raw['vocab_size']}"
        )
    return size and whole(raw, "hidden_size_per_layer_input")


def _fields(raw: dict) -> dict[str, Any]:
    size, norm = _input_size(raw), dataclasses.replace(common.norm(raw), wide=True)
    return gemma2.fields(raw) | {"layer_inputs": LayerInputs(size, norm) if size else None}


def _layers(raw: dict) -> tuple[Layer, ...]:
    raw = raw | {"rope_parameters": raw.get("rope_parameters") or _ROPES}
    windows = (*common.every(raw, 6)[:-1], None)  # The last layer has no window, whatever is given.
    bias = flag(raw, "attention_bias")
    norm = dataclasses.replace(common.norm(raw), wide=True)
    keys_are_values, layers = flag(raw, "attention_k_eq_v"), []
    sources, size = _sources(raw, windows), _input_size(raw)
    widths = [1 + (flag(raw, "use_double_wide_mlp") and each is not None) for each in sources]
    gate = InputGate(size, norm, gemma2.ACTIVATION) if size else None
    for index, window in enumerate(windows):
        kind = SLIDING if window else FULL
        heads = common.heads(raw if window else raw | _sizes(raw, index))
        mixer = Attention(
            *heads,
            rope=scaling.read(scaling.of_kind(raw, kind), heads[2])[0],
            window=window,
            qkv_bias=bias,
            output_bias=bias,
            qk_norm=norm,
            v_norm=RmsNorm(norm.eps, scaled=False) if sources[index] is None else None,
            scale=1.0,
            keys_are_values=keys_are_values and not window and sources[index] is None,
            source=sources[index],
        )
        feed_forward = _feed_forward(raw, norm, widths[index])
        layers.append(Layer(mixer, feed_forward, norm, norm, scaled=True, input_gate=gate))
    return tuple(layers)


def _width(layer: Layer) -> int:
    return layer.feed_forward.dense_size


def _describe(config: DecoderConfig) -> dict:
    common.attention_of(config)
    mixers = [layer.mixer for layer in config.layers]
    local = next((mixer for mixer in mixers if mixer.window), mixers[0])
    overrides = {
        str(index): {"head_dim": mixer.head_dim, "num_key_value_heads": mixer.num_kv_heads}
        for index, mixer in enumerate(mixers)
        if not mixer.window
    }
    return common.describe_kinds(config) | {
        "hidden_act": gemma2.ACTIVATION,
        "hidden_activation": gemma2.ACTIVATION,
        "max_position_embeddings": config.max_positions,
        "head_dim": local.head_dim,
        "num_key_value_heads": local.num_kv_heads,
        "per_layer_config": overrides,
        "attention_bias": local.qkv_bias,
        "attention_k_eq_v": any(mixer.keys_are_values for mixer in mixers),
        "final_logit_softcapping": config.logit_cap,
        "hidden_size_per_layer_input": config.layer_inputs.size if config.layer_inputs else 0,
        "vocab_size_per_layer_input": config.vocab_size,
        "num_kv_shared_layers": sum(mixer.source is not None for mixer in mixers),
        "use_double_wide_mlp": _width(config.layers[-1]) != _width(config.layers[0]),
        **_describe_experts(config),
        "rope_scaling": None,
    }


def _describe_experts(config: DecoderConfig) -> dict:
    """Return the keys of ``_feed_forward``."""
    first = config.layers[0].feed_forward
    if not isinstance(first, ExpertsBesideMlp):
        return {"enable_moe_block": False}
    return {
        "enable_moe_block": True,
        "num_experts": first.num_experts,
        "top_k_experts": first.experts_per_token,
        "moe_intermediate_size": first.intermediate_size,
    }


FAMILY = Family(
    model_type="gemma4_text",
    architecture="Gemma4ForCausalLM",
    defaults={
        **{"vocab_size": 262144, "hidden_size": 2304, "intermediate_size": 9216},
        **{"num_hidden_layers": 30, "num_attention_heads": 8, "num_key_value_heads": 4},
        **{"head_dim": 256, "max_position_embeddings": 131072, "rms_norm_eps": 1e-6},
        **{"hidden_activation": gemma2.ACTIVATION, "tie_word_embeddings": True},
        **{"sliding_window": 512, "layer_types": None, "attention_bias": False},
        **{"attention_k_eq_v": False, "final_logit_softcapping": None, "default_theta": 1e6},
        **{"hidden_size_per_layer_input": 256, "vocab_size_per_layer_input": 262144},
        **{"bos_token_id": 2, "eos_token_id": 1},
    },
    neutral={
        **dict.fromkeys(("hidden_act", "per_layer_config", "final_logit_softcapping")),
        "num_experts": None,
        "rope_scaling": (None,),
        "hidden_activation": (gemma2.ACTIVATION,),
        "use_bidirectional_attention": (None, "vision"),  # Images alone are read both ways.
    },
    layers=_layers,
    describe=_describe,
    ropes_by_kind=True,
    renamed=gemma2.FAMILY.renamed,
    fields=_fields,
)

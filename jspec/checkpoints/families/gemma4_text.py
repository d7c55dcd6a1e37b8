"""Gemma 4, the text part of its dense models: heads of two sizes, and keys that are values.

Embeddings by layer, keys and values of other layers, and experts are not read.
"""

import dataclasses
from typing import Any

from jspec.checkpoints.families import common, gemma2, scaling
from jspec.checkpoints.families.common import FULL, SLIDING, Family, flag
from jspec.models.blocks.attention import Attention
from jspec.models.blocks.norms import RmsNorm
from jspec.models.decoder import DecoderConfig, Layer
from jspec.util.messages import shown

_ROPES = {
    SLIDING: {"rope_type": "default", "rope_theta": 1e4},
    FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
}
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


def _layers(raw: dict) -> tuple[Layer, ...]:
    raw = raw | {"rope_parameters": raw.get("rope_parameters") or _ROPES}
    windows = (*common.every(raw, 6)[:-1], None)  # The last layer has no window, whatever is given.
    bias = flag(raw, "attention_bias")
    norm = dataclasses.replace(common.norm(raw), wide=True)
    keys_are_values, layers = flag(raw, "attention_k_eq_v"), []
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
            v_norm=RmsNorm(norm.eps, scaled=False),
            scale=1.0,
            keys_are_values=keys_are_values and not window,
        )
        layers.append(Layer(mixer, gemma2.mlp(raw), norm, norm, scaled=True))
    return tuple(layers)


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
        "hidden_size_per_layer_input": 0,
        "num_kv_shared_layers": 0,
        "enable_moe_block": False,
        "rope_scaling": None,
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
        **{"hidden_size_per_layer_input": 256, "bos_token_id": 2, "eos_token_id": 1},
    },
    neutral={
        **dict.fromkeys(("hidden_act", "per_layer_config", "final_logit_softcapping")),
        **dict.fromkeys(("hidden_size_per_layer_input", "num_kv_shared_layers"), (None, 0)),
        "enable_moe_block": (None, False),
        "rope_scaling": (None,),
        "hidden_activation": (gemma2.ACTIVATION,),
        "use_bidirectional_attention": (None, "vision"),  # Images alone are read both ways.
    },
    layers=_layers,
    describe=_describe,
    ropes_by_kind=True,
    renamed=gemma2.FAMILY.renamed,
    fields=gemma2.fields,
)

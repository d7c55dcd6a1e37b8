"""The form that a layer has in the checkpoints and records of runs.

Orbax names arrays by their path, digests take them in order, and a record holds the text of a
config. All three are those of the first runs, which held a layer in one flat record. So a run
resumes though its layers have parts by now.
"""

from typing import Any

import jax
from flax import struct

from jspec.models.blocks.attention import Attention, AttentionParams
from jspec.models.blocks.experts import ExpertsParams
from jspec.models.blocks.latent_attention import LatentAttentionParams
from jspec.models.blocks.mlp import GatedMlp, GatedMlpParams
from jspec.models.blocks.norms import RmsNorm
from jspec.models.decoder import DecoderConfig, Layer, LayerParams


@struct.dataclass
class StoredLayer:
    """Weights of a layer, in the order of digests."""

    attention_norm: Any
    qkv: Any
    output: Any
    mlp_norm: Any
    gate_up: Any
    down: Any
    qkv_bias: Any = None
    output_bias: Any = None
    gate_up_bias: Any = None
    down_bias: Any = None
    q_norm: Any = None
    k_norm: Any = None
    mla: Any = None
    moe: Any = None


# Weights that the first runs had no place for.
_NEWER = {"mixer_output_norm", "feed_forward_output_norm", "v_norm", "sinks", "scale", "input_gate"}


def to_stored(tree: Any) -> Any:
    """Return a pytree with a ``StoredLayer`` in place of every layer of a kind that has one."""
    is_layer = lambda x: isinstance(x, LayerParams)
    return jax.tree.map(lambda x: _store(x) if is_layer(x) else x, tree, is_leaf=is_layer)


def from_stored(tree: Any) -> Any:
    """Return the inverse of ``to_stored``."""
    is_stored = lambda x: isinstance(x, StoredLayer)
    return jax.tree.map(lambda x: _restore(x) if is_stored(x) else x, tree, is_leaf=is_stored)


def _store(layer: LayerParams) -> StoredLayer | LayerParams:
    mixer, feed_forward = layer.mixer, layer.feed_forward
    given = {name: x for part in (layer, mixer) for name, x in vars(part).items() if x is not None}
    if _NEWER & given.keys():
        return layer
    fields = {"attention_norm": layer.mixer_norm, "mlp_norm": layer.feed_forward_norm}
    if isinstance(mixer, AttentionParams):
        fields |= {name: x for name, x in vars(mixer).items() if name not in _NEWER}
    elif isinstance(mixer, LatentAttentionParams):
        fields |= {"qkv": None, "output": mixer.output, "mla": mixer.replace(output=None)}
    else:
        return layer
    if isinstance(feed_forward, GatedMlpParams):
        fields |= vars(feed_forward)
    elif isinstance(feed_forward, ExpertsParams) and feed_forward.shared is not None:
        fields |= {**vars(feed_forward.shared), "moe": feed_forward.replace(shared=None)}
    else:
        return layer
    return StoredLayer(**fields)


def _restore(stored: StoredLayer) -> LayerParams:
    def take(kind: type) -> Any:
        return kind(**{name: vars(stored).get(name) for name in kind.__dataclass_fields__})

    mixer = stored.mla and stored.mla.replace(output=stored.output)
    feed_forward = stored.moe and stored.moe.replace(shared=take(GatedMlpParams))
    return LayerParams(
        mixer_norm=stored.attention_norm,
        mixer=mixer or take(AttentionParams),
        feed_forward_norm=stored.mlp_norm,
        feed_forward=feed_forward or take(GatedMlpParams),
    )


def config_record(config: Any) -> str:
    """Return the text of a decoder's or a head's config in records."""
    network = config if isinstance(config, DecoderConfig) else vars(config).get("network")
    if network is None:
        return repr(config)
    return repr(config).replace(repr(network), _network_record(network))


def _network_record(config: DecoderConfig) -> str:
    plain = config.with_mixers(window=None) if any(config.windows) else config
    mixer, mlp = plain.layers[0].mixer, plain.layers[0].feed_forward
    if (type(mixer), type(mlp)) != (Attention, GatedMlp):
        return repr(config)
    norm = RmsNorm(config.norm.eps)
    first = Attention(
        mixer.num_heads,
        mixer.num_kv_heads,
        mixer.head_dim,
        mixer.rope,
        mixer.rotary_dim,
        qkv_bias=mixer.qkv_bias,
        output_bias=mixer.output_bias,
        qk_norm=mixer.qk_norm and norm,
    )
    layer = Layer(first, GatedMlp(mlp.intermediate_size, mlp.bias), norm)
    old = DecoderConfig(
        config.vocab_size,
        config.hidden_size,
        (layer,) * config.num_layers,
        config.max_positions,
        norm,
        config.tie_embeddings,
        config.cache_dtype,
        config.activation_dtype,
        config.attention,
    )
    if plain != old:  # The record of version 0.2.0 has no field for the difference.
        return repr(config)
    fields = {
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": mlp.intermediate_size,
        "num_layers": config.num_layers,
        "num_heads": mixer.num_heads,
        "num_kv_heads": mixer.num_kv_heads,
        "head_dim": mixer.head_dim,
        "max_positions": config.max_positions,
        "norm_eps": config.norm.eps,
        "rope": mixer.rope,
        "tie_embeddings": config.tie_embeddings,
        "qkv_bias": mixer.qkv_bias,
        "output_bias": mixer.output_bias,
        "mlp_bias": mlp.bias,
        "qk_norm": mixer.qk_norm is not None,
        "windows": config.windows if any(config.windows) else (),
        "cache_dtype": config.cache_dtype,
        "activation_dtype": config.activation_dtype,
        "attention": config.attention,
        "rotary_dim": mixer.rotary_dim,
        "mla": None,
        "moe": None,
    }
    text = ", ".join(f"{name}={value!r}" for name, value in fields.items())
    newer = ", share=1.0"  # Version 0.2.0 had no such field of ``RopeConfig``.
    return f"DecoderConfig({text.replace(newer, '')})"

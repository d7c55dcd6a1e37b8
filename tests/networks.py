"""Configs of small decoders with equal layers, by the sizes of one layer."""

import dataclasses
from typing import Any

import jax

from jspec.models.blocks.attention import Attention
from jspec.models.blocks.mlp import GatedMlp
from jspec.models.blocks.norms import RmsNorm
from jspec.models.decoder import DecoderConfig, Layer

_MIXER = {field.name for field in dataclasses.fields(Attention)} - {"window", "qk_norm"}
_MLP = {"intermediate_size": "intermediate_size", "mlp_bias": "bias"}


def build(**sizes: Any) -> DecoderConfig:
    """Return the config of a decoder; see ``changed``."""
    layer = Layer(Attention(1, 1, 2), GatedMlp(1))
    return changed(DecoderConfig(1, 1, (layer,), max_positions=1), **sizes)


def small(**sizes: Any) -> DecoderConfig:
    """Return the config of two narrow layers; ``sizes`` are those of ``changed``."""
    usual = {"vocab_size": 40, "num_layers": 2, "max_positions": 64}
    usual |= {"hidden_size": 32, "intermediate_size": 48}
    usual |= {"num_heads": 4, "num_kv_heads": 2, "head_dim": 8}
    return build(**usual | sizes)


def loud(params: Any, factor: float = 6) -> Any:
    """Scale the matrices of random weights up, for peaked and varied distributions."""
    return jax.tree.map(lambda x: factor * x if x.ndim > 1 else x, params)


def changed(config: DecoderConfig, **sizes: Any) -> DecoderConfig:
    """Return ``config`` with other sizes, and layers that are equal but for their windows.

    ``sizes`` are fields of ``DecoderConfig`` and of ``Attention``, and these: ``num_layers``;
    ``windows``, one for each layer or (); ``qk_norm``, a bool; ``intermediate_size`` and
    ``mlp_bias`` of a plain MLP; ``norm_eps`` of all norms; ``mixer`` and ``feed_forward``, which
    take the place of all sizes of theirs.
    """
    first = config.layers[0]
    norm = RmsNorm(sizes.pop("norm_eps", config.norm.eps))
    mixer, feed = sizes.pop("mixer", None), sizes.pop("feed_forward", None)
    switches = {name: sizes.pop(name) for name in _MIXER & sizes.keys()}
    if "qk_norm" in sizes:
        switches["qk_norm"] = norm if sizes.pop("qk_norm") else None
    mixer = mixer or dataclasses.replace(first.mixer, **switches)
    widths = {_MLP[name]: sizes.pop(name) for name in _MLP.keys() & sizes.keys()}
    feed = feed or dataclasses.replace(first.feed_forward, **widths)
    windows = sizes.pop("windows", config.windows)
    count = sizes.pop("num_layers", len(windows or config.layers))
    windows = ((windows or (None,)) * count)[:count]

    def layer(window: int | None) -> Layer:
        same = window == mixer.window
        return Layer(mixer if same else dataclasses.replace(mixer, window=window), feed, norm)

    layers = tuple(map(layer, windows))
    return dataclasses.replace(config, layers=layers, norm=norm, **sizes)

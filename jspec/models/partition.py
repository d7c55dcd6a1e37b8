"""Tensor parallelism of a decoder: its config and its weights in parts, and where each part goes.

Each device has some of the heads, some of the width of every MLP, and some of the vocabulary
(Megatron-LM, arXiv 1909.08053, section 3). ``Tensor.divided`` says it for every kind of block.
"""

import dataclasses
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from jspec.core.weights import Transposed
from jspec.models.blocks.experts import Experts
from jspec.models.blocks.tensors import Tensor
from jspec.models.decoder import DecoderConfig, DecoderParams, Layer
from jspec.sharding import TENSOR
from jspec.sharding import mesh as mesh_lib


def split(config: DecoderConfig, ways: int) -> DecoderConfig:
    """Return the config of a decoder whose weights are in parts for ``ways`` devices.

    Raises:
      ValueError: the heads or the widths cannot be divided so.
    """
    if ways == 1:
        return config
    if not _divides(config, ways):
        heads = max(layer.mixer.num_heads for layer in config.layers)
        sizes = [size for size in range(2, heads + 1) if _divides(config, size)]
        works = f"it works with {', '.join(map(str, sizes))}" if sizes else "leave it out"
        mixer = config.layers[0].mixer
        raise ValueError(
            f"tensor_parallel_size={ways} does not divide the {mixer.num_heads} heads, "
            f"{mixer.num_kv_heads} key heads and MLPs of this model; {works}."
        )
    layers = tuple(
        dataclasses.replace(
            layer, mixer=layer.mixer.split(ways), feed_forward=layer.feed_forward.split(ways)
        )
        for layer in config.layers
    )
    # Kernels take whole arrays.
    return dataclasses.replace(config, layers=layers, attention=config.attention or "xla")


def by_experts(config: DecoderConfig) -> DecoderConfig:
    """Return a config of which devices have some experts each, not a part of every expert.

    Raises:
      ValueError: it has no experts.
    """
    if not config.has_experts:
        raise ValueError("enable_expert_parallel=True, but the model has no experts; leave it out.")

    def changed(layer: Layer) -> Layer:
        if not isinstance(layer.feed_forward, Experts):
            return layer
        feed_forward = dataclasses.replace(layer.feed_forward, expert_parallel=True)
        return dataclasses.replace(layer, feed_forward=feed_forward)

    return dataclasses.replace(config, layers=tuple(map(changed, config.layers)))


def placed(params: DecoderParams, config: DecoderConfig, mesh: Mesh) -> DecoderParams:
    """Return the weights of ``config`` on a mesh, in the parts of ``split``."""
    size = mesh.shape[TENSOR]
    axes, orders = {}, {}
    if config.vocab_size % size == 0:
        axes = {("embedding",): -2, ("head",): -1}
    for path, tensor in _tensors(config):
        axes[path], orders[path] = tensor.divided_axis, tensor.parts(size)

    def divided(path: Any, leaf: Any) -> Any:
        keys = tuple(getattr(key, "name", getattr(key, "idx", None)) for key in path)
        axis, order = axes.get(keys), orders.get(keys)
        if not isinstance(leaf, Transposed):
            return _placed(leaf, axis, order, mesh)
        axis = None if axis is None else -3 - axis
        return leaf.replace(stored=_placed(leaf.stored, axis, order, mesh))

    return jax.tree_util.tree_map_with_path(
        divided, params, is_leaf=lambda x: isinstance(x, Transposed)
    )


def _placed(x: Any, axis: int | None, order: np.ndarray | None, mesh: Mesh) -> jax.Array:
    """Return an array on a mesh, split along ``axis``, whose entries come in another order."""
    if axis is None:
        return mesh_lib.placed(x, mesh)
    if order is not None:
        x = np.take(np.asarray(x), order, axis)
    return mesh_lib.placed(x, mesh, *[None] * (x.ndim + axis), TENSOR)


def _tensors(config: DecoderConfig) -> Iterator[tuple[tuple[str | int, ...], Tensor]]:
    """Yield the arrays of all layers, each after its path in the weights."""
    for index, layer in enumerate(config.layers):
        for name in ("mixer", "feed_forward"):
            for tensor in getattr(layer, name).tensors(config.hidden_size):
                yield ("layers", index, name, *tensor.path), tensor


def _divides(config: DecoderConfig, ways: int) -> bool:
    parts = (part for layer in config.layers for part in (layer.mixer, layer.feed_forward))
    return all(part.divides(ways) for part in parts)

"""Tensor parallelism of a decoder: its config and its weights in parts, and where each part goes.

Each device has some of the heads, some of the width of every MLP, and some of the vocabulary
(Megatron-LM, arXiv 1909.08053, section 3). ``Tensor.divided`` says it for every kind of block, and
``divided`` of a draft head's config for its other matrices.
"""

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from jspec.core.weights import Weight, as_stored
from jspec.models import layouts, quantised
from jspec.models.blocks.tensors import Tensor
from jspec.models.decoder import DecoderConfig
from jspec.sharding import COLUMNS, ROWS, TENSOR
from jspec.sharding.placement import Placement, Placements

Path = tuple[str | int, ...]


class Rule(NamedTuple):
    """The division of an array among devices.

    Attributes:
      spec: the axis that they divide; by default every device has the whole array.
      order: as of ``Placement``.
    """

    spec: PartitionSpec = PartitionSpec()
    order: np.ndarray | None = None


def split(config: DecoderConfig, ways: int) -> DecoderConfig:
    """Return the config of a decoder whose weights are in parts for ``ways`` devices.

    Raises:
      ValueError: the heads or the widths cannot be divided so.
    """
    if ways == 1:
        return config
    if not _divides(config, ways):
        sizes = ", ".join(map(str, sizes_of(config)))
        works = f"it works with {sizes}" if sizes else "leave it out"
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
    return dataclasses.replace(config, layers=layers)


def sizes_of(config: DecoderConfig) -> tuple[int, ...]:
    """Return the numbers of devices, from 2 on, that can split a decoder."""
    heads = max(layer.mixer.num_heads for layer in config.layers)
    return tuple(size for size in range(2, heads + 1) if _divides(config, size))


def by_experts(config: DecoderConfig) -> DecoderConfig:
    """Return a config of which devices have some experts each, not a part of every expert.

    Raises:
      ValueError: it has no experts.
    """
    if not config.has_experts:
        raise ValueError("enable_expert_parallel=True, but the model has no experts; leave it out.")
    return config.with_experts(expert_parallel=True)


def rules(config: DecoderConfig, ways: int) -> dict[Path, Rule]:
    """Return the rules of the arrays that ``ways`` devices divide, by their paths in the weights.

    Weights in these parts are those of ``split(config, ways)``.
    """
    result = {}
    if config.vocab_size % ways == 0:
        tables = ("embedding",), ("layer_inputs", "embedding")
        result = dict.fromkeys(tables, Rule(ROWS)) | {("head",): Rule(COLUMNS)}
    for path, tensor in _tensors(config):
        if tensor.divided:
            before = len(tensor.shapes[0]) + bool(tensor.stack) + tensor.divided_axis
            result[path] = Rule(PartitionSpec(*[None] * before, TENSOR), tensor.parts(ways))
    return result


def of_draft(change: Callable[[DecoderConfig], DecoderConfig], config: Any) -> Any:
    """Apply ``change`` to a draft model's config, or to the layers in that of a head, if any."""
    if isinstance(config, DecoderConfig):
        return change(config)
    network = None if config is None else vars(config).get("network")
    return config if network is None else dataclasses.replace(config, network=change(network))


def split_draft(config: Any, ways: int) -> Any:
    """Return the config of a draft model or head whose weights are in parts; see ``split``.

    Raises:
      ValueError: the heads or the widths cannot be divided so.
    """
    try:
        return of_draft(lambda network: split(network, ways), config)
    except ValueError:
        raise ValueError(
            f"draft_tensor_parallel_size={ways} does not divide the heads and MLPs of the draft "
            "network; set it to 1, so that every device has all of it."
        ) from None


def draft_rules(config: Any, ways: int) -> dict[Path, Rule]:
    """Return ``rules`` of a draft model or a head; the weights are those of ``split_draft``.

    A path without indices stands for all of them. What devices do not divide evenly stays whole.

    Raises:
      ValueError: as of ``split_draft``.
    """
    if ways == 1 or config is None:
        return {}
    split_draft(config, ways)
    if isinstance(config, DecoderConfig):
        return rules(config, ways)
    result: dict[Path, Rule] = {
        tuple(name.split(".")): Rule(spec)
        for name, (spec, size) in config.divided.items()
        if size % ways == 0
    }
    if vars(config).get("network") is not None:
        layers = rules(config.network, ways).items()
        result |= {(*config.before_layers, *path): x for path, x in layers if "layers" in path}
    return result


def placements(rules: Mapping[Path, Rule], mesh: Mesh | None) -> Placements | None:
    """Return the placements of weights on a mesh, or None for one device with default layouts.

    An array without a rule is whole on every device. ``mesh`` is None for one device.
    """
    alone = SingleDeviceSharding(jax.local_devices()[0])
    sharding = alone if mesh is None else NamedSharding(mesh, COLUMNS)
    has_layouts = layouts.takes(sharding)
    if mesh is None and not has_layouts:
        return None
    (kind,), size = {device.device_kind for device in sharding.device_set}, len(sharding.device_set)

    def placement(path: Path) -> Placement:
        layout = layouts.of(kind, path, size) if has_layouts else None
        if mesh is None:
            return Placement(alone, layout=layout)
        names = tuple(key for key in path if isinstance(key, str))
        spec, order = rules.get(path) or rules.get(names) or Rule()
        return Placement(NamedSharding(mesh, spec), order, layout)

    return placement


def placed(params: Any, rules: Mapping[Path, Rule], mesh: Mesh | None) -> Any:
    """Return whole weights in memory at their ``placements``, one array after the other."""
    placement = placements(rules, mesh)
    if placement is None:
        return params

    def put(keys: tuple[Any, ...], leaf: Any) -> jax.Array:
        return put_at(placement(path_of(keys)), leaf)

    return jax.tree_util.tree_map_with_path(put, params, is_leaf=is_array)


def put_at(placement: Placement, weight: Any) -> Any:
    """Return a whole weight at its placement, its groups with the values.

    Raises:
      ValueError: a group would belong to two devices.
    """
    weight, placement = quantised.as_divided(weight, placement)
    if not isinstance(weight, Weight):
        return placement.put(weight)
    rank = len(weight.shape)
    return jax.tree.map(lambda x: placement.of_part(x.shape, rank).put(x), weight)


def check_groups(params: Any, rules: Mapping[Path, Rule], mesh: Mesh | None) -> None:
    """Raise ValueError if devices cannot divide quantised weights, of which shapes suffice."""
    if mesh is None:
        return
    placement = placements(rules, mesh)
    for keys, leaf in jax.tree.leaves_with_path(params, is_leaf=is_array):
        for part in jax.tree.leaves(as_stored(leaf)) if isinstance(leaf, Weight) else ():
            placement(path_of(keys)).of_part(part.shape, len(leaf.shape))


def path_of(keys: tuple[Any, ...]) -> Path:
    """Return the path of JAX's keys."""
    return tuple(getattr(key, "name", getattr(key, "idx", str(key))) for key in keys)


def is_array(leaf: Any) -> bool:
    """Return whether rules are those of a node of weights, though it has a pytree below."""
    return isinstance(leaf, Weight)


def _tensors(config: DecoderConfig) -> Iterator[tuple[Path, Tensor]]:
    """Yield the arrays of all layers, each after its path in the weights."""
    for index, layer in enumerate(config.layers):
        for name in ("mixer", "feed_forward"):
            for tensor in getattr(layer, name).tensors(config.hidden_size):
                yield ("layers", index, name, *tensor.path), tensor


def _divides(config: DecoderConfig, ways: int) -> bool:
    parts = (part for layer in config.layers for part in (layer.mixer, layer.feed_forward))
    return all(part.divides(ways) for part in parts)

"""The target of a run, read by slices onto the devices that split it."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding

from jspec.checkpoints import loading
from jspec.checkpoints.loading import LoadedModel
from jspec.core.weights import as_arrays
from jspec.models import partition
from jspec.models.decoder import DecoderConfig, DecoderParams
from jspec.models.partition import Path, Rule
from jspec.sharding import TENSOR
from jspec.sharding.placement import Placement
from training.util.errors import bad_option


def split(config: DecoderConfig, tensor: int) -> DecoderConfig:
    """Return the config of a target in parts for ``--tensor`` devices.

    Raises:
      OptionError: its heads or widths cannot be divided so.
    """
    try:
        return partition.split(config, tensor)
    except ValueError as error:
        cause = str(error).partition(" ")[2].rstrip(".")
        raise bad_option("tensor", tensor, f"it {cause}") from None


def load(path: str, dtype: str, mesh: Mesh) -> LoadedModel:
    """Load a target onto a mesh, in the parts of ``split``; its config stays that of its files.

    The host reads what the devices hold, a part of an array at a time.

    Raises:
      ValueError: it cannot be read.
      OptionError: its logits are more than a product, which losses compute.
    """
    rules = partition.rules(loading.sizes(path), mesh.shape[TENSOR])

    def placement(path: Path) -> Placement:
        rule = rules.get(path, Rule())
        return Placement(NamedSharding(mesh, rule.spec), rule.order)

    target = loading.load(path, dtype, placement)
    config = target.config
    if (config.logit_scale, config.logit_cap, config.head_bias) != (1, None, False):
        remedy = "its logits are scaled, capped or biased, and losses are not; take another target"
        raise bad_option("target", path, remedy)
    return dataclasses.replace(target, params=as_arrays(target.params))


def in_order(params: DecoderParams, config: DecoderConfig, tensor: int) -> DecoderParams:
    """Return weights in the order of files, given those of ``load`` on ``tensor`` devices."""
    rules = partition.rules(config, tensor) if tensor > 1 else {}

    def ordered(path: Any, leaf: jax.Array) -> jax.Array:
        fields = tuple(getattr(key, "name", getattr(key, "idx", None)) for key in path)
        spec, order = rules.get(fields, Rule())
        if order is None:
            return leaf
        first = np.unique(order, return_index=True)[1]
        return jnp.take(leaf, first, list(spec).index(TENSOR))

    return jax.tree_util.tree_map_with_path(ordered, params)

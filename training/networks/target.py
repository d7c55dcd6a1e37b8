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
from jspec.models.blocks.attention import Attention
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


def check(option: str, path: str) -> DecoderConfig:
    """Return the sizes of a model that training runs, read from its config alone.

    Raises:
      ValueError: it cannot be read.
      OptionError: losses do not compute its logits, or training not its attention.
    """
    config = loading.sizes(path)
    mixers = [layer.mixer for layer in config.layers if isinstance(layer.mixer, Attention)]
    causes = {
        "its logits are scaled": config.logit_scale != 1,
        "its logits are capped": config.logit_cap is not None,
        "its logits are biased": config.head_bias,
        "some layers read the keys and values of others": any(x.source is not None for x in mixers),
        "it has attention in chunks": any(x.chunked for x in mixers),
    }
    reasons = " and ".join(cause for cause, is_there in causes.items() if is_there)
    if reasons:
        remedy = f"{reasons}, which training does not compute; take another model"
        raise bad_option(option, path, remedy)
    return config


def load(path: str, dtype: str, mesh: Mesh) -> LoadedModel:
    """Load a target onto a mesh, in the parts of ``split``; its config stays that of its files.

    The host reads what the devices hold, a part of an array at a time.

    Raises:
      ValueError: it cannot be read.
    """
    rules = partition.rules(loading.sizes(path), mesh.shape[TENSOR])

    def placement(path: Path) -> Placement:
        rule = rules.get(path, Rule())
        return Placement(NamedSharding(mesh, rule.spec), rule.order)

    target = loading.load(path, dtype, placement)
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

"""Compile a training step of an EAGLE-3 head for a target of 8 B parameters, and print its memory.

``python -m tests.aot.training h200`` compiles it for eight H200, and ``v5e`` for a v5e-16. It takes
minutes and needs the packages of ``[train]``, so it is no part of ``make aot``. It exits with 1 if
the step does not fit.

The sizes are those of Llama-3.1-8B with the published recipe: seven steps on the head's own
outputs, and a draft vocabulary of 32,000 tokens. training/README.md has the commands. Few layers of
the target are compiled: it is not differentiated, so that its activations are not kept.
"""

import json
import math
import os
import sys
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from jspec.models import decoder, partition
from jspec.models.partition import Rule
from tests.aot import figures
from tests.aot.devices import DEVICES, ENVIRONMENT
from tests.aot.models import MODELS
from training.data.batch import Batch
from training.networks.forward import Frozen
from training.networks.target import split
from training.tasks import eagle
from training.tasks.eagle_task import PUBLISHED, EagleTask
from training.trainer import TrainerSettings
from training.trainer import mesh as meshes
from training.trainer.programs import Programs, make_programs

# The grid of devices, and the bytes of each.
GRIDS = {"h200": ("1x1x8", 141e9), "v5e": ("v5e:4x4", 16e9)}
LAYERS, LENGTH, BATCH, VOCABULARY = 3, 1024, 32, 32000
# By number of devices: the mesh of data x fsdp x tensor, and the micro-batches of a step.
MESHES = {8: ((1, 8, 1), 2), 16: ((1, 4, 4), 4)}


def main(name: str) -> int:
    """Print the figures of a device; return the exit status."""
    os.environ.update(ENVIRONMENT)
    jax.config.update("jax_platforms", "cpu")
    device, (grid, memory) = DEVICES[name], GRIDS[name]
    devices = device.of_grid(grid)
    programs, frozen, batch = _programs(devices, LAYERS)
    traced = trace(device.platform, programs, frozen, batch)
    compiled = traced.lower(lowering_platforms=(device.platform,)).compile()
    full = _programs(devices, MODELS["llama-8b"].num_layers)
    size = sum(map(_bytes, jax.tree.leaves((full[0].layout, *full[1:]))))
    result = figures.read(compiled) | {"argument_bytes": size}
    fits = size + result["temp_bytes"] <= memory
    print(json.dumps(result | {"fits": fits}))
    return 0 if fits else 1


def trace(platform: str, programs: Programs, frozen: Frozen, batch: Batch) -> Any:
    """Trace a step as on an accelerator, with more logits and scores at a time than on a CPU."""
    with mock.patch("jax.default_backend", lambda: platform):
        return programs.step.trace(programs.layout, frozen, batch, None)


def _programs(devices: list, layers: int) -> tuple[Programs, Frozen, Batch]:
    """Return the programs of a run, and the shapes of their arguments."""
    shape, accumulate = MESHES[len(devices)]
    mesh = Mesh(np.array(devices).reshape(shape), meshes.AXES, axis_types=(AxisType.Auto,) * 3)
    target = MODELS["llama-8b"].network(layers)
    data, fsdp, tensor = shape
    settings = TrainerSettings(
        batch=BATCH,
        accumulate=accumulate,
        data_parallel=data,
        fsdp=fsdp,
        tensor=tensor,
        remat=True,
    )
    head = eagle.HeadSettings(draft_vocab_size=VOCABULARY)
    task = EagleTask(
        eagle.head_config(head, "eagle3", target),
        split(target, tensor),
        PUBLISHED["eagle3"],
        settings.compute,
        remat=True,
    )
    whole = NamedSharding(mesh, PartitionSpec())
    vocabulary = jax.ShapeDtypeStruct((VOCABULARY,), jnp.int32, sharding=whole)
    frozen = Frozen(_weights(target, mesh), None, vocabulary)
    windows = BATCH, LENGTH + 1
    at = NamedSharding(mesh, meshes.BATCH)
    dtypes = jnp.int32, jnp.int32, jnp.float32
    batch = Batch(*(jax.ShapeDtypeStruct(windows, dtype, sharding=at) for dtype in dtypes))
    return make_programs(task, frozen, settings, mesh), frozen, batch


def _weights(target: decoder.DecoderConfig, mesh: Mesh) -> decoder.DecoderParams:
    """Return the shapes of a target's weights, in their parts."""
    init = lambda: decoder.init_params(jax.random.key(0), target, jnp.bfloat16)
    rules = partition.rules(target, mesh.shape["tensor"])

    def placed(path: Any, leaf: Any) -> jax.ShapeDtypeStruct:
        fields = tuple(getattr(key, "name", getattr(key, "idx", None)) for key in path)
        at = NamedSharding(mesh, rules.get(fields, Rule()).spec)
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=at)

    return jax.tree_util.tree_map_with_path(placed, jax.eval_shape(init))


def _bytes(leaf: jax.ShapeDtypeStruct) -> int:
    """Return the bytes of a device's part of an array."""
    return math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))

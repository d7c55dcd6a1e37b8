"""Devices and processes: weights and batches on a mesh of data x fsdp x tensor."""

import math
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from training.data.batch import Batch
from training.trainer.settings import TrainerSettings
from training.util.errors import bad_option

AXES = ("data", "fsdp", "tensor")
BATCH = PartitionSpec(("data", "fsdp"))
Made = TypeVar("Made")


def start_processes(settings: TrainerSettings) -> None:
    """Join the processes of ``settings.coordinator``; call it before JAX touches a device."""
    if settings.coordinator == "auto":
        jax.distributed.initialize()
    elif settings.coordinator:
        jax.distributed.initialize(
            settings.coordinator, settings.num_processes, settings.process_id
        )


def make_mesh(settings: TrainerSettings) -> Mesh:
    """Return the mesh of ``settings`` over the devices of all processes.

    Raises:
      ValueError: the devices do not make such a mesh, or it cannot split a batch.
    """
    devices, local = jax.device_count(), jax.local_device_count()
    apart = settings.fsdp * settings.tensor
    data = settings.data_parallel or devices // apart
    count, several = data * apart, jax.process_count() > 1
    if not 0 < count <= devices or (several and count != devices):
        shape = f"{data or 1} x {settings.fsdp} x {settings.tensor}"
        remedy = f"a mesh of {shape} (data x fsdp x tensor) does not fit {devices} devices"
        raise bad_option("data_parallel", settings.data_parallel, remedy)
    if several and local % settings.tensor:
        remedy = f"it must divide the {local} devices of a process"
        raise bad_option("tensor", settings.tensor, remedy)
    rows, ways = settings.batch // settings.accumulate, data * settings.fsdp
    if rows % ways:
        parts = f"each of --accumulate {settings.accumulate} parts"
        remedy = f"{parts} must be a multiple of the {ways} devices that split it"
        raise bad_option("batch", settings.batch, remedy)
    grid = np.array(jax.devices()[:count]).reshape(data, settings.fsdp, settings.tensor)
    return Mesh(grid, AXES, axis_types=(AxisType.Auto,) * len(AXES))


def partition(shape: tuple[int, ...], mesh: Mesh) -> PartitionSpec:
    """Split the longest axis over ``fsdp`` and another one over ``tensor``.

    Only axes that split evenly are used; vectors and scalars are small and copied.
    """
    names: list[str | None] = [None] * len(shape)
    for name in ("fsdp", "tensor") if len(shape) > 1 else ():
        size = mesh.shape[name]
        free = [i for i, taken in enumerate(names) if taken is None and shape[i] % size == 0]
        if size > 1 and free:
            names[max(free, key=lambda i: shape[i])] = name
    return PartitionSpec(*names)


def shardings(tree: Any, mesh: Mesh) -> Any:
    """Return a ``NamedSharding`` by ``partition`` for every leaf with a shape."""
    return jax.tree.map(lambda leaf: NamedSharding(mesh, partition(leaf.shape, mesh)), tree)


def used(tree: Any, mesh: Mesh) -> Any:
    """Gather ``tree`` over ``fsdp`` for a loss, inside ``jit``; ``tensor`` axes stay split.

    Without this constraint XLA may gather the batch instead, which is split over ``fsdp`` too.
    """

    def gathered(leaf):
        spec = [None if name == "fsdp" else name for name in partition(leaf.shape, mesh)]
        return jax.lax.with_sharding_constraint(leaf, NamedSharding(mesh, PartitionSpec(*spec)))

    return jax.tree.map(gathered, tree)


def shard(tree: Any, mesh: Mesh) -> Any:
    """Place ``tree`` on the mesh by ``partition``; every process holds the same whole values."""
    if jax.process_count() == 1:
        return jax.device_put(tree, shardings(tree, mesh))

    def put(leaf, sharding):
        value = np.asarray(leaf)
        return jax.make_array_from_callback(value.shape, sharding, lambda index: value[index])

    return jax.tree.map(put, tree, shardings(tree, mesh))


def place_batch(batch: Batch, mesh: Mesh) -> Batch:
    """Place a batch on the mesh; every process holds its own rows.

    If one process cannot split the rows evenly, each device gets all of them; several processes
    raise ValueError.
    """
    rows = len(batch.tokens) * jax.process_count()
    ways = math.prod(mesh.shape[name] for name in BATCH[0])
    if jax.process_count() == 1:
        spec = PartitionSpec() if rows % ways else BATCH
        return jax.device_put(batch, NamedSharding(mesh, spec))
    if rows % ways:
        raise ValueError(f"a batch of {rows} windows cannot be cut over {ways} devices; take more")
    at = NamedSharding(mesh, BATCH)
    return jax.tree.map(lambda leaf: jax.make_array_from_process_local_data(at, leaf), batch)


def gather(tree: Any) -> Any:
    """Return whole host arrays, on every process."""
    if jax.process_count() == 1:
        return jax.device_get(tree)
    return multihost_utils.process_allgather(tree, tiled=True)


def first_process_first(make: Callable[[], Made]) -> Made:
    """Call ``make``, whose files the first process writes and the others only open."""
    made = make() if jax.process_index() == 0 else None
    wait_for_all("files of the first process")
    return made if jax.process_index() == 0 else make()


def wait_for_all(what: str) -> None:
    """Wait until every process is here; ``what`` names this place of the program."""
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices(what)

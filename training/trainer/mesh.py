"""Devices and processes: weights and batches on a mesh of data x fsdp x tensor.

What is trained is split by ``partition``, in the order of files. The weights of a target are split
over ``tensor`` by the rules of serving (``jspec.models.partition``); every group of devices along
that axis has all of them.
"""

import json
import math
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from jspec.models.blocks.attention import Attention
from jspec.models.blocks.mlp import GatedMlp
from jspec.sharding import TENSOR, processes
from training.data.batch import Batch
from training.trainer.settings import TrainerSettings
from training.util.errors import bad_option

AXES = ("data", "fsdp", TENSOR)
BATCH = PartitionSpec(("data", "fsdp"))
Made = TypeVar("Made")

# The axes of matrices that serving divides, by the last field of their path.
_LAYER = Attention(num_heads=1, num_kv_heads=1, head_dim=1), GatedMlp(intermediate_size=1)
_DIVIDED = {"embedding": -2, "head": -1} | {
    tensor.path[-1]: tensor.divided_axis
    for part in _LAYER
    for tensor in part.tensors(1)
    if tensor.divided
}


def start(settings: TrainerSettings) -> Mesh:
    """Join the processes of ``settings.coordinator``; call it before JAX touches a device.

    Returns:
      The mesh of a target: the first devices of this process that split it among themselves.

    Raises:
      ValueError: the processes have other settings, or the devices do not make such a mesh.
    """
    processes.start(settings.coordinator, settings.num_processes, settings.process_id)
    check_agreed(settings.identity() | settings.free())
    groups = make_mesh(settings).devices.reshape(-1, settings.tensor)
    mine = next(group for group in groups if group[0].process_index == jax.process_index())
    return Mesh(mine, (TENSOR,), axis_types=(AxisType.Auto,))


def from_all(value: Any) -> list[Any]:
    """Return the values of all processes; each is JSON."""
    if jax.process_count() == 1:
        return [value]
    text = np.frombuffer(json.dumps(value, default=str).encode(), np.uint8)
    sizes = multihost_utils.process_allgather(np.array([text.size])).reshape(-1)
    padded = np.pad(text, (0, sizes.max() - text.size))
    rows = multihost_utils.process_allgather(padded).reshape(len(sizes), -1)
    return [json.loads(row[:n].tobytes()) for row, n in zip(rows, sizes, strict=True)]


def check_agreed(options: Mapping[str, Any]) -> None:
    """Raise OptionError on every process if they do not have the same options."""
    first, *others = from_all(dict(options))
    for process, theirs in enumerate(others, 1):
        for name in first:
            if theirs.get(name) != first[name]:
                remedy = f"process 0 has {first[name]!r}; start all processes with the same"
                raise bad_option(name, theirs.get(name), f"process {process} has it, {remedy}")


def together(make: Callable[[], Made]) -> Made:
    """Return ``make()``; if it fails in one process, raise in all of them.

    Raises:
      ValueError: as in that process.
    """
    made, error = None, None
    try:
        made = make()
    except (ValueError, OSError) as caught:
        error = caught
    errors = from_all(None if error is None else str(error))
    if error is not None:
        raise error
    for process, text in enumerate(errors):
        if text is not None:
            raise ValueError(f"process {process} ends: {text}")
    return made


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


def partition(shape: tuple[int, ...], mesh: Mesh, name: str = "") -> PartitionSpec:
    """Split an array over ``fsdp`` and ``tensor``, if axes can be split evenly.

    A matrix of a layer is split over ``tensor`` as the target's with its ``name``, any other along
    its longest axis but one. The longest one that is left is split over ``fsdp``. Vectors and
    scalars are small and copied.
    """
    names: list[str | None] = [None] * len(shape)
    tensor, axis = mesh.shape[TENSOR], _DIVIDED.get(name)
    if tensor > 1 and axis is not None and len(shape) == 2 and shape[axis] % tensor == 0:
        names[axis] = TENSOR
    for name in ("fsdp", TENSOR) if len(shape) > 1 else ():
        size = mesh.shape[name]
        free = [i for i, taken in enumerate(names) if taken is None and shape[i] % size == 0]
        if size > 1 and free and name not in names:
            names[max(free, key=lambda i: shape[i])] = name
    return PartitionSpec(*names)


def shardings(tree: Any, mesh: Mesh) -> Any:
    """Return a ``NamedSharding`` for every leaf with a shape.

    A leaf on a mesh, such as that of ``start``, keeps its axes; others get ``partition``.
    """

    def of(path: Any, leaf: Any) -> NamedSharding:
        given = getattr(leaf, "sharding", None)
        if isinstance(given, NamedSharding):
            return NamedSharding(mesh, given.spec)
        field = path[-1] if path else None
        name = getattr(field, "name", getattr(field, "key", ""))
        return NamedSharding(mesh, partition(leaf.shape, mesh, name))

    return jax.tree_util.tree_map_with_path(of, tree)


def used(tree: Any, at: Any) -> Any:
    """Gather a tree of the shardings ``at`` over ``fsdp`` for a loss, inside ``jit``.

    Axes over ``tensor`` stay split. Without this constraint XLA may gather the batch instead, which
    is split over ``fsdp`` too.
    """

    def gathered(leaf, sharding):
        spec = [None if name == "fsdp" else name for name in sharding.spec]
        whole = NamedSharding(sharding.mesh, PartitionSpec(*spec))
        return jax.lax.with_sharding_constraint(leaf, whole)

    return jax.tree.map(gathered, tree, at)


def shard(tree: Any, mesh: Mesh) -> Any:
    """Place ``tree`` on the mesh by ``shardings``; every process holds the same whole values.

    Arrays on a mesh of this process are copied from device to device, others from the host.
    """

    def put(leaf: Any, at: NamedSharding) -> jax.Array:
        if not isinstance(getattr(leaf, "sharding", None), NamedSharding):
            if jax.process_count() == 1:
                return jax.device_put(leaf, at)
            value = np.asarray(leaf)
            return jax.make_array_from_callback(value.shape, at, lambda index: value[index])
        parts = {str(part.index): part.data for part in leaf.addressable_shards}
        indices = at.addressable_devices_indices_map(leaf.shape).items()
        arrays = [jax.device_put(parts[str(index)], device) for device, index in indices]
        return jax.make_array_from_single_device_arrays(leaf.shape, at, arrays)

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
    is_first = jax.process_index() == 0
    made = together(lambda: make() if is_first else None)
    others = together(lambda: None if is_first else make())
    return made if is_first else others


def wait_for_all(what: str) -> None:
    """Wait until every process is here; ``what`` names this place of the program."""
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices(what)

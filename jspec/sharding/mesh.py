"""The mesh of an engine: the devices that a target is split among."""

import contextlib
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec, Sharding

from jspec.sharding import TENSOR


def make(size: int, devices: Sequence[Any] | None = None) -> Mesh | None:
    """Return a mesh of ``size`` devices, of ``devices`` or JAX's; None for one device.

    Raises:
      ValueError: there are fewer devices.
    """
    if size == 1:
        return None
    devices = jax.devices() if devices is None else devices
    if len(devices) < size:
        raise ValueError(
            f"tensor_parallel_size={size} needs {size} devices, but JAX has {len(devices)}; lower "
            "it, or simulate devices on a CPU: "
            f"XLA_FLAGS=--xla_force_host_platform_device_count={size}."
        )
    return Mesh(np.array(devices[:size]), (TENSOR,), axis_types=(AxisType.Auto,))


def size_of(mesh: Mesh | None) -> int:
    """Return the number of devices that split a target."""
    return 1 if mesh is None else mesh.shape[TENSOR]


def on(mesh: Mesh | None) -> contextlib.AbstractContextManager:
    """Return the context in which programs are traced and run for a mesh; None for one device."""
    return contextlib.nullcontext() if mesh is None else jax.set_mesh(mesh)


def placed(tree: Any, mesh: Mesh, *spec: str | None) -> Any:
    """Return a pytree on the devices of a mesh: whole on each, or arrays split by ``spec``."""
    sharding = NamedSharding(mesh, PartitionSpec(*spec))
    return jax.tree.map(lambda x: put(x, sharding), tree)


def put(x: Any, sharding: Sharding) -> jax.Array:
    """Return an array on the devices of ``sharding``; each of several processes has all of ``x``.

    ``jax.device_put`` would compare the values of all processes, and wait for them.
    """
    if sharding.is_fully_addressable:
        return jax.device_put(x, sharding)
    x = np.asarray(x)
    return jax.make_array_from_callback(x.shape, sharding, lambda part: x[part])

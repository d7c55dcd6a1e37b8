"""The mesh of an engine: the devices that a target is split among."""

import contextlib
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, SingleDeviceSharding

from jspec.sharding import TENSOR
from jspec.sharding.placement import Placement
from jspec.util.platforms import default_backend


def make(size: int) -> Mesh | None:
    """Return the mesh of one engine, as ``make_all`` does."""
    return make_all(size, 1)[0]


def make_all(size: int, count: int) -> list[Mesh | None]:
    """Return the meshes of ``count`` engines, of ``size`` devices each; [None] for one device.

    Raises:
      ValueError: there are fewer devices, or JAX cannot start the platform that it is to run on.
    """
    default_backend()
    total, devices = size * count, jax.devices()
    if total == 1:
        return [None]
    if len(devices) < total:
        sizes = f"tensor_parallel_size={size}"
        sizes += f" times data_parallel_size={count}" if count > 1 else ""
        raise ValueError(
            f"{sizes} needs {total} devices, but JAX has {len(devices)}; lower "
            f"{'one of them' if count > 1 else 'it'}, or simulate devices on a CPU: "
            f"XLA_FLAGS=--xla_force_host_platform_device_count={total}."
        )
    grid = np.array(devices[:total]).reshape(count, size)
    return [Mesh(row, (TENSOR,), axis_types=(AxisType.Auto,)) for row in grid]


def size_of(mesh: Mesh | None) -> int:
    """Return the number of devices that split a target."""
    return 1 if mesh is None else mesh.shape[TENSOR]


def of(tree: Any) -> Mesh | None:
    """Return the mesh of several devices that a pytree was placed on; None for one device."""
    shardings = (getattr(leaf, "sharding", None) for leaf in jax.tree.leaves(tree))
    return next((each.mesh for each in shardings if isinstance(each, NamedSharding)), None)


def on(mesh: Mesh | None) -> contextlib.AbstractContextManager:
    """Return the context in which programs are traced and run for a mesh.

    A mesh of one device is JAX's default device there, so that programs, arrays and what is
    compiled ahead are as without a mesh. None stands for JAX's first device.
    """
    if mesh is None:
        return contextlib.nullcontext()
    return jax.default_device(mesh.devices[0]) if mesh.size == 1 else jax.set_mesh(mesh)


def bound(function: Callable[[], Any]) -> Callable[[], Any]:
    """Return ``function`` for another thread, on the devices that are set in this one.

    JAX finds no program that was compiled in a thread with other devices.
    """
    mesh, device = jax.sharding.get_mesh(), jax.config.jax_default_device

    def run() -> Any:
        with jax.default_device(device) if mesh.empty else jax.set_mesh(mesh):
            return function()

    return run


def moved(tree: Any, mesh: Mesh | None) -> Any:
    """Return a pytree of one mesh on the devices of another one of its size, in the same parts.

    None stands for JAX's first device, on which the pytree is then.
    """
    if mesh is None:
        return tree

    def move(x: Any) -> Any:
        if not getattr(x, "committed", False):  # A committed one would have other programs.
            with on(mesh):
                return jax.device_put(np.asarray(x))
        sharding = SingleDeviceSharding(mesh.devices[0])
        if mesh.size > 1:
            sharding = NamedSharding(mesh, x.sharding.spec)
        return Placement(sharding, layout=x.format.layout).put(x)

    return jax.tree.map(move, tree)

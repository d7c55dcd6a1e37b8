"""Several devices. Programs ask here for the mesh that is set; ``mesh`` makes one and sets it.

Each device has some heads of the target, some of its MLPs' width and some of its vocabulary;
``Tensor.divided`` says it for the weights of every kind of block. XLA splits the products by the
places of the weights. Between programs, caches of split models are split by heads. All else is on
every device: a program that returned another split would be compiled again.
"""

import math
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec, Sharding

TENSOR = "tensor"  # the axis of the mesh
# Divisions of a matrix [inputs, outputs] or a table [V, D]; of a vector, devices have rows.
ROWS, COLUMNS = PartitionSpec(TENSOR), PartitionSpec(None, TENSOR)


def num_shards() -> int:
    """Return the number of devices of the mesh that is set; 1 without one."""
    mesh = jax.sharding.get_abstract_mesh()
    return mesh.shape[TENSOR] if TENSOR in mesh.axis_names else 1


def num_row_shards(x: Any) -> int:
    """Return among how many devices a caller's mesh may divide the rows of a program's value.

    If they are several, whether any row does something is a reduction over devices.
    """
    sizes = jax.typeof(x).sharding.mesh.shape
    return math.prod(size for axis, size in sizes.items() if axis != TENSOR)


def whole(tree: Any) -> Any:
    """Place a pytree on every device; return it as it is without a mesh.

    Its leaves are values inside a program, arrays outside of one, or shapes, which get a sharding.
    """
    return _placed(tree, PartitionSpec())


def by_heads(tree: Any) -> Any:
    """Split arrays [B, H, ...] by heads, of which devices have equally many; see ``whole``."""
    return _placed(tree, PartitionSpec(None, TENSOR))


def _placed(tree: Any, spec: PartitionSpec) -> Any:
    if num_shards() == 1:
        return tree

    def placed(x: Any) -> Any:
        if isinstance(x, jax.core.Tracer):
            return lax.with_sharding_constraint(x, spec)
        sharding = NamedSharding(jax.sharding.get_mesh(), spec)
        if isinstance(x, jax.ShapeDtypeStruct):
            return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)
        return put(x, sharding)

    return jax.tree.map(placed, tree)


def put(x: Any, sharding: Sharding) -> jax.Array:
    """Return an array on the devices of ``sharding``; each of several processes has all of ``x``.

    ``jax.device_put`` would compare the values of all processes, and wait for them.
    """
    if sharding.is_fully_addressable or getattr(x, "sharding", None) == sharding:
        return jax.device_put(x, sharding)
    x = np.asarray(x)
    return jax.make_array_from_callback(x.shape, sharding, x.__getitem__)


def over_heads(function: Callable[..., jax.Array], *, is_split: bool) -> Callable[..., jax.Array]:
    """Return a function of arrays that runs on every device, on the device's own heads.

    Arrays [B, H, N, D] are split by heads, if devices get equally many, and the result is split
    like the first of them. Others are whole, and all if not ``is_split``. None is no array.
    """
    shards = num_shards()
    if shards == 1:
        return function

    def spec(x: jax.Array) -> PartitionSpec:
        has_parts = is_split and x.ndim == 4 and x.shape[1] % shards == 0
        return PartitionSpec(None, TENSOR) if has_parts else PartitionSpec()

    def run(*arrays: jax.Array | None) -> jax.Array:
        specs = jax.tree.map(spec, arrays)
        each = jax.shard_map(function, in_specs=specs, out_specs=specs[0], check_vma=False)
        return each(*arrays)

    return run


def undivided(x: jax.Array) -> jax.Array:
    """Keep the last axis of a value whole on every device, inside a program.

    XLA would divide what is multiplied with a matrix of divided rows, back to where it comes from.
    """
    if num_shards() == 1:
        return x
    others = [PartitionSpec.UNCONSTRAINED] * (x.ndim - 1)
    return lax.with_sharding_constraint(x, PartitionSpec(*others, None))


def summed(
    function: Callable[..., Any],
    parts: Any,
    *others: Any,
    specs: Any = PartitionSpec(TENSOR),  # noqa: B008 (immutable)
) -> Any:
    """Run ``function`` on every device, and return the sum of the results.

    Its first argument is the device's own share of the pytree ``parts``, split by ``specs``: along
    axis 0, if they are not given. ``others`` are whole.
    """

    def run(parts: Any, others: tuple[Any, ...]) -> Any:
        return lax.psum(function(parts, *others), TENSOR)

    specs = specs, PartitionSpec()
    # The loops of a function begin with arrays that are equal on all devices, and end with others.
    each = jax.shard_map(run, in_specs=specs, out_specs=PartitionSpec(), check_vma=False)
    return each(parts, others)

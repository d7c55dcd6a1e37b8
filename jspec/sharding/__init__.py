"""Several devices. Programs ask here for the mesh that is set; ``mesh`` makes one and sets it.

Each device has some heads of the target, some of its MLPs' width and some of its vocabulary;
``Tensor.divided`` says it for the weights of every kind of block. XLA splits the products by the
places of the weights. Between programs, the caches of the target are split by heads. All else is
on every device: a program that returned another split would be compiled again.
"""

from collections.abc import Callable
from typing import Any

import jax
from jax import lax
from jax.sharding import PartitionSpec

TENSOR = "tensor"  # the axis of the mesh


def num_shards() -> int:
    """Return the number of devices of the mesh that is set; 1 without one."""
    mesh = jax.sharding.get_abstract_mesh()
    return mesh.shape[TENSOR] if TENSOR in mesh.axis_names else 1


def whole(tree: Any) -> Any:
    """Place a pytree on every device, inside a program; return it as it is without a mesh."""
    if num_shards() == 1:
        return tree
    return jax.tree.map(lambda x: lax.with_sharding_constraint(x, PartitionSpec()), tree)


def by_heads(tree: Any) -> Any:
    """Split arrays [B, H, ...] by heads, inside a program, if each device gets as many."""
    shards = num_shards()
    if shards == 1:
        return tree

    def split(x: jax.Array) -> jax.Array:
        is_split = x.ndim > 1 and x.shape[1] % shards == 0
        spec = PartitionSpec(None, TENSOR) if is_split else PartitionSpec()
        return lax.with_sharding_constraint(x, spec)

    return jax.tree.map(split, tree)


def summed(function: Callable[..., Any], parts: tuple[Any, ...], *others: Any) -> Any:
    """Run ``function`` on every device, and return the sum of the results.

    Its first arguments are the device's own shares of ``parts``, split along axis 0. ``others``
    are whole.
    """

    def run(parts: tuple[Any, ...], others: tuple[Any, ...]) -> Any:
        return lax.psum(function(*parts, *others), TENSOR)

    specs = PartitionSpec(TENSOR), PartitionSpec()
    # The loops of a function begin with arrays that are equal on all devices, and end with others.
    each = jax.shard_map(run, in_specs=specs, out_specs=PartitionSpec(), check_vma=False)
    return each(parts, others)


def settled(state: Any) -> Any:
    """Place the state of a batch, inside a program: its ``cache`` and ``pools`` by heads."""
    if num_shards() == 1:
        return state
    layers = by_heads(state.cache.layers)
    rest = whole(state.replace(cache=state.cache.replace(layers=()), pools=()))
    return rest.replace(cache=rest.cache.replace(layers=layers), pools=pools(state.pools))


def pools(each: tuple[Any, ...]) -> tuple[Any, ...]:
    """Place the pools of caches, of which the first one is the target's."""
    return by_heads(each[:1]) + whole(each[1:])

"""Digests of arrays, which depend on every bit and not on how the arrays are placed on devices.

A device reads the arrays at the speed of its memory. A CPU takes about 2 ns a value on one core,
which is 20 s for a model of 8 B parameters.
"""

import hashlib
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jspec.core.types import Array
from training.util.stored_layers import to_stored

_GOLDEN = 0x9E3779B9  # 2^32 divided by the golden ratio


def total(leaf: Array) -> Array:
    """Return the sum of hashes of every value with its index, uint32 [], modulo 2^32."""
    index = jnp.zeros(leaf.shape, jnp.uint32)
    for axis in range(leaf.ndim):  # a flat array would gather the parts of a sharded one
        stride = jnp.uint32(math.prod(leaf.shape[axis + 1 :]) % 2**32)
        index += stride * jax.lax.broadcasted_iota(jnp.uint32, leaf.shape, axis)
    x = _bits(leaf) ^ (index * jnp.uint32(_GOLDEN))
    x = (x ^ (x >> 16)) * jnp.uint32(0x7FEB352D)  # lowbias32, a permutation of the integers
    x = (x ^ (x >> 15)) * jnp.uint32(0x846CA68B)
    return (x ^ (x >> 16)).sum(dtype=jnp.uint32)


def _bits(leaf: Array) -> Array:
    """Return the values as uint32; no two values of a dtype have the same bits."""
    if not jnp.issubdtype(leaf.dtype, jnp.floating):
        return leaf.astype(jnp.uint32)
    same_size = jnp.dtype(f"uint{8 * leaf.dtype.itemsize}")
    return jax.lax.bitcast_convert_type(leaf, same_size).astype(jnp.uint32)


_total = jax.jit(total)


@jax.jit
def _rounded_total(leaf: Array) -> Array:
    """Return ``total`` of weights that were rounded to bfloat16."""
    floats = jnp.issubdtype(leaf.dtype, jnp.floating)
    return total(leaf.astype(jnp.bfloat16) if floats else leaf)


def tree_digest(tree: Any, total: Callable[[Array], Array] = _total) -> str:
    """Return a hash of all arrays of ``tree``; ``total`` is the function above, compiled."""
    digest = hashlib.sha256()
    for leaf in jax.tree.leaves(to_stored(tree)):
        digest.update(f"{leaf.shape} {int(total(leaf))};".encode())
    return digest.hexdigest()[:16]


def weights_digest(params: Any) -> str:
    """Return a hash of one row of every weight, and one of all weights, rounded to bfloat16.

    They do not depend on the dtype in which the weights were loaded. Earlier versions recorded only
    the first; see ``same_weights``.
    """
    rows = hashlib.sha256()
    for leaf in jax.tree.leaves(to_stored(params)):
        row = leaf[(0,) * max(leaf.ndim - 1, 0)]
        rows.update(np.asarray(row.astype(jnp.bfloat16)).tobytes())
    return f"sha256 {rows.hexdigest()[:16]}, all {tree_digest(params, _rounded_total)}"


def same_weights(before: str | None, now: str) -> bool:
    """Return whether a recorded ``weights_digest`` is that of the weights with the digest ``now``.

    >>> same_weights("sha256 ab12, all cd34", "sha256 ab12, all cd34")
    True
    >>> same_weights("sha256 ab12", "sha256 ab12, all cd34")  # recorded by an earlier version
    True
    >>> same_weights("sha256 ab12, all 0000", "sha256 ab12, all cd34")
    False
    """
    return before in (now, now.partition(", all ")[0])

"""Sizes in which XLA's form for a CPU reads a cache, and whether they differ from those of ``xla``.

The sizes are measured; ``xla_cpu`` is the form.
"""

import math

import jax

from jspec.core.narrow import Narrow
from jspec.kernels.tree_attention import xla

Array = jax.Array

# A CPU copies a block out of the cache before it multiplies, but reads an entire cache in place.
# That is faster for a short cache.
WHOLE = 320
# XLA's CPU matmul over the keys of 64 sequences, of 26 MB, takes 17 ms, and over 8 at a time 3. One
# sequence at a time is slower than all at once.
WHOLE_BYTES, GROUP_BYTES, LEAST_GROUP = 2**24, 2**22, 2
PART_NODES, MOST_PARTS = 128, 4


def differs(
    q: Array, tree_k: Array, cache_k: Array | Narrow | None, table: Array | None = None
) -> bool:
    """Return whether the form of these arguments is another than that of ``xla``.

    Where it is not, one program serves all devices, which is half as much to trace.
    """
    if cache_k is None or table is not None:
        return table is not None
    slots, rows = cache_k.shape[2], q.shape[0] * q.shape[1] * q.shape[2]
    is_whole = xla.block_of(slots, rows) >= slots and block_of(slots) >= slots
    has_parts = parts_of(q.shape[2], tree_k.shape[2]) > 1
    return not is_whole or has_parts or group_of(cache_k) < len(q)


def block_of(slots: int) -> int:
    """Return the slots at a time: short blocks follow the length, long ones save loop steps."""
    return slots if slots <= WHOLE else max(64, slots // 32)


def group_of(keys: Array | Narrow) -> int:
    """Return the sequences at a time: B, halved while it is even and keys [B, ...] too large."""
    size, each = keys.shape[0], math.prod(keys.shape[1:]) * keys.dtype.itemsize
    if size * each <= WHOLE_BYTES:
        return size
    while size % 2 == 0 and size > LEAST_GROUP and size * each > GROUP_BYTES:
        size //= 2
    return size


def parts_of(nodes: int, keys: int) -> int:
    """Return the parts of the nodes of a prompt."""
    parts = min(nodes // PART_NODES, MOST_PARTS) if nodes == keys else 1
    return parts if parts > 1 and nodes % parts == 0 else 1

"""The valid nodes of all rows in one flat list, so that a pass costs what its valid nodes cost."""

import jax.numpy as jnp
from flax import struct

from jspec.core.types import Array

_LEAST_ROWS, _GROUP = 4, 4
_LARGEST = 0.8  # share of all nodes above which a list saves nothing


@struct.dataclass
class Packing:
    """A list of M nodes of a batch of drafts [B, N]. Further entries repeat the first node."""

    nodes: Array  # [M] int32: row * N + node of each entry
    entries: Array  # [B, N] int32: the entry of each node; 0 for nodes that are not in the list
    first_only: Array  # [B] bool: rows of which no node but the first is in the list

    def pack(self, x: Array) -> Array:
        """Return the entries [1, M, ...] of ``x`` [B, N, ...]."""
        return x.reshape(-1, *x.shape[2:])[None, self.nodes]

    def unpack(self, x: Array) -> Array:
        """Return ``x`` [1, M, ...] by nodes, [B, N, ...]; undefined where they are not listed."""
        return x[0, self.entries]


def packing_of(listed: Array, size: int) -> Packing:
    """Return the packing of ``listed`` nodes, bool [B, N]; at most ``size`` of them."""
    flat = listed.reshape(-1)
    counts = jnp.cumsum(flat, dtype=jnp.int32)
    nodes = jnp.searchsorted(counts, jnp.arange(1, size + 1, dtype=jnp.int32))
    nodes = jnp.where(nodes < flat.size, nodes, nodes[0]).astype(jnp.int32)
    entries = jnp.where(listed, counts.reshape(listed.shape) - 1, 0)
    return Packing(nodes, entries, ~listed[:, 1:].any(1))


def sizes(rows: int, most: int) -> tuple[int, ...]:
    """Return the sizes of lists between a node for each of ``rows`` and all of ``most`` nodes.

    Each is about half as large again as the one before, in whole groups of rows of a matmul. Fewer
    than four rows have none: every size is a program, and would save little.

    >>> sizes(8, 40), sizes(2, 10)
    ((12, 20, 32), ())
    """
    smaller, size = [], rows
    while rows >= _LEAST_ROWS:
        size = -(-3 * size // (2 * _GROUP)) * _GROUP
        if size > _LARGEST * most:
            break
        smaller.append(size)
    return tuple(smaller)

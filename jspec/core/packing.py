"""The valid nodes of all rows in one flat list, so that a pass costs what its valid nodes cost."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax.numpy as jnp
from flax import struct
from jax import lax

from jspec.core.types import Array

_GROWTH = 1.4  # most that a matmul costs above one of just as many rows as are needed


class Matmul(NamedTuple):
    """The time of a matmul on a platform: constant up to ``free_rows``, then linear."""

    free_rows: int
    reading: int  # rows that take as long to multiply as the constant part of the time
    group: int  # rows are padded to a multiple


# A CPU reads a matrix and widens it, whatever the rows. On accelerators the time is that of the
# bytes until the multiplications take longer; docs/tpu_and_gpu.md has the table.
MATMULS = {"cpu": Matmul(8, 24, 4), "gpu": Matmul(128, 0, 16), "tpu": Matmul(128, 0, 16)}


@struct.dataclass
class Packing:
    """A list of M nodes of a batch of drafts [B, N]; listed nodes come first.

    Further entries repeat a node.
    """

    nodes: Array  # [M] int32: row * N + node of each entry
    entries: Array  # [B, N] int32: the entry of each node; 0 for nodes that are not in the list
    rows: Array  # [B] bool: rows that have nodes in the list
    count: Array  # [] int32, listed nodes
    size_index: Array  # [] int32, of the smallest of ``sizes`` that holds them
    sizes: tuple[int, ...] = struct.field(pytree_node=False)  # ascending to M

    def pack(self, x: Array) -> Array:
        """Return the entries [1, M, ...] of ``x`` [B, N, ...]."""
        return x.reshape(-1, *x.shape[2:])[None, self.nodes]

    def unpack(self, x: Array) -> Array:
        """Return ``x`` [1, M, ...] by nodes, [B, N, ...]; undefined where they are not listed."""
        return x[0, self.entries]

    def over(self, function: Callable[[Array], Array], x: Array) -> Array:
        """Run ``function`` over the first entries of x [1, M, ...]: the fewest of ``sizes``.

        The function maps [1, m, ...] to [1, m, ...], each entry for itself. Other entries are 0.
        """

        def first(size: int) -> Callable[[Array], Array]:
            def run(x: Array) -> Array:
                y = function(x[:, :size])
                return jnp.pad(y, ((0, 0), (0, x.shape[1] - size), *[(0, 0)] * (y.ndim - 2)))

            return run

        if len(self.sizes) == 1:
            return function(x)
        return lax.switch(self.size_index, list(map(first, self.sizes)), x)


def packing_of(listed: Array, sizes: Sequence[int]) -> Packing:
    """Return the packing of ``listed`` nodes, bool [B, N]: at most the last of ``sizes``."""
    flat = listed.reshape(-1)
    counts = jnp.cumsum(flat, dtype=jnp.int32)
    nodes = jnp.searchsorted(counts, jnp.arange(1, sizes[-1] + 1, dtype=jnp.int32))
    nodes = jnp.where(nodes < flat.size, nodes, nodes[0]).astype(jnp.int32)
    entries = jnp.where(listed, counts.reshape(listed.shape) - 1, 0)
    return Packing(
        nodes=nodes,
        entries=entries,
        rows=listed.any(1),
        count=counts[-1],
        size_index=jnp.searchsorted(jnp.array(sizes[:-1], jnp.int32), counts[-1]),
        sizes=tuple(sizes),
    )


def sizes(rows: int, most: int, platform: str) -> tuple[int, ...]:
    """Return the lengths of lists of up to ``most`` nodes of ``rows`` rows.

    ``platform`` is one of ``MATMULS``.

    >>> sizes(8, 40, "cpu"), sizes(8, 8, "cpu"), sizes(8, 40, "tpu"), sizes(64, 320, "gpu")
    ((8, 20, 40), (8,), (40,), (128, 176, 320))
    """
    size, reading, group = MATMULS[platform]
    # A CPU multiplies one vector three times as fast as a few, in float32.
    ascending = [1] if rows == 1 and platform == "cpu" and most > 1 else []
    while (size + reading) * _GROWTH < most + reading:
        ascending.append(size)
        size = int((size + reading) * _GROWTH - reading) // group * group
    return (*ascending, most)

"""The valid nodes of all rows in one flat list, so that a pass costs what its valid nodes cost."""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax

from jspec.core.types import Array

# Every size is compiled. So a matmul may take 1.4 times as long as one of just the rows that it
# needs, or longer if there were too many sizes; and a few of many rows get no sizes of their own.
_GROWTH, _FEW = 1.4, 8


class Matmul(NamedTuple):
    """The time of a matmul on a platform: constant up to ``free_rows``, then linear."""

    free_rows: int
    reading: int  # rows that take as long to multiply as the constant part of the time
    group: int  # rows are padded to a multiple
    most_steps: int  # between the sizes


# A CPU reads a matrix and widens it, whatever the rows. On accelerators the time is that of the
# bytes until the multiplications take longer; docs/tpu_and_gpu.md has the table.
MATMULS = {"cpu": Matmul(8, 24, 4, 4), "gpu": Matmul(128, 0, 16, 3), "tpu": Matmul(128, 0, 16, 3)}


@struct.dataclass
class Packing:
    """A list of M nodes of a batch of drafts [B, N]; listed nodes come first.

    Further entries repeat a node.
    """

    nodes: Array  # [M] int32: row * N + node of each entry
    entries: Array  # [B, N] int32: the entry of each node; 0 for nodes that are not in the list
    rows: Array  # [B] bool: rows that have nodes in the list
    first_only: Array | None  # [B] bool: rows that list their first node alone, or nothing
    count: Array  # [] int32, listed nodes
    size_index: Array  # [] int32, of the smallest of ``sizes`` that holds them
    sizes: tuple[int, ...] = struct.field(pytree_node=False)  # ascending to M

    def pack(self, x: Array) -> Array:
        """Return the entries [1, M, ...] of ``x`` [B, N, ...]."""
        return x.reshape(-1, *x.shape[2:])[None, self.nodes]

    def unpack(self, x: Array) -> Array:
        """Return ``x`` [1, M, ...] by nodes, [B, N, ...]; undefined where they are not listed."""
        return x[0, self.entries]

    def by_nodes(self, x: Array) -> Array:
        """Return ``unpack`` of ``x`` with 0 where nodes are not listed."""
        listed = self.nodes[self.entries] == jnp.arange(self.entries.size).reshape(
            self.entries.shape
        )
        return jnp.where(listed.reshape(*listed.shape, *[1] * (x.ndim - 2)), self.unpack(x), 0)

    def from_size(self, least: int) -> "Packing":
        """Return the packing without sizes below ``least``, where a larger one takes as long."""
        sizes = tuple(size for size in self.sizes[:-1] if size >= least) + self.sizes[-1:]
        index = jnp.maximum(self.size_index - (len(self.sizes) - len(sizes)), 0)
        return self.replace(sizes=sizes, size_index=index)

    def over(self, function: Callable[..., Any], *xs: Array) -> Any:
        """Run ``function`` over the first entries of arrays [1, M, ...]: the fewest of ``sizes``.

        The function maps arrays [1, m, ...] to such arrays, each entry for itself. Other entries
        of the results are 0.
        """
        most = self.sizes[-1]

        def widen(y: Array) -> Array:
            return jnp.pad(y, ((0, 0), (0, most - y.shape[1]), *[(0, 0)] * (y.ndim - 2)))

        def first(size: int) -> Callable[..., Any]:
            return lambda *xs: jax.tree.map(widen, function(*(x[:, :size] for x in xs)))

        if len(self.sizes) == 1:
            return function(*xs)
        return lax.switch(self.size_index, [first(size) for size in self.sizes], *xs)


def packing_of(listed: Array, sizes: Sequence[int], drafts_always: bool = False) -> Packing:
    """Return the packing of ``listed`` nodes, bool [B, N]: at most the last of ``sizes``.

    With ``drafts_always``, no row lists its first node alone, so ``first_only`` is None.
    """
    flat = listed.reshape(-1)
    counts = jnp.cumsum(flat, dtype=jnp.int32)
    nodes = jnp.searchsorted(counts, jnp.arange(1, sizes[-1] + 1, dtype=jnp.int32))
    nodes = jnp.where(nodes < flat.size, nodes, nodes[0]).astype(jnp.int32)
    entries = jnp.where(listed, counts.reshape(listed.shape) - 1, 0)
    return Packing(
        nodes=nodes,
        entries=entries,
        rows=listed.any(1),
        first_only=None if drafts_always else ~listed[:, 1:].any(1),
        count=counts[-1],
        size_index=jnp.searchsorted(jnp.array(sizes[:-1], jnp.int32), counts[-1]),
        sizes=tuple(sizes),
    )


def sizes(rows: int, most: int, platform: str) -> tuple[int, ...]:
    """Return the lengths of lists of up to ``most`` nodes of ``rows`` rows.

    ``platform`` is one of ``MATMULS``.

    >>> sizes(8, 40, "cpu"), sizes(8, 8, "cpu"), sizes(8, 40, "tpu"), sizes(64, 320, "gpu")
    ((8, 20, 40), (8,), (40,), (128, 176, 240, 320))
    """
    free_rows, reading, group, most_steps = MATMULS[platform]
    least = max(free_rows, rows // _FEW // group * group)
    span = (most + reading) / (least + reading)
    steps = min(max(round(math.log(span, _GROWTH)), 0), most_steps)
    between = ((least + reading) * span ** (step / steps) - reading for step in range(1, steps))
    ascending = [least] * (steps > 0) + [round(size / group) * group for size in between]
    # A CPU multiplies one vector three times as fast as a few, in float32.
    alone = [1] if rows == 1 and platform == "cpu" and most > 1 else []
    return (*alone, *ascending, most)

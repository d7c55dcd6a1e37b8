"""The work of a grouped product on Hopper GPUs: rows of one group each, a tile at a time."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

Array = jax.Array


class Items(NamedTuple):
    """Up to a tile of rows of one group each, int32 [I]; those behind the last have no rows."""

    group: Array
    begin: Array
    count: Array  # rows


def items_of(sizes: Array, rows: int, tile: int) -> Items:
    """Return the work of groups with ``sizes`` [E], ``rows`` together at most."""
    groups = len(sizes)
    tiles = -(-sizes // tile)
    item = jnp.arange(min(groups, rows) + rows // tile, dtype=jnp.int32)
    last_tile, ends = jnp.cumsum(tiles), jnp.cumsum(sizes)
    group = jnp.minimum((last_tile <= item[:, None]).sum(1), groups - 1)
    nth = item - (last_tile - tiles)[group]
    begin = nth * tile
    count = jnp.clip(sizes[group] - begin, 0, tile)
    integers = (group, (ends - sizes)[group] + begin, jnp.where(nth < tiles[group], count, 0))
    return Items(*(x.astype(jnp.int32) for x in integers))


def write(out_s: Any, out: Any, first: Array, rows: Array, columns: Any) -> None:
    """Copy the first ``rows`` of a tile in shared memory to those of ``out`` from ``first`` on."""
    for power in range(out_s.shape[0].bit_length()):  # copies have a static number of rows

        @pl.when(rows & (1 << power) != 0)
        def _(size=1 << power):
            done = rows & -(2 * size)
            written = out.at[pl.ds(first + done, size), columns]
            plgpu.copy_smem_to_gmem(out_s.at[pl.ds(done, size)], written)

    plgpu.wait_smem_to_gmem(0)

"""Copies of the states of rows, behind the last page's end that a text has passed."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jspec.core.entries import NODE_AXIS, Commit, Entry
from jspec.core.types import Array


def with_copies(
    layers: tuple[Entry, ...], new: tuple[Any, ...], commit: Commit
) -> tuple[Entry, ...]:
    """Return layers with a copy of each state behind the last page's end that a commit passes.

    Few rows pass one in a round, so it is a loop over these. A branch would copy the states. XLA
    for TPU would move what a loop writes as a whole into its fast memory and back in every round.

    Args:
      layers: entries of a cache, of which some have pages.
      new: as of ``kv_cache.append``.
      commit: the nodes that rows are about to append.
    """
    keeping = [layer for layer, entry in enumerate(layers) if entry.copy is not None]
    pool = next(entry for entry in layers if entry.has_pages)
    size = jax.tree.leaves(pool)[0].shape[NODE_AXIS]
    length = commit.length
    passed = (length + commit.count) // size * size - length
    order = jnp.argsort(passed <= 0)  # the rows that pass a page's end come first
    states = [layers[layer].replace(copy=None) for layer in keeping]
    nodes = [new[layer] for layer in keeping]

    def keep(turn: Array, copies: list[Entry]) -> list[Entry]:
        row = order[turn]

        def one(x: Array) -> Array:
            return lax.dynamic_slice_in_dim(x, row, 1)

        def put(copy: Array, fresh: Array) -> Array:
            return lax.dynamic_update_slice_in_dim(copy, fresh, row, 0)

        mine = Commit(one(commit.path), one(passed), one(length))
        pairs = zip(*jax.tree.map(one, (states, nodes)), strict=True)
        return jax.tree.map(put, copies, [state.append(values, mine) for state, values in pairs])

    copies = [layers[layer].copy for layer in keeping]
    copies = lax.fori_loop(0, (passed > 0).sum(), keep, copies)
    layers = list(layers)
    for layer, copy in zip(keeping, copies, strict=True):
        layers[layer] = layers[layer].replace(copy=copy)
    return tuple(layers)

"""Drafters whose head keeps a KV cache of its own, in step with the target's.

Row i of such a head pairs the target's feature f_i with the next token t_{i+1}, and predicts
t_{i+2}. With the root at position r, the last row of the target's features is r - 1: ::

    row                    0      1    ...   r-1    |    r      r+1   ...   drafted rows
    feature               f_0    f_1   ...  f_{r-1} |   f'_{r}  f'_{r+1}    output of the row before
    token                 t_1    t_2   ...  root    |   x_1     x_2         drafted
    rotated to             0      1    ...   r-1    |    r      r+1
    predicts              t_2    t_3   ...   x_1    |   x_2     x_3

The drafted rows are in a side buffer for one round. The verdict gives the target's features of the
accepted path: these rows enter the cache, and the next round starts from the output of the last
one. So all rows of the cache hold features of the target. A prompt of one token gives
no row, so its first round drafts nothing.
"""

import dataclasses
from typing import Any, ClassVar

import jax.numpy as jnp
from flax import struct

from jspec.core import kv_cache
from jspec.core.types import Array, History
from jspec.drafters.base.tree_drafter import TreeDrafter, along_path
from jspec.drafters.trees.tree_settings import Dynamic


@struct.dataclass
class CachedMemory:
    """The head's cache of rows 0 to r - 1, and its outputs that the next round starts from."""

    cache: kv_cache.KVCache
    hidden: Array  # [B, m, D], output of row r - 1, and of mask rows behind it if there are any

    @classmethod
    def empty(cls, cache: kv_cache.KVCache, rows: int, config: Any) -> "CachedMemory":
        """Return a memory of an empty cache, and ``rows`` outputs of the config's size."""
        shape = len(cache.length), rows, config.hidden_size
        return cls(cache, jnp.zeros(shape, config.network.activation_dtype))

    def commit(self, out: Array, entries: tuple, count: Array, size: int) -> "CachedMemory":
        """Commit the first ``count`` [B] of ``size`` rows.

        ``out`` [B, m, D] are the outputs of the last of them and of the mask rows behind it.
        """
        # The entries are computed before the rows have attended to the cache. The write depends on
        # their output (a row of NaN commits nothing), or XLA copies the cache.
        count = jnp.where(jnp.isnan(out[:, 0, 0]), 0, count)
        rows = jnp.broadcast_to(jnp.arange(size), (len(count), size))
        return CachedMemory(
            cache=kv_cache.append(self.cache, entries, rows, count),
            hidden=jnp.where((count > 0)[:, None, None], out, self.hidden),
        )


@dataclasses.dataclass(frozen=True)
class CachedDrafter(TreeDrafter):
    """Drafting by rows of features and tokens, a chain or any tree.

    ``_start`` returns row r - 1 as the first frontier, and ``_feed`` runs the rows of drafted
    tokens on the outputs of their parents. ``_commit`` commits the first ``count`` [B] of n rows of
    target features [B, n, D] and next tokens.
    """

    lookahead: ClassVar[int | None] = 1  # a row has the token after its feature
    catches_up: ClassVar[bool] = True

    def missing(self, memory, history):
        """Return the number of rows of the target's features that are not in the cache, [B]."""
        return history.length - 1 - self._length(memory)

    def prefill(self, params, memory, tokens, features, start, valid):
        """Commit a chunk of the prompt: its features, each with the next token."""
        return self._commit(params, memory, tokens[:, 1:], features, valid)

    def update(self, round):
        """Commit the rows of the accepted path, whose features the target has computed."""
        history, path, count = round.history, round.verdict.path, round.verdict.num_emitted
        root = history.length - count - 1
        positions = root[:, None] + jnp.arange(path.shape[1])
        following = jnp.take_along_axis(history.tokens, positions + 1, 1, mode="promise_in_bounds")
        features = along_path(round.out.features, path)
        return self._commit(round.params, round.memory, following, features, count), round.shared

    def _ready(self, memory):
        return self._length(memory) > 0

    def _length(self, memory: Any) -> Array:
        """Return the number of rows in the cache [B]."""
        return memory.cache.length

    @property
    def _frontier_size(self) -> tuple[int, int]:
        """Nodes of the first frontier (of full width in a dynamic tree), and slots of a round."""
        if isinstance(self.draft_tree, Dynamic):
            width, slots = self.draft_tree.top_k, (self.max_depth - 1) * self.draft_tree.top_k
        else:
            width, slots = 1, sum(width > 0 for width in self.draft_tree.widths[1:])
        return width, max(slots, 1)  # attention needs at least one slot


def own_slots(slots: int, slot: int | Array, count: int) -> Array:
    """Return bool [F, slots]: the side slot of each of ``count`` rows, the first at ``slot``."""
    return jnp.arange(slots) == slot + jnp.arange(count)[:, None]


def positions_of(history: History, drafted: Array, depth: int | Array) -> Array:
    """Return the positions [B, F] of the rows of drafted tokens [B, F] at ``depth``."""
    return jnp.broadcast_to((history.length - 2 + depth)[:, None], drafted.shape)

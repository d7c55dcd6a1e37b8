"""EAGLE: a head of one block drafts in the space of the target's hidden states.

Which rows the head sees, and which of them it keeps, is told in ``jspec.drafters.base.cached``. EAGLE-1,
-2 and -3 (arXiv 2401.15077, 2406.16858, 2503.01840) differ in the network, which is the head's own
affair, and in the tree, which is a setting.
"""

import dataclasses
from typing import NamedTuple

import jax.numpy as jnp

from jspec.core import kv_cache
from jspec.core.types import Array
from jspec.drafters.base.cached import CachedDrafter, own_slots, positions_of
from jspec.drafters.base.features import CachedMemory
from jspec.drafters.base.tree_drafter import last_of, rows
from jspec.models.heads import eagle as head
from jspec.models.heads.eagle import EagleConfig, EagleParams
from jspec.models.heads.network import embed


class _Frontier(NamedTuple):
    """Rows whose children are wanted."""

    hidden: Array  # [B, F, D], what they gave out
    seen: Array  # [B, F, M], side slots above them, their own included
    side: tuple[kv_cache.AttentionKV, ...]  # [B, Hkv, M, head_dim] a layer


@dataclasses.dataclass(frozen=True)
class Eagle(CachedDrafter):
    """Drafting by an EAGLE head, a chain or any tree.

    Raises:
      ValueError: a setting is out of range, or does not go with the tree or the head.
    """

    weights = (EagleParams,)

    config: EagleConfig

    def __post_init__(self):
        super().__post_init__()
        narrow = min((window for window in self.config.network.windows if window), default=None)
        if narrow is not None and narrow <= self.max_depth:
            raise ValueError(
                f"a draft {self.max_depth} deep does not fit into the head's sliding window of "
                f"{narrow}; it must be at most {narrow - 1}."
            )

    def init(self, params, request, capacity):
        """An empty cache."""
        batch = request.max_length.shape[0]
        shape = batch, 1, self.config.hidden_size
        hidden = jnp.zeros(shape, self.config.network.activation_dtype)
        return CachedMemory(head.init_cache(self.config, batch, capacity), hidden)

    def _take_in(self, params, memory, following, features, count):
        fused = head.fuse(params.drafter, self.config, features)
        embedded = self._embed(params, following)
        out, entries = head.take_in(
            params.drafter, self.config, embedded, fused, memory.cache, last_of(count)
        )
        return memory.take_in(out, entries, count, following.shape[1])

    def _start(self, params, memory):
        (width, slots), batch = self._frontier_size, memory.hidden.shape[0]
        frontier = _Frontier(
            hidden=jnp.repeat(memory.hidden, width, 1),
            seen=jnp.zeros((batch, width, slots), bool),
            side=head.init_cache(self.config, batch, slots).layers,
        )
        return frontier, self._unembed(params, memory.hidden), memory.cache.length

    def _feed(self, params, memory, history, frontier, drafted, parents, depth, slot):
        take = lambda x: rows(x, parents)
        seen = take(frontier.seen) | own_slots(frontier.seen.shape[2], slot, drafted.shape[1])
        hidden, side = head.extend(
            params.drafter,
            self.config,
            self._embed(params, drafted),
            take(frontier.hidden),
            positions_of(history, drafted, depth),
            memory.cache,
            frontier.side,
            slot,
            seen,
        )
        return _Frontier(hidden, seen, side), self._unembed(params, hidden)

    def _embed(self, params, ids):
        return embed(params.drafter, self.config, ids, self.target, params.target)

    def _unembed(self, params, hidden):
        return head.unembed(params.drafter, self.config, hidden, self.target, params.target)

"""EAGLE: a head of one block drafts in the space of the target's hidden states.

``jspec.drafters.base.cached`` describes the rows that the head reads, and those that it keeps.
EAGLE-1, -2 and -3 (arXiv 2401.15077, 2406.16858, 2503.01840) differ in the head network and in the
tree, which is a setting.

See ``jspec.models.heads.eagle`` for the network, ``jspec.checkpoints.heads.eagle`` for files,
``training.tasks.eagle`` for training.
"""

import dataclasses
from typing import NamedTuple

import jax.numpy as jnp

from jspec.core.entries import AttentionKV
from jspec.core.kv_cache import side_buffers
from jspec.core.types import Array
from jspec.drafters.base.cached import CachedDrafter, CachedMemory, own_slots, positions_of
from jspec.drafters.base.tree_drafter import check_window, last_of, rows
from jspec.models import decoder
from jspec.models.blocks.attend import attention_beside
from jspec.models.heads import eagle as head
from jspec.models.heads.eagle import EagleConfig, EagleParams
from jspec.models.heads.network import embed


class _Frontier(NamedTuple):
    """Rows whose children are drafted next."""

    hidden: Array  # [B, F, D], their outputs
    visible: Array  # [B, F, M], side slots that they see: those above them, and their own
    side: tuple[AttentionKV, ...]  # [B, Hkv, M, head_dim] a layer


@dataclasses.dataclass(frozen=True)
class Eagle(CachedDrafter):
    """Drafting by an EAGLE head, a chain or any tree."""

    weights = (EagleParams,)

    config: EagleConfig

    def _check_depth(self):
        check_window(self.config.network.windows, self.max_depth, self.max_depth + 1)

    def init(self, params, request, capacity):
        """Allocate an empty cache."""
        cache = decoder.init_cache(self.config.network, request.max_length.shape[0], capacity)
        return CachedMemory.empty(cache, 1, self.config)

    def _commit(self, params, memory, following, features, count):
        fused = head.fuse(params.drafter, self.config, features)
        embedded = self._embed(params, following)
        out, entries = head.prefill(
            params.drafter, self.config, embedded, fused, memory.cache, last_of(count)
        )
        return memory.commit(out, entries, count, following.shape[1])

    def _start(self, params, memory, history):
        (width, slots), batch = self._frontier_size, memory.hidden.shape[0]
        cache = decoder.init_cache(self.config.network, batch, slots)
        frontier = _Frontier(
            hidden=jnp.repeat(memory.hidden, width, 1),
            visible=jnp.zeros((batch, width, slots), bool),
            side=side_buffers(cache, slots),
        )
        return frontier, self._unembed(params, memory.hidden)

    def _feed(self, params, memory, history, frontier, drafted, parents, depth, slot):
        take = lambda x: rows(x, parents)
        slots = own_slots(frontier.visible.shape[2], slot, drafted.shape[1])
        visible = take(frontier.visible) | slots
        positions = positions_of(history, drafted, depth)
        embedded, features = self._embed(params, drafted), take(frontier.hidden)
        attend, side = attention_beside(
            memory.cache,
            frontier.side,
            slot,
            visible,
            positions,
            implementation=self.config.network.attention,
        )
        hidden = head.blocks(params.drafter, self.config, embedded, features, positions, attend)
        return _Frontier(hidden, visible, tuple(side)), self._unembed(params, hidden)

    def _embed(self, params, ids):
        return embed(params.drafter, self.config, ids, self.target, params.target)

    def _unembed(self, params, hidden):
        return head.unembed(params.drafter, self.config, hidden, self.target, params.target)

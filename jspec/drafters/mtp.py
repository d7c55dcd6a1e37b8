"""MTP: modules that the target was trained with, each predicting one token further ahead.

``jspec.drafters.base.cached`` describes the rows that the first module reads, and those that it
keeps. Module k runs step k of a round; after the last module the first one follows again. With one
module, as in published targets, this is a recurrence on its own output. Every module has a cache
of rows whose features and tokens are all committed. That of module m ends m slots before the root,
so a round drafts the last m rows of its input anew.

See ``jspec.models.heads.mtp`` for the network, ``jspec.checkpoints.heads.mtp`` for files,
``training.tasks.mtp`` for training.
"""

import dataclasses
from typing import ClassVar, NamedTuple

import jax.numpy as jnp

from jspec.core.entries import Entry
from jspec.core.kv_cache import side_buffers
from jspec.core.types import Array
from jspec.drafters.base.cached import CachedDrafter, CachedMemory, own_slots, positions_of
from jspec.drafters.base.tree_drafter import last_of, rows
from jspec.models.blocks.attend import attention_beside
from jspec.models.heads import mtp as head
from jspec.models.heads.mtp import MtpConfig, MtpParams


class _Frontier(NamedTuple):
    """Rows whose children are drafted next."""

    hidden: Array  # [B, F, D], their outputs
    visible: tuple[Array, ...]  # [B, F, M] a module: its side slots above them, and their own
    side: tuple[tuple[Entry, ...], ...]  # entries of M slots a module


@dataclasses.dataclass(frozen=True)
class Mtp(CachedDrafter):
    """Drafting by a target's own modules for later tokens, a chain or any tree.

    ``num_speculative_tokens`` defaults to the number of modules. A multiple of it uses the modules
    several times, as in vLLM.
    """

    knows_depth: ClassVar[bool] = True
    maps_vocabulary: ClassVar[bool] = False
    weights = (MtpParams,)

    config: MtpConfig

    @property
    def lookahead(self) -> int | None:
        """None for several modules: each reads outputs of the one before, which are not kept."""
        return 1 if self.config.n_predict == 1 else None

    @property
    def unrolled(self) -> bool:
        """True if the weights depend on the depth."""
        return self.config.n_predict > 1

    def init(self, params, request, capacity):
        """Allocate an empty cache for each module."""
        batch = request.max_length.shape[0]
        return tuple(
            CachedMemory.empty(head.init_cache(self.config, batch, capacity), 1, self.config)
            for _ in range(self.config.n_predict)
        )

    def _commit(self, params, memory, following, features, count):
        embedded, hidden = self._embed(params, following), features[0]
        hidden, committed = hidden.astype(embedded.dtype), []
        for module, part in enumerate(memory):
            last, is_last = last_of(count), module + 1 == len(memory)
            read = last if is_last else None
            out, entries = head.prefill(
                params.drafter, self.config, module, embedded, hidden, part.cache, read
            )
            last_out = out if is_last else rows(out, last)
            committed.append(part.commit(last_out, entries, count, following.shape[1]))
            if not is_last:
                embedded, hidden, count = _next_input(part, embedded, out, count)
        return tuple(committed)

    def _start(self, params, memory, history):
        (width, slots), hidden = self._frontier_size, memory[0].hidden
        batch = hidden.shape[0]
        cache = head.init_cache(self.config, batch, slots)
        frontier = _Frontier(
            hidden=jnp.repeat(hidden, width, 1),
            visible=tuple(jnp.zeros((batch, width, slots), bool) for _ in memory),
            side=tuple(side_buffers(cache, slots) for _ in memory),
        )
        return frontier, self._unembed(params, 0, hidden)

    def _feed(self, params, memory, history, frontier, drafted, parents, depth, slot):
        module = depth % self.config.n_predict if self.unrolled else 0
        visible = [rows(mask, parents) for mask in frontier.visible]
        visible[module] |= own_slots(visible[module].shape[2], slot, drafted.shape[1])
        positions = positions_of(history, drafted, depth)
        attend, entries = attention_beside(
            memory[module].cache,
            frontier.side[module],
            slot,
            visible[module],
            positions,
            implementation=self.config.network.attention,
        )
        embedded, hidden = self._embed(params, drafted), rows(frontier.hidden, parents)
        hidden = head.run(params.drafter, self.config, module, embedded, hidden, positions, attend)
        side = list(frontier.side)
        side[module] = tuple(entries)
        frontier = _Frontier(hidden, tuple(visible), tuple(side))
        return frontier, self._unembed(params, module, hidden)

    def _length(self, memory):
        return memory[0].cache.length

    def _embed(self, params, ids):
        embedded = self.target.embed(params.target, ids)
        return embedded.astype(self.config.network.activation_dtype)

    def _unembed(self, params, module, hidden):
        return head.unembed(params.drafter, self.config, module, hidden, self.target, params.target)


def _next_input(
    part: CachedMemory, embedded: Array, out: Array, count: Array
) -> tuple[Array, Array, Array]:
    """Return the rows e and f [B, n, D] that the module after that of ``part`` reads, and how many.

    Its slot i pairs the output of slot i - 1 with the token of slot i. Slot 0 has no such output,
    so the first chunk of a prompt gives one row less.
    """
    first = part.cache.length == 0
    shifted = jnp.concatenate([part.hidden, out[:, :-1]], 1)
    hidden = jnp.where(first[:, None, None], out, shifted)
    embedded = jnp.where(first[:, None, None], jnp.roll(embedded, -1, 1), embedded)
    return embedded, hidden, jnp.where(first, jnp.maximum(count - 1, 0), count)

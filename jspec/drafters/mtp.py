"""MTP: modules that the target was trained with draft, each for one token further ahead.

Which rows the first module sees, and which of them it keeps, is told in ``jspec.drafters.base.cached``.
Step k of a round is run by module k, and from there on by the first again: with one module, as
published targets have, that is a recurrence on its own output. Every module has a cache of its own,
of rows whose features and tokens were all true: those of module m end m slots before the root, the
last m of what it would read being drafted anew in every round.
"""

import dataclasses
from typing import ClassVar, NamedTuple

import jax.numpy as jnp

from jspec.core import kv_cache
from jspec.core.types import Array
from jspec.drafters.base.cached import CachedDrafter, own_slots, positions_of
from jspec.drafters.base.features import CachedMemory
from jspec.drafters.base.tree_drafter import last_of, rows
from jspec.drafters.trees import tree_settings
from jspec.models.heads import mtp as head
from jspec.models.heads.mtp import MtpConfig, MtpParams


class _Frontier(NamedTuple):
    """Rows whose children are wanted."""

    hidden: Array  # [B, F, D], what they gave out
    seen: tuple[Array, ...]  # [B, F, S] a module: its side slots above them, their own included
    side: tuple[tuple[kv_cache.Entry, ...], ...]  # entries of S slots a module


@dataclasses.dataclass(frozen=True)
class Mtp(CachedDrafter):
    """Drafting by a target's own modules for later tokens, a chain or any tree.

    ``num_speculative_tokens`` may be left out: it is then the number of modules. It may be a
    multiple of that, the modules then being used again, as in vLLM.

    Raises:
      ValueError: a setting is out of range, or does not go with the tree or the modules.
    """

    knows_depth: ClassVar[bool] = True
    weights = (MtpParams,)

    config: MtpConfig

    def __post_init__(self):
        count = self.config.n_predict
        any_depth = self.tree in tree_settings.OF_ANY_DEPTH
        if any_depth and self.num_speculative_tokens is None and self.tree_depth is None:
            object.__setattr__(self, "num_speculative_tokens", count)
        super().__post_init__()
        if self.max_depth > count and self.max_depth % count:
            raise ValueError(
                f"num_speculative_tokens:{self.max_depth} must be divisible by n_predict={count} "
                "where it is more: use a multiple, or fewer tokens."
            )

    @property
    def unrolled(self) -> bool:
        """Whether steps have weights of their own."""
        return self.config.n_predict > 1

    def init(self, params, request, capacity):
        """An empty cache a module."""
        batch = request.max_length.shape[0]
        shape = batch, 1, self.config.hidden_size
        hidden = jnp.zeros(shape, self.config.network.activation_dtype)
        return tuple(
            CachedMemory(head.init_cache(self.config, batch, capacity), hidden)
            for _ in range(self.config.n_predict)
        )

    def _take_in(self, params, memory, following, features, count):
        embedded, hidden = self._embed(params, following), features[0]
        hidden, taken = hidden.astype(embedded.dtype), []
        for module, part in enumerate(memory):
            last, handed_on = last_of(count), module + 1 < len(memory)
            out, entries = head.take_in(
                params.drafter,
                self.config,
                module,
                embedded,
                hidden,
                part.cache,
                None if handed_on else last,
            )
            given = rows(out, last) if handed_on else out
            taken.append(part.take_in(given, entries, count, following.shape[1]))
            if handed_on:
                embedded, hidden, count = _a_slot_later(part, embedded, out, count)
        return tuple(taken)

    def _start(self, params, memory):
        (width, slots), last = self._frontier_size, memory[0]
        batch = last.hidden.shape[0]
        frontier = _Frontier(
            hidden=jnp.repeat(last.hidden, width, 1),
            seen=tuple(jnp.zeros((batch, width, slots), bool) for _ in memory),
            side=tuple(head.init_cache(self.config, batch, slots).layers for _ in memory),
        )
        return frontier, self._unembed(params, 0, last.hidden), last.cache.length

    def _feed(self, params, memory, history, frontier, drafted, parents, depth, slot):
        module = depth % self.config.n_predict if self.unrolled else 0
        seen = [rows(mask, parents) for mask in frontier.seen]
        seen[module] |= own_slots(seen[module].shape[2], slot, drafted.shape[1])
        side = list(frontier.side)
        hidden, side[module] = head.extend(
            params.drafter,
            self.config,
            module,
            self._embed(params, drafted),
            rows(frontier.hidden, parents),
            positions_of(history, drafted, depth),
            memory[module].cache,
            side[module],
            slot,
            seen[module],
        )
        frontier = _Frontier(hidden, tuple(seen), tuple(side))
        return frontier, self._unembed(params, module, hidden)

    def _length(self, memory):
        return memory[0].cache.length

    def _embed(self, params, ids):
        return head.embed(self.config, ids, self.target, params.target)

    def _unembed(self, params, module, hidden):
        return head.unembed(params.drafter, self.config, module, hidden, self.target, params.target)


def _a_slot_later(
    part: CachedMemory, embedded: Array, out: Array, count: Array
) -> tuple[Array, Array, Array]:
    """What the module after that of ``part`` reads: its e and f [B, n, D], and how many rows.

    What the first row of all gives out is read where the second row stands.
    """
    first = part.cache.length == 0
    later = jnp.concatenate([part.hidden, out[:, :-1]], 1)
    hidden = jnp.where(first[:, None, None], out, later)
    embedded = jnp.where(first[:, None, None], jnp.roll(embedded, -1, 1), embedded)
    return embedded, hidden, jnp.where(first, jnp.maximum(count - 1, 0), count)

"""DFlash: a block of masked tokens filled in by one pass (arXiv 2602.06036).

With the root at position r, the head has a cache of keys and values that it computed from the
target's hidden states at positions 0 .. r - 1. One pass over the root and K masks gives the
distributions of the next K tokens, each given the committed text alone. So all nodes of a depth
share a distribution, and the likeliest paths are found without expanding others (DDTree, arXiv
2604.12989). After the verdict, the target's hidden states of the accepted path enter the cache. A
prompt of one token gives none, so its first round drafts nothing.

DSpark (arXiv 2607.05147) adds to the logits of every slot a bias that depends on the token drafted
before it. So every node has a distribution of its own, at the cost of two thin matrices.

See ``jspec.models.heads.dflash`` and ``jspec.models.heads.dspark`` for the networks,
``jspec.checkpoints.heads.dflash`` and ``jspec.checkpoints.heads.dspark`` for files,
``training.tasks.dflash`` for training.
"""

import dataclasses
import functools
from typing import ClassVar

import jax.numpy as jnp
from jax import lax

from jspec.core import kv_cache, sampling
from jspec.core.history import root_token
from jspec.core.types import Array
from jspec.drafters.base.cached import CachedDrafter
from jspec.drafters.base.tree_drafter import check_window, rows
from jspec.drafters.trees import marginals
from jspec.drafters.trees.tree_settings import Dynamic
from jspec.models import decoder
from jspec.models.heads import dflash as head
from jspec.models.heads import dspark, network
from jspec.models.heads.dflash import DFlashConfig, DFlashParams


@dataclasses.dataclass(frozen=True)
class DFlash(CachedDrafter):
    """Drafting by a DFlash head, a chain or any tree, at most as deep as its block.

    Its memory is the head's cache.
    """

    follows = "best_first"
    weights = (DFlashParams,)
    sparks: ClassVar[bool] = False  # whether the head must have what DSpark adds

    config: DFlashConfig

    def _check_depth(self):
        if self.sparks != (self.config.spark is not None):
            kind, other = ("DFlash", "dflash") if self.sparks else ("DSpark", "dspark")
            raise ValueError(f"this is a {kind} head; draft with it by method {other!r}.")
        if self.max_depth > self.config.max_depth:
            raise ValueError(
                f"the tree is {self.max_depth} deep, but a block of {self.config.block_size} slots "
                f"drafts {self.config.max_depth} tokens: num_speculative_tokens must be at most "
                f"{self.config.max_depth}."
            )
        slots = self.config.slots(self.max_depth)
        check_window(self.config.network.windows, self.max_depth, slots)

    lookahead: ClassVar[int | None] = 0  # a row is made from its feature alone

    def init(self, params, request, capacity):
        """Allocate an empty cache."""
        return decoder.init_cache(self.config.network, request.max_length.shape[0], capacity)

    def propose(self, params, request, shared, memory, history):
        """Draft from one pass over a block."""
        _, logits = self._block(params, memory, history)
        draft = marginals.grow(self.drawing(request, history, params), self.draft_tree, logits)
        return self.limit(draft, history, memory.length > 0), memory

    def _block(self, params, cache, history) -> tuple[Array, Array]:
        """Return the outputs [B, K, D] of the slots that draft, and their logits [B, K, Vd]."""
        hidden = head.fill_in(
            params.drafter,
            self.config,
            root_token(history),
            self.max_depth,
            cache,
            self.target,
            params.target,
        )
        return hidden, network.unembed(params.drafter, hidden, self.target, params.target)

    def _commit(self, params, cache, following, features, count):
        del following
        context = head.fuse(params.drafter, self.config, features)
        slots = jnp.broadcast_to(jnp.arange(context.shape[1]), context.shape[:2])
        positions = cache.length[:, None] + slots
        fresh = head.inject(params.drafter, self.config, context, positions)
        pairs = zip(cache.layers, fresh, strict=True)
        entries = tuple(entry.holding(each.k, each.v) for entry, each in pairs)
        return kv_cache.append(cache, entries, slots, count)

    def _length(self, memory):
        return memory.length


@dataclasses.dataclass(frozen=True)
class DSpark(DFlash):
    """Drafting by a DSpark head, a chain or any tree, at most as deep as its block.

    Attributes:
      dspark_draft_topk: number of likeliest tokens of a slot, before the bias, to draft from; None
        for all.
    """

    follows = "eagle2"
    sparks: ClassVar[bool] = True

    dspark_draft_topk: int | None = None

    def _check_depth(self):
        super()._check_depth()
        top_k, vocab_size = self.dspark_draft_topk, self.config.vocab_size
        if top_k is None:
            return
        if not 1 <= top_k <= vocab_size:
            raise ValueError(
                "dspark_draft_topk must be between 1 and the draft vocabulary size "
                f"({vocab_size}), got {top_k}."
            )
        self._check_vocabulary(top_k)

    def propose(self, params, request, shared, memory, history):
        """Draft from one pass over a block, one depth after the other."""
        hidden, base = self._block(params, memory, history)
        if self.dspark_draft_topk is not None:
            least = sampling.top_k(base, self.dspark_draft_topk)[0][..., -1:]
            base = jnp.where(base < least, -jnp.inf, base)
        advance = functools.partial(self._advance, params, hidden, base)
        state = dspark.start(self.config.spark, hidden.shape[0], hidden.dtype)
        state, logits = advance(state, root_token(history)[:, None], 0)
        if isinstance(self.draft_tree, Dynamic):  # a frontier of its full width
            state = jnp.repeat(state, self.draft_tree.top_k, 1)

        def feed(state, drafted, parents, depth, slot):
            del slot
            return advance(rows(state, parents), drafted, depth)

        drawing = self.drawing(request, history, params)
        draft = self.grow(drawing, logits, feed, state)
        return self.limit(draft, history, memory.length > 0), memory

    def _advance(self, params, hidden, base, state, before, depth):
        """Return the state and the logits [B, F, Vd] of slot ``depth`` after tokens [B, F]."""
        slot = functools.partial(lax.dynamic_slice_in_dim, start_index=depth, slice_size=1, axis=1)
        wide = jnp.broadcast_to(slot(hidden), (*before.shape, hidden.shape[-1]))
        state, bias = dspark.advance(params.drafter.spark, self.config.spark, state, wide, before)
        return state, slot(base) + bias

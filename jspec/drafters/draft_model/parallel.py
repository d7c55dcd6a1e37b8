"""A language model drafts K tokens in one pass, behind mask tokens (PARD, arXiv 2504.18583).

A round feeds the g committed tokens that the draft model has not read, the root last, and then
K - 1 mask tokens at the positions that follow: ::

    slot        0        1     ...   g-1  |   g      g+1   ...  g+K-2
    token       unread   unread      root | mask    mask        mask
    predicts                         x_1  |  x_2     x_3        x_K

Every slot sees the slots before it, so x_i is guessed from the committed text alone: all nodes of a
depth share a distribution. The keys and values left of the bar enter the cache after the round.
Those of the masks are dropped, and the next round reads the accepted tokens.

See ``jspec.models.decoder`` for the network, ``jspec.checkpoints.checkpoint`` for files,
``training.tasks.draft`` for training.
"""

import dataclasses
import functools
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax

from jspec.core import kv_cache, trees
from jspec.core.entries import NODE_AXIS
from jspec.core.types import Array, History
from jspec.drafters.base.tree_drafter import TreeDrafter, last_of
from jspec.drafters.draft_model.language_model import ReadsText, next_logits, spell, weights_of
from jspec.drafters.trees import marginals
from jspec.models import decoder
from jspec.models.blocks.attend import attention_over
from jspec.models.blocks.recur import recurrence_over
from jspec.models.decoder import DecoderConfig

_TILE_SLOTS = 16  # capacities are multiples of a tile of the device's memory layout


@struct.dataclass
class ParallelMemory:
    """The draft model's cache, and the values of a round that wait for its end."""

    cache: kv_cache.KVCache
    side: tuple[Any, ...]  # ``kv_cache.side_buffers`` of ``reach`` nodes
    taken: Array  # [B] int32, how many of them are of committed tokens; 0: the row paused

    @property
    def reach(self) -> int:
        """Most committed tokens that a round reads, for drafts of any length."""
        return jax.tree.leaves(self.side)[0].shape[NODE_AXIS]


@dataclasses.dataclass(frozen=True)
class ParallelDraftModel(ReadsText, TreeDrafter):
    """Drafting by a decoder that was trained to guess behind masks.

    Its weights are those of ``DraftModel``.

    Attributes:
      mask_token_id: the mask, in the draft model's vocabulary.
      use_heterogeneous_vocab: whether the weights are ``TranslatingParams``; without, the decoder
        has the target's vocabulary.
      backlog: most committed tokens that a round reads, at least K + 1. A drafter that may pause
        has more to read, and drafts in the round in which it has read them all.

    Raises:
      ValueError: a setting is out of range or contradicts the tree, or there is no mask token.
    """

    follows: ClassVar[str] = "best_first"
    capture_layers = ()
    lookahead = 0
    catches_up = True

    config: DecoderConfig
    mask_token_id: int | None = None
    use_heterogeneous_vocab: bool = False
    backlog: int = 0

    @property
    def maps_vocabulary(self) -> bool:
        """True if the weights have ``draft_to_target``."""
        return self.use_heterogeneous_vocab

    def _check_depth(self):
        if self.mask_token_id is None:
            raise ValueError(
                "For parallel drafting, the draft model config must have `pard_token` or "
                "`ptd_token_id` specified in its config.json. Without one the model was not "
                "trained for it: leave parallel_drafting out, or train it (python -m "
                "training.distill_draft --parallel)."
            )
        if self.config.layers[-1].mixer.source is not None:
            raise ValueError(
                "the last layers of the draft model read the keys of others "
                "(num_kv_shared_layers), which one pass for all drafted tokens does not support; "
                "leave parallel_drafting out."
            )
        if not 0 <= self.mask_token_id < self.config.vocab_size:
            raise ValueError(
                f"mask_token_id={self.mask_token_id} must be from 0 to "
                f"{self.config.vocab_size - 1}, the draft model's tokens."
            )

    def __post_init__(self):
        super().__post_init__()
        if self.max_length is None:
            object.__setattr__(self, "max_length", self.config.max_positions)

    def init(self, params, request, capacity):
        """Allocate an empty cache and side buffers."""
        batch = request.max_length.shape[0]
        reach = max(self.backlog, self.max_depth + 1)
        # ``capacity`` has spare room for K + 1 rows; a round writes up to ``reach``.
        more = reach - self.max_depth - 1
        capacity += -(-more // _TILE_SLOTS) * _TILE_SLOTS
        cache = decoder.init_cache(self.config, batch, capacity)
        side = kv_cache.side_buffers(cache, reach)
        return ParallelMemory(cache, side, jnp.zeros((batch,), jnp.int32))

    def missing(self, memory, history):
        """Return the unread tokens before the root, [B], if a round cannot read them all."""
        unread = history.length - memory.cache.length
        return jnp.where(unread > memory.reach, unread - 1, 0)

    def propose(self, params, request, shared, memory, history):
        """Draft from one pass, in rows whose committed tokens it reads all."""
        unseen = history.length - memory.cache.length
        reach, usual = memory.reach, self.max_depth + 1
        taken = jnp.minimum(unseen, reach)
        feed = functools.partial(self._pass, params, memory, history, taken)
        if reach == usual:
            hidden, side = feed(usual)
        else:
            behind = taken.max() > usual
            hidden, side = lax.cond(behind, lambda: feed(reach), lambda: feed(usual))
        logits = next_logits(params.drafter, self.config, hidden, self.target.vocab_size)
        draft = marginals.grow(self.drawing(request, history, params), self.draft_tree, logits)
        draft = self.limit(draft, history, taken == unseen)
        return draft, ParallelMemory(memory.cache, side, taken)

    def update(self, round):
        """Commit the text that the round read; masks are never written."""
        memory = round.memory
        slots = jnp.arange(memory.reach)
        rows = jnp.broadcast_to(slots, (memory.taken.size, slots.size))
        count = jnp.where(round.verdict.num_emitted > 0, memory.taken, 0)
        cache = kv_cache.append(memory.cache, memory.side, rows, count)
        return memory.replace(cache=cache, taken=jnp.zeros_like(count)), round.shared

    def _pass(
        self, params, memory: ParallelMemory, history: History, taken: Array, width: int
    ) -> tuple[Array, tuple[Any, ...]]:
        """Read up to ``width`` tokens, then the masks.

        Returns:
          Final hidden states [B, K, D] of the root and the masks, and the values of
          ``memory.reach`` slots, of which the first ``width`` are used.
        """
        model, cache = weights_of(params.drafter), memory.cache
        slots = jnp.arange(width + self.max_depth - 1)
        positions = cache.length[:, None] + slots
        text = jnp.take_along_axis(history.tokens, positions, 1, mode="clip")
        text = spell(params.drafter, text)
        fed = jnp.where(slots < taken[:, None], text, self.mask_token_id).astype(jnp.int32)
        drafting = last_of(taken) + jnp.arange(self.max_depth)
        chain = trees.chain_tree(*fed.shape)
        attend, values = attention_over(
            cache,
            chain,
            implementation=self.config.attention,
            rows=drafting,
        )
        hidden, _ = decoder.trunk(
            model,
            self.config,
            decoder.embed(model, self.config, fed),
            positions,
            attend,
            rows=drafting,
            recur=recurrence_over(cache, chain, values),
            tokens=fed,
        )

        unused = memory.reach - width

        def read(x: Array) -> Array:
            return jnp.pad(x[:, :, :width], ((0, 0), (0, 0), (0, unused), *[(0, 0)] * (x.ndim - 3)))

        return hidden, tuple(jax.tree.map(read, values))

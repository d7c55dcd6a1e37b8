"""A small language model drafts a chain, token by token (arXiv 2211.17192).

The draft model's cache holds the committed tokens that it has read, usually all but the last one or
two. A round takes K forward passes. The first pass reads the root and, if the last round accepted
all K tokens, the last of them, which the model drafted but never read: ::

    cache:  committed tokens       side buffer of a round:  slot 0    slot 1   slot 2 ...
                                   two unread tokens:       unread    root     x_1   ...  x_{K-1}
                                   one unread token:        root      unused   x_1   ...  x_{K-1}

A draft model that paused, or whose draft another one replaced, has more unread tokens. It reads up
to ``backlog`` of them a round, and drafts in the round in which it has read them all.

``jspec.drafters.draft_model.language_model`` handles draft models with another vocabulary.

See ``jspec.models.decoder`` for the network, ``jspec.checkpoints.checkpoint`` for files,
``training.tasks.draft`` for training.
"""

import dataclasses
import functools
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax

from jspec.core import kv_cache, validation
from jspec.core.entries import NODE_AXIS
from jspec.core.types import Array, Drafter
from jspec.drafters.base.tree_drafter import check_window
from jspec.drafters.draft_model.language_model import ReadsText, next_logits, spell, weights_of
from jspec.drafters.trees import tree_settings
from jspec.drafters.trees.drawing import Drawing, chain
from jspec.models import decoder
from jspec.models.blocks.attend import attention_beside
from jspec.models.blocks.recur import recurrence_beside

_USUAL_BACKLOG = 2  # the root and the token before it


@struct.dataclass
class DraftMemory:
    """The draft model's cache, and the values of a round that wait for the verdict."""

    cache: kv_cache.KVCache
    side: tuple[Any, ...]  # ``kv_cache.side_buffers`` of backlog + K-1 nodes
    taken: Array  # [B] int32, committed tokens that the round's first pass read; 0: it paused
    drafted: Array  # [B, K-1] int32, drafted tokens that the model read, all but the last; or -1


@dataclasses.dataclass(frozen=True)
class DraftModel(ReadsText, Drafter):
    """Drafting by a decoder; ``params.drafter`` are its weights.

    With ``use_heterogeneous_vocab`` these are ``TranslatingParams``; without, the decoder has the
    target's vocabulary.

    Raises:
      ValueError: a setting is out of range.
    """

    config: decoder.DecoderConfig
    num_speculative_tokens: int
    draft_sample_method: Literal["probabilistic", "greedy"] = "probabilistic"
    vocab_size: int | None = None  # the target's, if the two are padded differently
    max_length: int | None = None  # history length past which nothing is drafted
    noise: Literal["own", "target"] = "own"
    use_heterogeneous_vocab: bool = False
    backlog: int = _USUAL_BACKLOG  # most committed tokens that a round reads before it drafts

    reads_pages = True
    lookahead = 0
    catches_up = True
    max_depth = property(lambda self: self.num_speculative_tokens)
    tree_size = property(lambda self: self.num_speculative_tokens + 1)

    def __post_init__(self):
        validation.check_config(self.config)
        tree_settings.check_positive(num_speculative_tokens=self.num_speculative_tokens)
        if self.draft_sample_method not in ("probabilistic", "greedy"):
            raise ValueError(
                f"draft_sample_method={self.draft_sample_method!r} must be 'probabilistic' or "
                "'greedy'."
            )
        # All side slots of a round see each other.
        check_window(self.config.windows, self.max_depth, self.max_depth + self.backlog)

    @property
    def proposal(self) -> str:
        """Sampled chains carry their distributions; greedy drafts are deterministic."""
        return "chain" if self.draft_sample_method == "probabilistic" else "deterministic"

    def init(self, params, request, capacity):
        """Allocate an empty cache and side buffers."""
        batch = request.max_length.shape[0]
        # ``capacity`` has spare room for K + 1 rows; a round writes up to backlog - 2 more.
        cache = decoder.init_cache(self.config, batch, capacity + self.backlog - _USUAL_BACKLOG)
        side = kv_cache.side_buffers(cache, self.backlog + self.max_depth - 1)
        drafted = jnp.full((batch, self.max_depth - 1), -1, jnp.int32)
        return DraftMemory(cache, side, jnp.zeros((batch,), jnp.int32), drafted)

    def missing(self, memory, history):
        """Return the unread tokens before the root, [B], if a round cannot read them all."""
        unread = history.length - memory.cache.length
        return jnp.where(unread > self.backlog, unread - 1, 0)

    def propose(self, params, request, shared, memory, history):
        """Draft K tokens in rows whose committed tokens the model has all read."""
        unread = history.length - memory.cache.length
        taken = jnp.minimum(unread, self.backlog)
        hidden, side = self._read(params, memory, history, taken)
        logits = self._logits(params, hidden)
        feed = functools.partial(self._feed, params, memory.cache, history, taken)
        drawing = self._drawing(params, request, history)
        draft, side = chain(drawing, self.max_depth, logits, feed, side)
        node = jnp.arange(self.tree_size)
        limit = self.config.max_positions if self.max_length is None else self.max_length
        fits = history.length[:, None] - 1 + node < limit
        valid = (node == 0) | (fits & (unread <= self.backlog)[:, None])
        drafted = jnp.where(valid[:, 2:], draft.tokens[:, 1:-1], -1)
        # The memory may be made for longer drafts.
        drafted = jnp.full_like(memory.drafted, -1).at[:, : self.max_depth - 1].set(drafted)
        return draft.replace(valid=valid), DraftMemory(memory.cache, side, taken, drafted)

    def update(self, round):
        """Commit the tokens that the round read: committed ones, then its accepted nodes.

        The judged draft may be another drafter's, so nodes count that equal the emitted tokens.
        """
        memory, history, verdict = round.memory, round.history, round.verdict
        node = jnp.arange(self.max_depth - 1)
        first = history.length - verdict.num_emitted
        emitted = jnp.take_along_axis(history.tokens, first[:, None] + node, 1, mode="clip")
        drafted = memory.drafted[:, : self.max_depth - 1]
        equal = (emitted == drafted) & (node < verdict.num_emitted[:, None] - 1)
        accepted = jnp.cumprod(equal, 1, dtype=jnp.int32).sum(1, dtype=jnp.int32)
        ran = (verdict.num_emitted > 0) & (memory.taken > 0)
        count = jnp.where(ran, memory.taken + accepted, 0)
        # Side slots in the order of the text: committed tokens, then drafted ones.
        last = self.backlog + self.max_depth - 2
        slot, taken = jnp.arange(last + 1), memory.taken[:, None]
        rows = jnp.minimum(jnp.where(slot < taken, slot, slot - taken + self.backlog), last)
        cache = kv_cache.append(memory.cache, memory.side, rows, count)
        return memory.replace(cache=cache, taken=jnp.zeros_like(count)), round.shared

    def _drawing(self, params, request, history):
        vocab_size, draft_to_target = self.vocab_size or self.config.vocab_size, None
        if self.use_heterogeneous_vocab:
            vocab_size = params.drafter.target_to_draft.shape[0]
            draft_to_target = params.drafter.draft_to_target
        method = self.draft_sample_method
        return Drawing(request, history, method, self.noise, vocab_size, draft_to_target)

    def _read(self, params, memory, history, taken):
        """Read the first ``taken`` [B] unread tokens; return the hidden state of the last."""
        read = functools.partial(self._read_slots, params, memory, history, taken)
        if self.backlog == _USUAL_BACKLOG:
            return read(_USUAL_BACKLOG)
        behind = taken.max() > _USUAL_BACKLOG
        return lax.cond(behind, lambda: read(self.backlog), lambda: read(_USUAL_BACKLOG))

    def _read_slots(self, params, memory, history, taken, count):
        slot = jnp.arange(count)
        positions = memory.cache.length[:, None] + slot
        tokens = jnp.take_along_axis(history.tokens, positions, 1, mode="clip")
        slots = jnp.arange(_num_slots(memory.side))
        mask = jnp.broadcast_to(slots <= slot[:, None], (*tokens.shape, slots.size))
        hidden, side = self._extend(
            params, tokens, positions, cache=memory.cache, side=memory.side, slot=0, mask=mask
        )
        return jnp.take_along_axis(hidden, taken[:, None, None] - 1, 1), side

    def _feed(self, params, cache, history, taken, side, tokens, parents, depth, slot):
        """Feed the drafted tokens [B, 1] at ``depth``, 1 to K - 1."""
        del parents, slot
        slots = jnp.arange(_num_slots(side))
        slot = depth + self.backlog - 1
        mask = (slots <= slot) & ((slots < taken[:, None]) | (slots >= self.backlog))
        positions = (history.length - 1 + depth)[:, None]
        hidden, side = self._extend(
            params, tokens, positions, cache=cache, side=side, slot=slot, mask=mask[:, None]
        )
        return side, self._logits(params, hidden)

    def _extend(self, params, tokens, positions, *, cache, side, slot, mask):
        """Run the model over tokens [B, n]; see ``attention_beside`` for the other arguments."""
        model, config = weights_of(params.drafter), self.config
        attend, side = attention_beside(
            cache, side, slot, mask, positions, implementation=config.attention
        )
        recur = recurrence_beside(cache, side, slot, mask)
        tokens = spell(params.drafter, tokens)
        hidden, _ = decoder.trunk(
            model,
            config,
            decoder.embed(model, config, tokens),
            positions,
            attend,
            recur=recur,
            tokens=tokens,
        )
        return hidden, tuple(side)

    def _logits(self, params, hidden):
        vocab_size = self.vocab_size or self.config.vocab_size
        return next_logits(params.drafter, self.config, hidden, vocab_size)


def _num_slots(side: tuple[Any, ...]) -> int:
    return jax.tree.leaves(side)[0].shape[NODE_AXIS]

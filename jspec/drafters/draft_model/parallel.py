"""A language model drafts K tokens in one pass, behind mask tokens (PARD, arXiv 2504.18583).

A round feeds what the draft model has not seen of the committed text, g tokens with the root as the
last, and behind it K - 1 times the mask token, at the positions that follow: ::

    slot        0        1     ...   g-1  |   g      g+1   ...  g+K-2
    token       unseen   unseen      root | mask    mask        mask
    predicts                         x_1  |  x_2     x_3        x_K

Every slot sees those before it, so x_i is guessed from the committed text alone and no draft sees
another: all nodes of a depth share a law. Left of the bar the keys and values enter the cache once
the round is over; right of it they are forgotten, and what was accepted is fed as it is next time.
"""

import dataclasses
import functools
from typing import ClassVar

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax

from jspec.core import kv_cache, trees
from jspec.core.types import Array, History
from jspec.drafters.base.tree_drafter import TreeDrafter, last_of
from jspec.drafters.draft_model import language_model
from jspec.drafters.draft_model.language_model import next_logits, spell, take_in, weights_of
from jspec.drafters.trees import marginals
from jspec.models import decoder
from jspec.models.decoder import DecoderConfig

_TILE_SLOTS = 16  # caches end with a tile of the device's memory layout


@struct.dataclass
class ParallelMemory:
    """The draft model's cache, and the entries of a round that wait for its end."""

    cache: kv_cache.KVCache
    side: tuple[kv_cache.AttentionKV, ...]  # [B, Hkv, reach, head_dim] a layer
    taken: Array  # [B] int32, how many of them are of committed tokens; 0: the row sat out

    @property
    def reach(self) -> int:
        """Committed tokens that a round takes in at most, however short its draft."""
        return self.side[0].k.shape[2]


@dataclasses.dataclass(frozen=True)
class ParallelDraftModel(TreeDrafter):
    """Drafting by a decoder that was trained to guess behind masks.

    Its weights are those that ``DraftModel`` takes.

    Attributes:
      mask_token_id: the mask, in the draft model's vocabulary.
      use_heterogeneous_vocab: whether the weights are ``TranslatingParams``; without, the decoder
        has the target's vocabulary.
      backlog: committed tokens that a round takes in at most, K + 1 if that is more: a drafter that
        may sit out rounds has more to take in, and drafts when it has seen all.

    Raises:
      ValueError: a setting is out of range or does not go with the tree, or there is no mask token.
    """

    follows: ClassVar[str] = "best_first"
    capture_layers = ()

    config: DecoderConfig
    mask_token_id: int | None = None
    use_heterogeneous_vocab: bool = False
    backlog: int = 0

    def __post_init__(self):
        super().__post_init__()
        if self.mask_token_id is None:
            raise ValueError(
                "For parallel drafting, the draft model config must have `pard_token` or "
                "`ptd_token_id` specified in its config.json. Without one the model was not "
                "trained for it: leave parallel_drafting out, or train it (python -m "
                "training.distill_draft --parallel)."
            )
        if not 0 <= self.mask_token_id < self.config.vocab_size:
            raise ValueError(
                f"mask_token_id={self.mask_token_id} is none of the draft model's "
                f"{self.config.vocab_size} tokens."
            )
        if self.max_length is None:
            object.__setattr__(self, "max_length", self.config.max_positions)

    def check_params(self, params):
        """Refuses weights of another draft model."""
        language_model.check_params(params, self.config, self.use_heterogeneous_vocab)

    def init(self, params, request, capacity):
        """An empty cache and side buffers."""
        batch = request.max_length.shape[0]
        reach = max(self.backlog, self.max_depth + 1)
        side = decoder.init_cache(self.config, batch, reach).layers
        # A round writes as many rows as it may take in, K + 1 of which ``capacity`` has room for.
        more = reach - self.max_depth - 1
        room = capacity + -(-more // _TILE_SLOTS) * _TILE_SLOTS
        cache = decoder.init_cache(self.config, batch, room)
        return ParallelMemory(cache, side, jnp.zeros((batch,), jnp.int32))

    def prefill(self, params, memory, tokens, features, start, valid):
        """Takes a chunk of the prompt into the cache."""
        cache = take_in(params.drafter, self.config, tokens[:, :-1], memory.cache, valid)
        return memory.replace(cache=cache)

    def missing(self, memory, history):
        """All but the root, where that is more than a round takes in."""
        gap = history.length - memory.cache.length
        return jnp.where(gap > memory.reach, gap - 1, 0)

    def propose(self, params, request, shared, memory, history):
        """Drafts from one pass; a row further behind than a round reaches drafts nothing."""
        unseen = history.length - memory.cache.length
        reach, level = memory.reach, self.max_depth + 1
        taken = jnp.minimum(unseen, reach)
        feed = functools.partial(self._pass, params, memory, history, taken)
        if reach == level:
            hidden, side = feed(level)
        else:
            behind = taken.max() > level
            hidden, side = lax.cond(behind, lambda: feed(reach), lambda: feed(level))
        logits = next_logits(params.drafter, self.config, hidden, self.target.vocab_size)
        draft = marginals.grow(self.drawing(request, history, params), self.draft_tree, logits)
        draft = self.limit(draft, history, taken == unseen)
        return draft, ParallelMemory(memory.cache, side, taken)

    def update(self, params, request, shared, memory, history, draft, verdict, out):
        """Commits what the round took in of the text; the masks are never written."""
        slots = jnp.arange(memory.reach)
        rows = jnp.broadcast_to(slots, (memory.taken.size, slots.size))
        count = jnp.where(verdict.num_emitted > 0, memory.taken, 0)
        cache = kv_cache.append(memory.cache, memory.side, rows, count)
        return memory.replace(cache=cache, taken=jnp.zeros_like(count)), shared

    def _pass(
        self, params, memory: ParallelMemory, history: History, taken: Array, width: int
    ) -> tuple[Array, tuple[kv_cache.AttentionKV, ...]]:
        """The last streams [B, K, D] of root and masks, behind at most ``width`` tokens.

        And the entries of the slots for those, of which there are ``memory.reach``.
        """
        model, cache = weights_of(params.drafter), memory.cache
        slots = jnp.arange(width + self.max_depth - 1)
        positions = cache.length[:, None] + slots
        text = jnp.take_along_axis(history.tokens, positions, 1, mode="clip")
        fed = jnp.where(
            slots < taken[:, None], spell(params.drafter, text), self.mask_token_id
        ).astype(jnp.int32)
        guessing = last_of(taken) + jnp.arange(self.max_depth)
        chain = trees.from_parents(trees.chain(slots.size - 1), slots.size - 1)
        attend, entries = decoder.attention_over(
            cache,
            trees.broadcast(chain, fed.shape[0]),
            windows=self.config.windows,
            implementation=self.config.attention,
            wanted=guessing,
        )
        embedded = decoder.embed(model, self.config, fed)
        hidden, _ = decoder.trunk(model, self.config, embedded, positions, attend, wanted=guessing)
        unused = [(0, 0), (0, 0), (0, memory.reach - width), (0, 0)]
        side = lambda entry: jnp.pad(entry[:, :, :width], unused)
        return hidden, tuple(jax.tree.map(side, entries))

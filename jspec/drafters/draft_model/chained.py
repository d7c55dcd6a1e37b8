"""What drafters share that draft a chain with a language model, token by token.

The draft model's cache holds what it has taken in of the committed history. One forward pass a
drafted token suffices: the first takes in the root and, where the last round accepted every drafted
token, the last of them, which the model drafted but never saw.

    cache:  committed tokens       side buffer of a round:  slot 0    slot 1   slot 2 ...
                                   two tokens to take in:   unseen    root     x_1   ...  x_{K-1}
                                   one token to take in:    root      unused   x_1   ...  x_{K-1}

A draft model that sat out rounds, or whose draft was not the one accepted, has more to take in: up
to ``backlog`` tokens a round, and it drafts when it has seen them all.

A draft model may have a vocabulary of its own, see ``jspec.drafters.draft_model.language_model``.
"""

import dataclasses
import functools
from typing import Literal

import jax.numpy as jnp
from flax import struct
from jax import lax

from jspec.core import kv_cache, logits_processors, sampling, trees, validation
from jspec.core.history import root_token
from jspec.core.types import Array, Draft
from jspec.drafters.draft_model import language_model
from jspec.drafters.draft_model.language_model import next_logits, spell, take_in, weights_of
from jspec.drafters.trees import expand, tree_settings
from jspec.models import decoder

_LEVEL = 2  # the root and the token before it


@struct.dataclass
class DraftMemory:
    """The draft model's cache, and the entries of a round that wait for the verdict."""

    cache: kv_cache.KVCache
    side: tuple[kv_cache.AttentionKV, ...]  # [B, Hkv, backlog + K-1, head_dim] a layer
    taken: Array  # [B] int32, committed tokens that the round's first pass took in; 0: it sat out
    drafted: Array  # [B, K-1] int32, the round's tokens that the model saw: all but the last; or -1
    path: Array | None = None  # [B, M] bool, of a cascade: side slots whose tokens are on the path


@dataclasses.dataclass(frozen=True)
class ChainedDrafter:
    """Drafting by a decoder; ``params.drafter`` are its weights.

    With ``use_heterogeneous_vocab`` they are ``TranslatingParams``; without, the decoder has the
    target's vocabulary.

    Raises:
      ValueError: a setting is out of range.
    """

    config: decoder.DecoderConfig
    num_speculative_tokens: int
    draft_sample_method: Literal["probabilistic", "greedy"] = "probabilistic"
    vocab_size: int | None = None  # of the target, where the two are padded differently
    max_length: int | None = None  # history length past which nothing is drafted
    noise: Literal["own", "target"] = "own"
    use_heterogeneous_vocab: bool = False
    backlog: int = _LEVEL  # committed tokens that a round takes in at most, to draft only then
    confidence_threshold: float | None = (
        None  # ends chains early, see ``jspec.drafters.trees.drawing``
    )

    capture_layers = ()

    def __post_init__(self):
        validation.check_config(self.config)
        if self.num_speculative_tokens < 1:
            raise ValueError(
                f"num_speculative_tokens={self.num_speculative_tokens} must be at least 1."
            )
        if self.draft_sample_method not in ("probabilistic", "greedy"):
            raise ValueError(
                f"draft_sample_method={self.draft_sample_method!r} must be 'probabilistic' or "
                "'greedy'."
            )
        if self.confidence_threshold is not None:
            tree_settings.check_threshold(self.confidence_threshold)
        narrow = min((window for window in self.config.windows if window), default=None)
        round_ = self.num_speculative_tokens + self.backlog  # side slots see each other all
        if narrow is not None and narrow < round_:
            raise ValueError(
                f"num_speculative_tokens={self.num_speculative_tokens} does not fit into the draft "
                f"model's sliding window of {narrow}, as a round takes in {self.backlog} tokens "
                f"before; it must be at most {narrow - self.backlog}."
            )

    @property
    def max_depth(self) -> int:
        """K."""
        return self.num_speculative_tokens

    @property
    def tree_size(self) -> int:
        """A chain under the root."""
        return self.num_speculative_tokens + 1

    @property
    def node_buckets(self) -> tuple[int, ...]:
        """Node counts worth a program of their own."""
        return tree_settings.node_buckets(self.tree_size, self.confidence_threshold is not None)

    @property
    def proposal(self) -> str:
        """Sampled chains carry their law; argmax drafts are point masses."""
        return "chain" if self.draft_sample_method == "probabilistic" else "point"

    def check_params(self, params):
        """Refuses weights of another draft model."""
        language_model.check_params(params, self.config, self.use_heterogeneous_vocab)

    def init(self, params, request, capacity):
        """An empty cache and side buffers."""
        batch = request.max_length.shape[0]
        side = decoder.init_cache(self.config, batch, self.backlog + self.max_depth - 1).layers
        # A round writes up to backlog - 2 rows more than there is spare room for.
        cache = decoder.init_cache(self.config, batch, capacity + self.backlog - _LEVEL)
        drafted = jnp.full((batch, self.max_depth - 1), -1, jnp.int32)
        return DraftMemory(cache, side, jnp.zeros((batch,), jnp.int32), drafted)

    def prefill(self, params, memory, tokens, features, start, valid):
        """Takes a chunk of the prompt into the cache."""
        cache = take_in(params.drafter, self.config, tokens[:, :-1], memory.cache, valid)
        return memory.replace(cache=cache)

    def missing(self, memory, history):
        """All but the root, where that is more than a round takes in."""
        gap = history.length - memory.cache.length
        return jnp.where(gap > self.backlog, gap - 1, 0)

    def propose(self, params, request, shared, memory, history):
        """Drafts K tokens a row, where the model has seen all that was committed."""
        gap = history.length - memory.cache.length
        taken = jnp.minimum(gap, self.backlog)
        hidden, side = self._catch_up(params, memory, history, taken)
        said = None
        if request.sampling.processors is not None:
            said = jnp.full((len(taken), self.max_depth), -1, jnp.int32)
        least = self.confidence_threshold
        likely = None if least is None else jnp.ones(taken.shape)
        first = self._next(params, request, history, hidden, jnp.int32(0), said, likely)

        def step(carry, index):
            side, said, before = carry
            token = before.tokens
            hidden, side = self._feed(params, memory.cache, side, history, taken, token, index)
            if said is not None:
                said = said.at[:, index - 1].set(token)
            level = self._next(params, request, history, hidden, index, said, before.likely)
            return (side, said, level.carried), level

        rest = jnp.arange(1, self.max_depth)
        begin = side, said, first.carried
        (side, _, _), later = expand.scan_likely(step, begin, rest, least)
        root = root_token(history)[:, None]
        distributions = later.distribution
        draft = Draft(
            tokens=jnp.concatenate([root, first.tokens[:, None], later.tokens.T], 1),
            parents=trees.chain(self.max_depth),
            valid=self._valid(history, gap),
            logits=None
            if distributions is None
            else _stack_distributions(first.distribution, distributions),
            draft_to_target=(
                params.drafter.draft_to_target
                if self.use_heterogeneous_vocab and distributions is not None
                else None
            ),
            max_depth=self.max_depth,
        )
        if least is not None:
            likely = jnp.concatenate([first.likely[:, None], later.likely.T], 1)
            draft = expand.ended(draft, likely, least)
        kept = self._seen(memory, draft)
        return draft, DraftMemory(memory.cache, side, taken, kept)

    def update(self, params, request, shared, memory, history, draft, verdict, out):
        """Commits what the round took in and its own nodes that were, but for an unseen last one.

        The draft that was judged may have been another's: its own nodes are those that agree.
        """
        place = jnp.arange(self.max_depth - 1)
        first = history.length - verdict.num_emitted
        said = jnp.take_along_axis(history.tokens, first[:, None] + place, 1, mode="clip")
        own = memory.drafted[:, : self.max_depth - 1]  # the memory may be made for longer drafts
        agrees = (said == own) & (place < verdict.num_emitted[:, None] - 1)
        agreeing = jnp.cumprod(agrees, 1, dtype=jnp.int32).sum(1, dtype=jnp.int32)
        ran = (verdict.num_emitted > 0) & (memory.taken > 0)
        count = jnp.where(ran, memory.taken + agreeing, 0)
        cache = kv_cache.append(memory.cache, memory.side, self._fed(memory), count)
        return memory.replace(cache=cache, taken=jnp.zeros_like(count)), shared

    def _seen(self, memory: DraftMemory, draft: Draft) -> Array:
        """``drafted`` after this draft, which may be shorter than the memory was made for."""
        fed = draft.valid[:, 2:]  # to draft the one behind
        seen = jnp.where(fed, draft.tokens[:, 1:-1], -1)
        return jnp.full_like(memory.drafted, -1).at[:, : self.max_depth - 1].set(seen)

    def _fed(self, memory: DraftMemory) -> Array:
        """Side slots [B, R] of what was fed, in the order of the text: taken in, then drafted."""
        last = self.backlog + self.max_depth - 2
        slot, taken = jnp.arange(last + 1), memory.taken[:, None]
        return jnp.minimum(jnp.where(slot < taken, slot, slot - taken + self.backlog), last)

    def _valid(self, history, gap):
        """All K tokens, but for those past the longest text that the model can take: [B, N]."""
        node = jnp.arange(self.tree_size)
        limit = self.config.max_positions if self.max_length is None else self.max_length
        fits = history.length[:, None] - 1 + node < limit
        return (node == 0) | (fits & (gap <= self.backlog)[:, None])

    def _catch_up(self, params, memory, history, taken):
        """Feeds the committed tokens not yet seen; returns the last stream [B, D] of the last."""
        feed = functools.partial(self._feed_unseen, params, memory, history, taken)
        if self.backlog == _LEVEL:
            return feed(_LEVEL)
        behind = taken.max() > _LEVEL
        return lax.cond(behind, lambda: feed(self.backlog), lambda: feed(_LEVEL))

    def _feed_unseen(self, params, memory, history, taken, count):
        slots = jnp.arange(memory.side[0].k.shape[2])
        offset = jnp.arange(count)
        positions = memory.cache.length[:, None] + offset
        unseen = jnp.take_along_axis(history.tokens, positions, 1, mode="clip")
        mask = jnp.broadcast_to(slots <= offset[:, None], (*unseen.shape, slots.size))
        hidden, side = decoder.extend(
            weights_of(params.drafter),
            self.config,
            spell(params.drafter, unseen),
            positions,
            memory.cache,
            memory.side,
            jnp.int32(0),
            mask,
        )
        return jnp.take_along_axis(hidden, taken[:, None, None] - 1, 1)[:, 0], side

    def _feed(self, params, cache, side, history, taken, token, index):
        """Feeds drafted node ``index`` (1..K-1); returns its last stream [B, D]."""
        slots = jnp.arange(side[0].k.shape[2])
        own = index + self.backlog - 1
        mask = (slots <= own) & ((slots < taken[:, None]) | (slots >= self.backlog))
        hidden, side = decoder.extend(
            weights_of(params.drafter),
            self.config,
            spell(params.drafter, token[:, None]),
            (history.length - 1 + index)[:, None],
            cache,
            side,
            own,
            mask[:, None],
        )
        return hidden[:, 0], side

    def _next(self, params, request, history, hidden, index, said, likely=None) -> expand.Level:
        """Draws the child of node ``index`` and, where a rule needs it, records its law.

        ``said`` [B, K] are the tokens drafted before, for requests that look at them; ``likely``
        [B] is how probable they were all together, where that counts.
        """
        logits = next_logits(
            params.drafter, self.config, hidden, self.vocab_size or self.config.vocab_size
        )
        if said is not None:
            branches = logits_processors.Branches(history, said[:, None])
            logits = self._shaped(params, request, branches, logits[:, None])[:, 0]
        ways = params.drafter if self.use_heterogeneous_vocab else None
        place, distribution = self._draw(request, history, logits, index, ways)
        if likely is not None:
            likely *= sampling.chance(logits, distribution, place, request.sampling)
        return expand.Level(
            place if ways is None else ways.draft_to_target[place], distribution, likely
        )

    def _shaped(self, params, request, branches, logits):
        """Logits [B, F, Vd] as the request wants them."""
        ids, size = None, logits.shape[-1]
        if self.use_heterogeneous_vocab:
            ids = params.drafter.draft_to_target
            size = params.drafter.target_to_draft.shape[0]
        return logits_processors.shape_draft(
            logits, request.sampling.processors, branches, size, ids
        )

    def _draw(self, request, history, logits, index, ways=None):
        """A place in the last axis of the logits [B, Vd], and the law if it is to be recorded.

        ``index`` is the parent's, one for all rows or [B]. ``ways`` are the parameters of a draft
        model with a vocabulary of its own.
        """
        if request.sampling.greedy or self.draft_sample_method == "greedy":
            return sampling.argmax(logits), None
        distribution = sampling.process_logits(logits, request.sampling)
        if self.noise == "target":
            position = history.length + index
            if ways is None:
                return sampling.draw_target(
                    distribution, request.sampling, request.keys, position
                ), None
            noise = sampling.target_noise(request.keys, position, ways.target_to_draft.shape[0])
            return sampling.argmax(
                distribution + noise[:, ways.draft_to_target].astype(distribution.dtype)
            ), None
        root = history.length - 1
        uniform = sampling.round_noise(request.keys, root, sampling.DRAFT, self.max_depth)
        index = jnp.broadcast_to(index, root.shape)
        return sampling.draw(distribution, uniform[jnp.arange(len(root)), index]), distribution


def _stack_distributions(first: Array, later: Array) -> Array:
    """Laws [B, V] and [K-1, B, V] to [B, K, V] and a row for the leaf: [B, K+1, V]."""
    distributions = jnp.concatenate([first[None], later, jnp.zeros_like(first)[None]], 0)
    return jnp.moveaxis(distributions, 0, 1)

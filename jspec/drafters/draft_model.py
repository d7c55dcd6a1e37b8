"""A small language model drafts a chain, token by token (arXiv 2211.17192).

The draft model's cache holds what it has taken in of the committed history. One forward pass a
drafted token suffices: the first takes in the root and, where the last round accepted every drafted
token, the last of them, which the model drafted but never saw.

    cache:  committed tokens       side buffer of a round:  slot 0    slot 1   slot 2 ...
                                   two tokens to take in:   unseen    root     x_1   ...  x_{K-1}
                                   one token to take in:    root      unused   x_1   ...  x_{K-1}

A draft model with a vocabulary of its own drafts the tokens that it shares with the target (TLI,
arXiv 2502.05202, section 4): its logits are cut to those before they are warped, so that the law of
a draft, which is recorded over the target's ids, is normalised there and 0 elsewhere, and every
rule is exact. What it reads is spelled in its own ids, token by token: tokens of the target that it
lacks, in the prompt or in what the target said, are its unknown token, or else its end of text.
"""

import dataclasses
from typing import Literal

import jax.numpy as jnp
from flax import struct
from jax import lax

from jspec import kv, sampling, tokens, topology
from jspec.models import decoder
from jspec.types import Array, Draft

_CATCH_UP = 2  # slots for the root and the token before it


@struct.dataclass
class DraftMemory:
    """The draft model's cache, and the entries of a round that wait for the verdict."""

    cache: kv.KVCache
    side: tuple[kv.AttentionKV, ...]  # [B, Hkv, K+1, head_dim] a layer
    gap: Array  # [B] int32, committed tokens the round's first pass took in: 1 or 2


@struct.dataclass
class TranslatingParams:
    """Weights of a draft model with a vocabulary of its own, and its way to the target's.

    ``translating`` makes them.
    """

    model: decoder.DecoderParams
    draft_to_target: Array  # [M] int32, ascending: the target's ids of the shared tokens
    shared_ids: Array  # [M] int32: the draft model's ids of the same tokens
    target_to_draft: Array  # [V] int32: the draft model's ids, one and the same where not shared


def translating(
    model: decoder.DecoderParams, target_ids: Array, draft_ids: Array, target_to_draft: Array
) -> TranslatingParams:
    """Parameters for ``use_heterogeneous_vocab``.

    Args:
      model: the draft model's weights.
      target_ids: [M], ascending: the target's ids of the tokens that both have.
      draft_ids: [M], the draft model's ids of the same tokens.
      target_to_draft: [V], what the draft model reads for each of the target's tokens.
    """
    return TranslatingParams(
        model, *(jnp.asarray(ids, jnp.int32) for ids in (target_ids, draft_ids, target_to_draft))
    )


@dataclasses.dataclass(frozen=True)
class DraftModel:
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

    capture_layers = ()

    def __post_init__(self):
        if self.num_speculative_tokens < 1:
            raise ValueError(
                f"num_speculative_tokens={self.num_speculative_tokens} must be at least 1."
            )
        if self.draft_sample_method not in ("probabilistic", "greedy"):
            raise ValueError(
                f"draft_sample_method={self.draft_sample_method!r} must be 'probabilistic' or "
                "'greedy'."
            )
        narrow = min((window for window in self.config.windows if window), default=None)
        if narrow is not None and narrow < self.num_speculative_tokens + 2:
            raise ValueError(
                f"num_speculative_tokens={self.num_speculative_tokens} does not fit into the draft "
                f"model's sliding window of {narrow}; it must be at most {narrow - 2}."
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
    def proposal(self) -> str:
        """Sampled chains carry their law; argmax drafts are point masses."""
        return "chain" if self.draft_sample_method == "probabilistic" else "point"

    def init(self, params, request, capacity):
        """An empty cache and side buffers."""
        batch = request.max_length.shape[0]
        side = decoder.init_cache(self.config, batch, self.max_depth + 1).layers
        cache = decoder.init_cache(self.config, batch, capacity)
        return DraftMemory(cache, side, jnp.ones((batch,), jnp.int32))

    def absorb(self, params, memory, tokens, features, start, valid):
        """Takes a chunk of the prompt into the cache."""
        chunk = self._spell(params, tokens[:, :-1])
        batch, size = chunk.shape
        tree = topology.from_parents(topology.chain(size - 1), size - 1)
        out = decoder.forward(self._weights(params), self.config, chunk, tree, memory.cache)
        rows = jnp.broadcast_to(jnp.arange(size), (batch, size))
        return memory.replace(cache=kv.append(memory.cache, out.tree_kv, rows, valid))

    def propose(self, params, request, shared, memory, history):
        """Drafts K tokens a row."""
        gap = history.length - memory.cache.length
        hidden, side = self._catch_up(params, memory, history, gap)
        first = self._next(params, request, history, hidden, jnp.int32(0))

        def step(carry, index):
            token, side = carry
            hidden, side = self._feed(params, memory.cache, side, history, gap, token, index)
            token, law = self._next(params, request, history, hidden, index)
            return (token, side), (token, law)

        rest = jnp.arange(1, self.max_depth)
        (_, side), (later, laws) = lax.scan(step, (first[0], side), rest)
        root = tokens.root(history)[:, None]
        drafted = jnp.concatenate([root, first[0][:, None], later.T], 1)
        draft = Draft(
            tokens=drafted,
            parents=topology.chain(self.max_depth),
            valid=self._valid(history),
            logits=None if laws is None else _stack_laws(first[1], laws),
            draft_to_target=(
                params.drafter.draft_to_target
                if self.use_heterogeneous_vocab and laws is not None
                else None
            ),
            max_depth=self.max_depth,
        )
        return draft, DraftMemory(memory.cache, side, gap)

    def update(self, params, request, shared, memory, history, draft, verdict, out):
        """Commits what the round took in and the accepted nodes, all but an unseen last one."""
        slot = jnp.arange(self.max_depth + 1)
        gap = memory.gap[:, None]
        rows = jnp.where(slot < gap, slot, slot - gap + _CATCH_UP)
        rows = jnp.minimum(rows, self.max_depth)
        accepted = jnp.minimum(verdict.num_emitted - 1, self.max_depth - 1)
        count = jnp.where(verdict.num_emitted > 0, memory.gap + accepted, 0)
        return memory.replace(cache=kv.append(memory.cache, memory.side, rows, count)), shared

    def _valid(self, history):
        """All K tokens, but for those past the longest text that the model can take: [B, N]."""
        node = jnp.arange(self.tree_size)
        limit = self.config.max_positions if self.max_length is None else self.max_length
        return (node == 0) | (history.length[:, None] - 1 + node < limit)

    def _catch_up(self, params, memory, history, gap):
        """Feeds the committed tokens not yet seen; returns the root's last stream [B, D]."""
        slots = jnp.arange(self.max_depth + 1)
        offset = jnp.arange(_CATCH_UP)
        positions = memory.cache.length[:, None] + offset
        unseen = jnp.take_along_axis(history.tokens, positions, 1, mode="clip")
        mask = jnp.broadcast_to(slots <= offset[:, None], (*unseen.shape, slots.size))
        hidden, side = decoder.extend(
            self._weights(params), self.config, self._spell(params, unseen), positions,
            memory.cache, memory.side, jnp.int32(0), mask,
        )  # fmt: skip
        return jnp.take_along_axis(hidden, gap[:, None, None] - 1, 1)[:, 0], side

    def _feed(self, params, cache, side, history, gap, token, index):
        """Feeds drafted node ``index`` (1..K-1); returns its last stream [B, D]."""
        slots = jnp.arange(self.max_depth + 1)
        own = index + _CATCH_UP - 1
        mask = (slots <= own) & ((slots < gap[:, None]) | (slots >= _CATCH_UP))
        hidden, side = decoder.extend(
            self._weights(params), self.config, self._spell(params, token[:, None]),
            (history.length - 1 + index)[:, None], cache, side, own, mask[:, None],
        )  # fmt: skip
        return hidden[:, 0], side

    def _next(self, params, request, history, hidden, index):
        """Draws the child of node ``index`` and, where a rule needs it, records its law."""
        logits = decoder.unembed(self._weights(params), self.config, hidden)
        if self.use_heterogeneous_vocab:
            logits = logits[:, params.drafter.shared_ids]
            place, law = self._draw(request, history, logits, index, params.drafter)
            return params.drafter.draft_to_target[place], law
        logits = _fit(logits, self.vocab_size or self.config.vocab_size)
        return self._draw(request, history, logits, index)

    def _draw(self, request, history, logits, index, ways=None):
        """A place in the last axis of the logits [B, Vd], and the law if it is to be recorded.

        ``ways`` are the parameters of a draft model with a vocabulary of its own.
        """
        if request.sampling.greedy or self.draft_sample_method == "greedy":
            return sampling.argmax(logits), None
        law = sampling.warp(logits, request.sampling)
        if self.noise == "target":
            position = history.length + index
            if ways is None:
                return sampling.draw_target(law, request.sampling, request.keys, position), None
            noise = sampling.target_noise(request.keys, position, ways.target_to_draft.shape[0])
            return sampling.argmax(law + noise[:, ways.draft_to_target].astype(law.dtype)), None
        coins = sampling.round_noise(
            request.keys, history.length - 1, sampling.DRAFT, self.max_depth
        )
        coin = lax.dynamic_index_in_dim(coins, index, 1, keepdims=False)
        return sampling.draw(law, coin), law

    def _weights(self, params):
        return params.drafter.model if self.use_heterogeneous_vocab else params.drafter

    def _spell(self, params, ids):
        """The target's token ids in those of the draft model."""
        return params.drafter.target_to_draft[ids] if self.use_heterogeneous_vocab else ids


def _fit(logits: Array, vocab_size: int) -> Array:
    """Cuts or pads logits [B, V'] to the target's vocabulary; padding is never drawn."""
    missing = vocab_size - logits.shape[-1]
    if missing <= 0:
        return logits[..., :vocab_size]
    return jnp.pad(logits, ((0, 0), (0, missing)), constant_values=-jnp.inf)


def _stack_laws(first: Array, later: Array) -> Array:
    """Laws [B, V] and [K-1, B, V] to [B, K, V] and a row for the leaf: [B, K+1, V]."""
    laws = jnp.concatenate([first[None], later, jnp.zeros_like(first)[None]], 0)
    return jnp.moveaxis(laws, 0, 1)

"""A draft model that is itself drafted for: what it says again is looked up (arXiv 2312.11462).

The draft model judges a continuation that was looked up in one pass, by the noise that it would
have drawn with, and keeps it as far as it agrees. So its drafts, their laws and the text are those
of ``draft_model``, token for token; only its passes are fewer where it repeats what was said. ::

    passes of the draft model     root a b c   |  c' d e f  |  ...      looked up: a b c, d e f
    what it draws                  a  b c'     |  d  e f g  |           agrees with a b, then d e f

A pass writes its entries into slots of its own beside the cache, the same for all rows; ``seen``
says which of them are on a row's path.
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jspec.core import kv_cache, logits_processors, trees
from jspec.core.history import root_token
from jspec.core.types import Array, Draft, Drafter, History, Request, Sharing
from jspec.drafters.draft_model.chained import ChainedDrafter, DraftMemory
from jspec.drafters.draft_model.language_model import next_logits, spell, weights_of
from jspec.models import decoder


class _Round(NamedTuple):
    """A round of the draft model, after some of its passes."""

    history: History  # with what is drafted behind it
    count: Array  # [B], drafted tokens
    distributions: Array | None  # [B, K+1, Vd]
    side: tuple[kv_cache.Entry, ...]
    seen: Array  # [B, M] bool, side slots on the path of the tokens that were fed
    passes: Array  # []


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cascade(ChainedDrafter):
    """A draft model with fewer passes.

    Attributes:
      first: what drafts for the draft model: chains of point masses from the text alone.

    Raises:
      ValueError: a setting is out of range, or ``first`` cannot draft for a draft model.
    """

    first: Drafter

    def __post_init__(self):
        super().__post_init__()
        name, size = type(self.first).__name__, self.first.tree_size
        plain = self.first.proposal == "point" and not self.first.capture_layers
        if not plain or isinstance(self.first, Sharing) or size != self.first.max_depth + 1:
            raise ValueError(
                f"{name} cannot draft for a draft model: it must look up chains in the text alone, "
                "as 'ngram' does."
            )
        if self.confidence_threshold is not None:
            raise ValueError(
                f"confidence_threshold={self.confidence_threshold} ends what is drafted token by "
                "token, but a cascade drafts several in a pass; leave it out."
            )
        if hasattr(self.first, "load_params"):
            raise ValueError(f"{name} has weights of its own, which a cascade has no place for.")

    @classmethod
    def of(cls, first: Drafter, model: ChainedDrafter) -> "Cascade":
        """The cascade of two drafters.

        Raises:
          ValueError: ``first`` cannot draft for a draft model, or ``model`` is none.
        """
        if not isinstance(model, ChainedDrafter) or isinstance(model, Cascade):
            raise ValueError(
                f"the second of parts must be a 'draft_model' that drafts token by token, not "
                f"{type(model).__name__}."
            )
        own = {
            field.name: getattr(model, field.name) for field in dataclasses.fields(ChainedDrafter)
        }
        return cls(first=first, **own)

    @property
    def _num_slots(self) -> int:
        """Of the first pass, and of one more for each token after the first at worst."""
        return self.backlog + max(self.max_depth - 1, 1) * self.first.tree_size

    def init(self, params, request, capacity):
        """As the draft model's, with slots for every pass."""
        memory, batch = super().init(params, request, capacity), request.max_length.shape[0]
        if jax.tree.leaves(self.first.init(params, request, capacity)):
            raise ValueError(
                f"{type(self.first).__name__} remembers more than the text, which a draft model "
                "that it drafts for would spoil with what it drafts; use 'ngram'."
            )
        side = decoder.init_cache(self.config, batch, self._num_slots).layers
        return memory.replace(side=side, path=jnp.zeros((batch, self._num_slots), bool))

    def propose(self, params, request, shared, memory, history):
        """The draft of the draft model alone."""
        gap = history.length - memory.cache.length
        taken = jnp.minimum(gap, self.backlog)
        hidden, side = self._catch_up(params, memory, history, taken)
        said = None
        if request.sampling.processors is not None:
            said = jnp.full((len(taken), 1), -1, jnp.int32)
        token, distribution, _ = self._next(params, request, history, hidden, jnp.int32(0), said)
        batch = token.shape[0]
        distributions = None
        if distribution is not None:
            distributions = jnp.zeros(
                (batch, self.max_depth + 1, distribution.shape[-1]), distribution.dtype
            )
            distributions = distributions.at[:, 0].set(distribution)
        begin = _Round(
            _appended(request, history, token[:, None], jnp.ones((batch, 1), bool)),
            jnp.ones_like(taken),
            distributions,
            side,
            jnp.arange(memory.path.shape[1]) < taken[:, None],
            jnp.int32(0),
        )
        unfinished = lambda now: (now.count < self.max_depth).any()
        advance = lambda now: self._advance(params, request, memory.cache, history, now)
        end = lax.while_loop(unfinished, advance, begin)
        places = history.length[:, None] + jnp.arange(self.max_depth)
        drafted = jnp.take_along_axis(end.history.tokens, places, 1, mode="clip")
        translated = self.use_heterogeneous_vocab and distributions is not None
        draft = Draft(
            tokens=jnp.concatenate([root_token(history)[:, None], drafted], 1),
            parents=trees.chain(self.max_depth),
            valid=self._valid(history, gap),
            logits=end.distributions,
            draft_to_target=params.drafter.draft_to_target if translated else None,
            max_depth=self.max_depth,
        )
        kept = self._seen(memory, draft)
        return draft, DraftMemory(memory.cache, end.side, taken, kept, end.seen)

    def _advance(self, params, request, cache, history, now: _Round) -> _Round:
        """One pass over the last token drafted and what was looked up behind it."""
        found, _ = self.first.propose(params, request, (), (), now.history)
        size, fed = self.first.tree_size, found.tokens
        place = jnp.arange(size)
        slot = self.backlog + now.passes * size
        own = jnp.arange(now.seen.shape[1]) == slot + place[:, None]  # [n, M]
        above = jnp.asarray(np.tril(np.ones((size, size), bool))) @ own
        hidden, side = decoder.extend(
            weights_of(params.drafter),
            self.config,
            spell(params.drafter, fed),
            now.history.length[:, None] - 1 + place,
            cache,
            now.side,
            slot,
            now.seen[:, None] | above,
        )
        branches = _behind(now.history, fed) if request.sampling.processors is not None else None
        drawn, distributions = self._draws(params, request, history, hidden, now.count, branches)
        agrees = found.valid[:, 1:] & (fed[:, 1:] == drawn[:, :-1])
        agreeing = jnp.cumprod(agrees, 1, dtype=jnp.int32).sum(1, dtype=jnp.int32)
        kept = jnp.minimum(1 + agreeing, self.max_depth - now.count)  # tokens this pass adds
        new = place < kept[:, None]
        where = jnp.where(new, now.count[:, None] + place, self.max_depth + 1)
        rows = jnp.arange(len(fed))[:, None]
        return _Round(
            _appended(request, now.history, drawn, new),
            now.count + kept,
            None
            if distributions is None
            else now.distributions.at[rows, where].set(distributions, mode="drop"),
            side,
            now.seen | (new[..., None] & own).any(1),
            now.passes + 1,
        )

    def _draws(
        self, params, request, history, hidden, count, branches
    ) -> tuple[Array, Array | None]:
        """What the draft model draws after each node [B, n] of a pass, and from what laws.

        ``branches`` are the nodes', for requests that look at them.
        """
        logits = next_logits(
            params.drafter, self.config, hidden, self.vocab_size or self.config.vocab_size
        )
        if branches is not None:
            logits = self._shaped(params, request, branches, logits)
        ways = params.drafter if self.use_heterogeneous_vocab else None
        drawn = [
            self._draw(
                request,
                history,
                logits[:, node],
                jnp.minimum(count + node, self.max_depth - 1),
                ways,
            )
            for node in range(logits.shape[1])
        ]
        ids = jnp.stack([token for token, _ in drawn], 1)
        if ways is not None:
            ids = ways.draft_to_target[ids]
        distributions = [distribution for _, distribution in drawn]
        return ids, None if distributions[0] is None else jnp.stack(distributions, 1)

    def _fed(self, memory: DraftMemory) -> Array:
        return jnp.argsort(~memory.path, 1, stable=True)[:, : self.backlog + self.max_depth - 1]


def _behind(history: History, fed: Array) -> logits_processors.Branches:
    """The text before each node of a pass over ``fed`` [B, n], the first being in the history."""
    size = fed.shape[1]
    before = jnp.tril(jnp.ones((size, size - 1), bool), -1)
    return logits_processors.Branches(history, jnp.where(before, fed[:, None, 1:], -1))


def _appended(request: Request, history: History, new: Array, valid: Array) -> History:
    """``history`` with the ``valid`` ones, the first, of drafted tokens [B, n] behind it."""
    place = history.length[:, None] + jnp.arange(new.shape[1])
    place = jnp.where(valid, place, history.tokens.shape[1])
    text = history.tokens.at[jnp.arange(len(new))[:, None], place].set(new, mode="drop")
    state = logits_processors.state_after(request.sampling.processors, history, new, valid)
    return History(text, history.length + valid.sum(1, dtype=jnp.int32), state)

"""EAGLE: a head of one block drafts in the space of the target's hidden states.

Row i of the head pairs the target's feature f_i with the token after it, t_{i+1}, and predicts
t_{i+2}. With the root at position r, the last row of true features is r - 1: ::

    row                    0      1    ...   r-1    |    r      r+1   ...   guesses
    feature               f_0    f_1   ...  f_{r-1} |   f'_{r}  f'_{r+1}    what the row before gave
    token                 t_1    t_2   ...  root    |   x_1     x_2         drafted
    rotated to             0      1    ...   r-1    |    r      r+1
    predicts              t_2    t_3   ...   x_1    |   x_2     x_3

What lies right of the bar lives in a side buffer for a round and is thrown away. Once the target
has judged a draft, its features along the accepted path are true: these rows enter the cache, and
what the last of them gives out is where the next round starts. So the cache only ever holds rows of
true features. After a prompt of one token there is none, and the first round is a plain one.

EAGLE-1, -2 and -3 (arXiv 2401.15077, 2406.16858, 2503.01840) differ in the network, which is the
head's own affair, and in the tree, which is a setting.
"""

import dataclasses
import functools
from typing import NamedTuple

import jax.numpy as jnp

from jspec import growth, kv
from jspec.drafters.features import CachedMemory
from jspec.drafters.trees import TreeDrafter, rows
from jspec.models.heads import eagle as head
from jspec.models.heads.eagle import EagleConfig
from jspec.shapes import Dynamic
from jspec.types import Array


class _Frontier(NamedTuple):
    """Rows whose children are wanted."""

    hidden: Array  # [B, F, D], what they gave out
    seen: Array  # [B, F, M], side slots above them, their own included
    side: tuple[kv.AttentionKV, ...]  # [B, Hkv, M, head_dim] a layer


@dataclasses.dataclass(frozen=True)
class Eagle(TreeDrafter):
    """Drafting by an EAGLE head, a chain or any tree.

    Raises:
      ValueError: a setting is out of range, or does not go with the tree or the head.
    """

    config: EagleConfig

    def __post_init__(self):
        super().__post_init__()
        narrow = min((window for window in self.config.network.windows if window), default=None)
        if narrow is not None and narrow <= self.max_depth:
            raise ValueError(
                f"a draft {self.max_depth} deep does not fit into the head's sliding window of "
                f"{narrow}; it must be at most {narrow - 1}."
            )

    def init(self, params, request, capacity):
        """An empty cache."""
        batch = request.max_length.shape[0]
        hidden = jnp.zeros((batch, self.config.hidden_size), self.config.network.activation_dtype)
        return CachedMemory(head.init_cache(self.config, batch, capacity), hidden)

    def absorb(self, params, memory, tokens, features, start, valid):
        """Takes in a chunk of the prompt: its features, each with the token after."""
        return self._take_in(params, memory, tokens[:, 1:], features, valid)

    def update(self, params, request, shared, memory, history, draft, verdict, out):
        """Takes in the rows of the accepted path, whose features are now true."""
        root = history.length - verdict.num_emitted - 1
        positions = root[:, None] + jnp.arange(self.max_depth + 1)
        following = jnp.take_along_axis(history.tokens, positions + 1, 1, mode="clip")
        features = tuple(
            jnp.take_along_axis(feature, verdict.path[..., None], 1) for feature in out.features
        )
        memory = self._take_in(params, memory, following, features, verdict.num_emitted)
        return memory, shared

    def propose(self, params, request, shared, memory, history):
        """Drafts from what the last row of true features gave out."""
        drawing = self.drawing(request, history, params)
        feed = functools.partial(self._feed, params, memory.cache, history)
        logits = self._unembed(params, memory.hidden[:, None])
        frontier = self._root(memory)
        draft = growth.grow(drawing, self.shape, logits, feed, frontier)
        # The first feature comes with the second token.
        return self.limit(draft, history, memory.cache.length > 0), memory

    def _take_in(self, params, memory, following, features, count):
        """Commits the first ``count`` [B] of n rows of true features [B, n, D_target]."""
        hidden, entries = head.take_in(
            params.drafter, self.config, self._embed(params, following),
            head.fuse(params.drafter, self.config, features), memory.cache,
        )  # fmt: skip
        return memory.take_in(hidden, entries, count)

    def _root(self, memory: CachedMemory) -> _Frontier:
        """Row r - 1 as the first frontier; a dynamic tree wants it at its full width."""
        if isinstance(self.shape, Dynamic):
            width, slots = self.shape.top_k, (self.max_depth - 1) * self.shape.top_k
        else:
            width, slots = 1, sum(width > 0 for width in self.shape.widths[1:])
        batch, slots = memory.hidden.shape[0], max(slots, 1)  # attention reads something
        return _Frontier(
            hidden=jnp.repeat(memory.hidden[:, None], width, 1),
            seen=jnp.zeros((batch, width, slots), bool),
            side=head.init_cache(self.config, batch, slots).layers,
        )

    def _feed(self, params, cache, history, frontier, drafted, parents, depth, slot):
        """Runs the rows of drafted tokens [B, F] on what their parents gave out."""
        take = lambda x: rows(x, parents)
        count, slots = drafted.shape[1], frontier.seen.shape[2]
        own = jnp.arange(slots) == slot + jnp.arange(count)[:, None]
        seen = take(frontier.seen) | own
        positions = jnp.broadcast_to((history.length - 2 + depth)[:, None], drafted.shape)
        hidden, side = head.extend(
            params.drafter, self.config, self._embed(params, drafted), take(frontier.hidden),
            positions, cache, frontier.side, slot, seen,
        )  # fmt: skip
        return _Frontier(hidden, seen, side), self._unembed(params, hidden)

    def _embed(self, params, ids):
        return head.embed(params.drafter, self.config, ids, self.target, params.target)

    def _unembed(self, params, hidden):
        return head.unembed(params.drafter, self.config, hidden, self.target, params.target)

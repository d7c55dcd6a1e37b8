"""What drafters have in common whose head keeps a cache of its own, in step with the target's.

Row i of such a head pairs the target's feature f_i with the token after it, t_{i+1}, and predicts
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
"""

import dataclasses
import functools
from typing import Any, ClassVar

import jax.numpy as jnp

from jspec.core.types import Array, History
from jspec.drafters.base.tree_drafter import TreeDrafter
from jspec.drafters.trees import expand
from jspec.drafters.trees.tree_settings import Dynamic


@dataclasses.dataclass(frozen=True)
class CachedDrafter(TreeDrafter):
    """Drafting by rows of features and tokens, a chain or any tree.

    A method says how rows of true features are taken in (``_take_in``), where a round starts
    (``_start``) and how drafted rows run beside the cache (``_feed``, see ``growth.Feed``).
    """

    # Whether ``_feed`` needs depths and slots static.
    unrolled: ClassVar[bool] = False

    def missing(self, memory, history):
        """Rows of true features that are not in the cache."""
        return history.length - 1 - self._length(memory)

    def prefill(self, params, memory, tokens, features, start, valid):
        """Takes in a chunk of the prompt: its features, each with the token after."""
        return self._take_in(params, memory, tokens[:, 1:], features, valid)

    def update(self, params, request, shared, memory, history, draft, verdict, out):
        """Takes in the rows of the accepted path, whose features are now true."""
        root = history.length - verdict.num_emitted - 1
        positions = root[:, None] + jnp.arange(verdict.path.shape[1])
        following = jnp.take_along_axis(history.tokens, positions + 1, 1, mode="clip")
        features = tuple(
            jnp.take_along_axis(feature, verdict.path[..., None], 1) for feature in out.features
        )
        memory = self._take_in(params, memory, following, features, verdict.num_emitted)
        return memory, shared

    def propose(self, params, request, shared, memory, history):
        """Drafts from what the last row of true features gave out."""
        drawing = self.drawing(request, history, params)
        frontier, logits, length = self._start(params, memory)
        feed = functools.partial(self._feed, params, memory, history)
        draft = expand.grow(
            drawing, self.draft_tree, logits, feed, frontier, unrolled=self.unrolled
        )
        # The first feature comes with the second token.
        return self.limit(draft, history, length > 0), memory

    def _take_in(
        self, params: Any, memory: Any, following: Array, features: tuple[Array, ...], count: Array
    ) -> Any:
        """Commits the first ``count`` [B] of n rows of true features [B, n, D_target]."""
        raise NotImplementedError

    def _start(self, params: Any, memory: Any) -> tuple[Any, Array, Array]:
        """Row r - 1 as the first frontier, its logits [B, 1, Vd], and rows in the cache [B]."""
        raise NotImplementedError

    def _feed(
        self,
        params: Any,
        memory: Any,
        history: History,
        frontier: Any,
        drafted: Array,
        parents: Array,
        depth: int | Array,
        slot: int | Array,
    ) -> tuple[Any, Array]:
        """Runs the rows of drafted tokens [B, F] on what their parents gave out."""
        raise NotImplementedError

    def _length(self, memory: Any) -> Array:
        """Rows in the cache [B]."""
        return memory.cache.length

    @property
    def _frontier_size(self) -> tuple[int, int]:
        """Nodes of the first frontier, and slots of a round: a dynamic tree wants full width."""
        if isinstance(self.draft_tree, Dynamic):
            width, slots = self.draft_tree.top_k, (self.max_depth - 1) * self.draft_tree.top_k
        else:
            width, slots = 1, sum(width > 0 for width in self.draft_tree.widths[1:])
        return width, max(slots, 1)  # attention reads something


def own_slots(slots: int, slot: int | Array, count: int) -> Array:
    """bool [F, slots]: the side slot of each of ``count`` rows, the first of them at ``slot``."""
    return jnp.arange(slots) == slot + jnp.arange(count)[:, None]


def positions_of(history: History, drafted: Array, depth: int | Array) -> Array:
    """Positions [B, F] of the features of drafted tokens [B, F] at ``depth``."""
    return jnp.broadcast_to((history.length - 2 + depth)[:, None], drafted.shape)

"""DFlash: a block of masked tokens filled in by one pass (arXiv 2602.06036).

With the root at position r, the head has a cache of what it made of the target's hidden states at
positions 0 .. r - 1, all that the target has computed. One pass over the root and K masks gives the
laws of the next K tokens, each as if those between were not known: so all nodes of one depth share
a law, and the likeliest paths are found without growing others (DDTree, arXiv 2604.12989). Once the
target has judged a draft, its hidden states along the accepted path enter the cache. After a prompt
of one token there are none, and the first round is a plain one.

DSpark (arXiv 2607.05147) adds to every slot's logits a bias by the token drafted before it, so that
every node has a law of its own at the price of two thin matrices. Its guess at a slot's chance of
acceptance depends on that slot and on the token before it, never on the token it is about: so where
chances are poor a draft may end early, under every rule, and the output keeps the target's law.
"""

import dataclasses
import functools
from typing import ClassVar

import jax
import jax.numpy as jnp
from jax import lax

from jspec.core import kv_cache, trees
from jspec.core.history import root_token
from jspec.core.types import Array
from jspec.drafters.base.tree_drafter import TreeDrafter, rows
from jspec.drafters.trees import expand, marginals
from jspec.drafters.trees.tree_settings import Dynamic
from jspec.models.heads import dflash as head
from jspec.models.heads import dspark
from jspec.models.heads.dflash import DFlashConfig, DFlashParams


@dataclasses.dataclass(frozen=True)
class DFlash(TreeDrafter):
    """Drafting by a DFlash head, a chain or any tree, at most as deep as its block.

    Raises:
      ValueError: a setting is out of range, or does not go with the tree or the head.
    """

    follows = "best_first"
    weights = (DFlashParams,)
    sparks: ClassVar[bool] = False  # whether the head must have what DSpark adds

    config: DFlashConfig

    def __post_init__(self):
        super().__post_init__()
        if self.sparks != (self.config.spark is not None):
            kind, other = ("DFlash", "dflash") if self.sparks else ("DSpark", "dspark")
            raise ValueError(f"this is a {kind} head; draft with it by method {other!r}.")
        if self.max_depth > self.config.max_depth:
            raise ValueError(
                f"the tree is {self.max_depth} deep, but a block of {self.config.block_size} slots "
                f"drafts {self.config.max_depth} tokens: num_speculative_tokens must be at most "
                f"{self.config.max_depth}."
            )
        narrow = min((window for window in self.config.network.windows if window), default=None)
        slots = self.config.slots(self.max_depth)
        if narrow is not None and narrow < slots:
            raise ValueError(
                f"a block of {slots} slots does not fit into the head's sliding window of "
                f"{narrow}; draft at most {self.max_depth - slots + narrow} tokens."
            )

    def init(self, params, request, capacity):
        """An empty cache."""
        return head.init_cache(self.config, request.max_length.shape[0], capacity)

    def missing(self, memory, history):
        """Positions before the root whose hidden states are not in the cache."""
        return history.length - 1 - memory.length

    def prefill(self, params, memory, tokens, features, start, valid):
        """Takes in a chunk of the prompt."""
        return self._take_in(params, memory, features, valid)

    def update(self, params, request, shared, memory, history, draft, verdict, out):
        """Takes in the target's hidden states along the accepted path."""
        features = tuple(
            jnp.take_along_axis(feature, verdict.path[..., None], 1) for feature in out.features
        )
        return self._take_in(params, memory, features, verdict.num_emitted), shared

    def propose(self, params, request, shared, memory, history):
        """Drafts from one pass over a block."""
        _, logits = self._block(params, memory, history)
        draft = marginals.grow(self.drawing(request, history, params), self.draft_tree, logits)
        return self.limit(draft, history, memory.length > 0), memory

    def _block(self, params, cache, history) -> tuple[Array, Array]:
        """What the slots that draft gave out [B, K, D], and their logits [B, K, Vd]."""
        hidden = head.fill_in(
            params.drafter,
            self.config,
            root_token(history),
            self.max_depth,
            cache,
            self.target,
            params.target,
        )
        return hidden, head.unembed(params.drafter, self.config, hidden, self.target, params.target)

    def _take_in(self, params, cache, features, count):
        """Commits the first ``count`` [B] of n rows of hidden states [B, n, D_target]."""
        context = head.fuse(params.drafter, self.config, features)
        rows = jnp.broadcast_to(jnp.arange(context.shape[1]), context.shape[:2])
        positions = cache.length[:, None] + rows
        entries = head.inject(params.drafter, self.config, context, positions)
        return kv_cache.append(cache, entries, rows, count)


@dataclasses.dataclass(frozen=True)
class DSpark(DFlash):
    """Drafting by a DSpark head, a chain or any tree, at most as deep as its block.

    Attributes:
      confidence_threshold: a node is dropped, and what is below it, where the chance that all
        tokens down to it are accepted is less than this, as guessed by the head from the tokens
        above; None to draft all.
      dspark_draft_topk: tokens of a slot that are drafted from, the likeliest before the bias; None
        for all.

    Raises:
      ValueError: a setting is out of range, or does not go with the tree or the head.
    """

    follows = "eagle2"
    sparks: ClassVar[bool] = True
    knows_chances = True

    confidence_threshold: float | None = None
    dspark_draft_topk: int | None = None

    def __post_init__(self):
        super().__post_init__()
        threshold = self.confidence_threshold
        if threshold is not None and not self.config.spark.confidence:
            raise ValueError(
                f"confidence_threshold={threshold}, but the head guesses no chances of acceptance; "
                "leave it out."
            )
        few, known = self.dspark_draft_topk, self.config.vocab_size
        if few is not None and not 1 <= few <= known:
            raise ValueError(
                "dspark_draft_topk must be between 1 and the draft vocabulary size "
                f"({known}), got {few}."
            )
        if few is not None:
            self._check_vocabulary(few)

    def propose(self, params, request, shared, memory, history):
        """Drafts from one pass over a block, one level after the other."""
        hidden, base = self._block(params, memory, history)
        if self.dspark_draft_topk is not None:
            least = lax.top_k(base, self.dspark_draft_topk)[0][..., -1:]
            base = jnp.where(base < least, -jnp.inf, base)
        advance = functools.partial(self._advance, params, hidden, base)
        state = dspark.start(self.config.spark, hidden.shape[0], hidden.dtype)
        state, logits = advance(state, root_token(history)[:, None], 0)
        if isinstance(self.draft_tree, Dynamic):  # which wants the root at its full width
            state = jnp.repeat(state, self.draft_tree.top_k, 1)

        def feed(state, drafted, parents, depth, slot):
            del slot
            return advance(rows(state, parents), drafted, depth)

        drawing = self.drawing(request, history, params)
        draft = expand.grow(drawing, self.draft_tree, logits, feed, state)
        if self.confidence_threshold is not None:
            draft = self._cut(params, hidden, draft)
        return self.limit(draft, history, memory.length > 0), memory

    def _advance(self, params, hidden, base, state, before, depth):
        """The state and the logits [B, F, Vd] of slots after tokens [B, F] at ``depth``."""
        slot = functools.partial(lax.dynamic_slice_in_dim, start_index=depth, slice_size=1, axis=1)
        wide = jnp.broadcast_to(slot(hidden), (*before.shape, hidden.shape[-1]))
        state, bias = dspark.advance(params.drafter.spark, self.config.spark, state, wide, before)
        return state, slot(base) + bias

    def _cut(self, params, hidden, draft):
        """Drops nodes whose path is not likely enough to be accepted, by what stands above them."""
        tree = trees.from_parents(draft.parents, draft.max_depth)
        depth = jnp.broadcast_to(tree.depth, draft.tokens.shape)
        slot = jnp.minimum(depth, self.max_depth - 1)[..., None]
        chance = dspark.confidence(
            params.drafter.spark,
            self.config.spark,
            jnp.take_along_axis(hidden, slot, 1),
            draft.tokens,
        )
        nodes = draft.tokens.shape[1]
        above = trees.unpack_bits(tree.ancestors, nodes) & ~jnp.eye(nodes, dtype=bool)
        survival = jnp.where(above, jax.nn.log_sigmoid(chance)[:, None], 0).sum(-1)
        return draft.replace(valid=draft.valid & (survival >= jnp.log(self.confidence_threshold)))

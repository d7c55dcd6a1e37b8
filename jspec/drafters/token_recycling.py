"""Token recycling: a tree of the target's own latest guesses after each token, without training.

The method is that of arXiv 2408.08696. A matrix holds, for every token of the vocabulary, the k
likeliest next tokens of the latest target pass over that token, in an accepted branch or not. A
draft is a static tree of ranks: the child of rank r is entry r of its parent's row. Every target
pass updates the rows of the tokens that it has seen.
"""

import dataclasses
import functools

import jax.numpy as jnp
import numpy as np

from jspec.core import sampling
from jspec.core.history import root_token
from jspec.core.static_trees import StaticTree
from jspec.core.types import Array, Draft, Drafter
from jspec.drafters.trees import tree_settings

UNKNOWN = -1  # in the rows of tokens that no pass has seen
_DEPTH, _TREE_SIZE, _TOP_K = 6, 81, 8  # the paper's: 80 nodes below the root


@dataclasses.dataclass(frozen=True)
class TokenRecycling(Drafter):
    """Token recycling. ``shared`` is the matrix, int32 [V, k]; with () nothing is drafted.

    The matrix outlives calls and serves all rows. If several nodes of a round hold one token, the
    last of them, row by row, updates it. Prompts do not, as their logits are never computed.

    Attributes:
      vocab_size: V, of the target.
      num_speculative_tokens: K, edges from the root to the deepest leaf; None for 6, or the tree's.
      tree: "chain", a name in ``tree_settings.PUBLISHED``, or rank paths; None for
        ``tree_settings.best`` of the settings below.
      tree_size: N, nodes with the root; None for 81, or the tree's.
      tree_top_k: most children of a node; None for 8, or the tree's.

    Raises:
      ValueError: a setting is out of range, or contradicts the tree.
    """

    vocab_size: int
    num_speculative_tokens: int | None = None
    tree: tree_settings.Tree | None = None
    tree_size: int | None = None
    tree_top_k: int | None = None

    proposal = "deterministic"
    reads_pages = True
    lookahead = 0

    def __post_init__(self):
        if self.width > self.vocab_size:
            raise ValueError(
                f"the tree has nodes with {self.width} children, but the target knows only "
                f"{self.vocab_size} tokens."
            )
        object.__setattr__(self, "tree_size", self.draft_tree.size)

    @functools.cached_property
    def draft_tree(self) -> StaticTree:
        """The static tree."""
        if self.tree in ("eagle2", "best_first", "sampled"):
            raise ValueError(
                f"tree={self.tree!r} follows a head's probabilities, which token_recycling has "
                "not; leave tree out, or give 'chain', a published tree or rank paths."
            )
        names = "num_speculative_tokens", "tree_size", "tree_top_k"
        settings = {name: vars(self)[name] for name in names}
        if self.tree is not None:
            return tree_settings.requested(self.tree, **settings)
        tree_settings.check_positive(**settings)
        depth, top_k = self.num_speculative_tokens or _DEPTH, self.tree_top_k or _TOP_K
        full = tree_settings.full(depth, top_k)
        return tree_settings.best(self.tree_size or min(_TREE_SIZE, full), depth, top_k)

    max_depth = property(lambda self: self.draft_tree.max_depth)
    width = property(lambda self: max(self.draft_tree.widths))  # k

    def init_shared(self) -> Array:
        """Return a matrix without tokens."""
        return jnp.full((self.vocab_size, self.width), UNKNOWN, jnp.int32)

    def propose(self, params, request, shared, memory, history):
        """Draft the part of the tree whose tokens are in the matrix."""
        parents, ranks, depth = (
            np.array(part)
            for part in (self.draft_tree.parents, self.draft_tree.ranks, self.draft_tree.depth)
        )
        tokens = root_token(history)[:, None]
        valid = jnp.ones_like(tokens, dtype=bool)
        for below in range(1, self.max_depth + 1):
            nodes = np.flatnonzero(depth == below)
            above = parents[nodes]
            if isinstance(shared, tuple):  # there is no matrix
                children = jnp.full((len(tokens), nodes.size), UNKNOWN, jnp.int32)
            else:
                children = shared[tokens[:, above], ranks[nodes]]
            exists = valid[:, above] & (children != UNKNOWN)
            tokens = jnp.concatenate([tokens, jnp.where(exists, children, 0)], 1)
            valid = jnp.concatenate([valid, exists], 1)
        return Draft(tokens, np.array(parents, np.int32), valid, max_depth=self.max_depth), memory

    def update(self, round):
        """Update the rows of all tokens that the target has seen, accepted or not."""
        if isinstance(round.shared, tuple):
            return round.memory, round.shared
        draft = round.draft
        seen = draft.valid & (round.verdict.num_emitted > 0)[:, None]
        return round.memory, _updated(round.shared, draft.tokens, seen, round.out.logits)


def _updated(matrix: Array, drafted: Array, seen: Array, logits: Array) -> Array:
    """Return the matrix with the likeliest tokens after those drafted tokens [B, N] ``seen``."""
    size, width = matrix.shape
    likeliest = sampling.top_k(logits, width)[1].reshape(-1, width)
    token = jnp.where(seen, drafted, size).reshape(-1)
    # A scatter has no order among equal indices, so only the last node of a token writes.
    order = jnp.argsort(token, stable=True)
    ordered = token[order]
    is_last = jnp.append(ordered[1:] != ordered[:-1], True)
    return matrix.at[jnp.where(is_last, ordered, size)].set(likeliest[order], mode="drop")

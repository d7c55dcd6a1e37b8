"""Token recycling: a tree of what the target last found likely after each token, with no training.

The method is that of arXiv 2408.08696: a matrix holds, for every token of the vocabulary, the k
tokens that the target found likeliest when it last looked past that token, whether in a branch that
was accepted or in one that was not. A draft is a static tree of ranks: the child of rank r is the
r-th entry of its parent's row. Every pass of the target renews the rows of the tokens it has seen.
"""

import dataclasses
import functools
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from jspec.core.history import root_token
from jspec.core.trees import StaticTree
from jspec.core.types import Array, Draft, History
from jspec.drafters.trees import tree_settings

UNKNOWN = -1  # in the rows of tokens that no pass has seen
_DEPTH, _TREE_SIZE, _TOP_K = 6, 81, 8  # the paper's: 80 nodes below the root


@dataclasses.dataclass(frozen=True)
class TokenRecycling:
    """Token recycling. ``shared`` is the matrix, int32 [V, k]; with () nothing is drafted.

    The matrix outlives calls and is one for all rows; the last of several nodes with one token, row
    by row, is the one that is kept. Prompts do not enter it: their logits are never computed.

    Attributes:
      vocab_size: V, of the target.
      num_speculative_tokens: K, edges from the root to the deepest leaf; None for 6, or the tree's.
      tree: "chain", a name in ``tree_settings.PUBLISHED``, or rank paths; None for ``tree_settings.best`` of the
        settings below.
      tree_size: N, nodes with the root; None for 81, or for the tree's own.
      tree_top_k: children of a node at most; None for 8, or for the tree's own.

    Raises:
      ValueError: a setting is out of range, or does not go with the tree.
    """

    vocab_size: int
    num_speculative_tokens: int | None = None
    tree: tree_settings.Tree | None = None
    tree_size: int | None = None
    tree_top_k: int | None = None

    capture_layers = ()
    proposal = "point"
    noise = "own"

    def __post_init__(self):
        if self.width > self.vocab_size:
            raise ValueError(
                f"the tree has nodes with {self.width} children, but the target knows only "
                f"{self.vocab_size} tokens."
            )
        object.__setattr__(self, "tree_size", self.draft_tree.size)

    @functools.cached_property
    def draft_tree(self) -> StaticTree:
        """The tree."""
        if self.tree in ("eagle2", "best_first", "sampled"):
            raise ValueError(
                f"tree={self.tree!r} follows a head's probabilities, which token_recycling has "
                "not; leave tree out, or give 'chain', a published tree or rank paths."
            )
        if self.tree is not None:
            return tree_settings.requested(
                self.tree, self.num_speculative_tokens, self.tree_size, None, self.tree_top_k
            )
        given = {
            "num_speculative_tokens": self.num_speculative_tokens,
            "tree_size": self.tree_size,
            "tree_top_k": self.tree_top_k,
        }
        for name, value in given.items():
            if value is not None and value < 1:
                raise ValueError(f"{name}={value} must be at least 1.")
        depth, top_k = self.num_speculative_tokens or _DEPTH, self.tree_top_k or _TOP_K
        full = sum(top_k**level for level in range(depth + 1))
        return tree_settings.best(self.tree_size or min(_TREE_SIZE, full), depth, top_k)

    @property
    def width(self) -> int:
        """k, the largest rank that the tree asks for, and one."""
        return max(self.draft_tree.widths)

    @property
    def max_depth(self) -> int:
        """K."""
        return self.draft_tree.max_depth

    def init_shared(self) -> Array:
        """A matrix that knows nothing."""
        return jnp.full((self.vocab_size, self.width), UNKNOWN, jnp.int32)

    def on_finished(self, shared: Any, memory: Any, history: History) -> Any:
        """Nothing is left to learn: every pass was learnt from."""
        return shared

    def init(self, params, request, capacity):
        """No memory of the rows' own."""
        return ()

    def prefill(self, params, memory, tokens, features, start, valid):
        """Nothing to learn: a prompt comes without logits."""
        return memory

    def propose(self, params, request, shared, memory, history):
        """The tree, as far as the matrix knows what comes next."""
        parents, ranks, depth = (
            np.array(part)
            for part in (self.draft_tree.parents, self.draft_tree.ranks, self.draft_tree.depth)
        )
        drafted = root_token(history)[:, None]
        valid = jnp.ones_like(drafted, dtype=bool)
        for level in range(1, self.max_depth + 1):
            nodes = np.flatnonzero(depth == level)
            above = parents[nodes]
            if isinstance(shared, tuple):  # there is no matrix
                found = jnp.full((drafted.shape[0], nodes.size), UNKNOWN, jnp.int32)
            else:
                found = shared[drafted[:, above], ranks[nodes]]
            known = valid[:, above] & (found != UNKNOWN)
            drafted = jnp.concatenate([drafted, jnp.where(known, found, 0)], 1)
            valid = jnp.concatenate([valid, known], 1)
        return Draft(drafted, np.array(parents, np.int32), valid, max_depth=self.max_depth), memory

    def update(self, params, request, shared, memory, history, draft, verdict, out):
        """Renews the rows of all tokens that the target has looked past, accepted or not."""
        if isinstance(shared, tuple):
            return memory, shared
        seen = draft.valid & (verdict.num_emitted > 0)[:, None]
        return memory, _renewed(shared, draft.tokens, seen, out.logits)


def _renewed(matrix: Array, drafted: Array, seen: Array, logits: Array) -> Array:
    """``matrix`` with the likeliest successors of the tokens [B, N] that were ``seen``."""
    size, width = matrix.shape
    likeliest = lax.top_k(logits, width)[1].reshape(-1, width).astype(jnp.int32)
    token = jnp.where(seen, drafted, size).reshape(-1)
    # A scatter has no order among equal indices: only the last node with a token may write.
    order = jnp.argsort(token, stable=True)
    ordered = token[order]
    is_last = jnp.append(ordered[1:] != ordered[:-1], True)
    return matrix.at[jnp.where(is_last, ordered, size)].set(likeliest[order], mode="drop")

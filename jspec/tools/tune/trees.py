"""The static tree that is expected to emit most, by Sequoia's dynamic program.

Where the child of rank r below an accepted node of depth d is the accepted one with probability
``chances[d, r]``, a tree emits one token and, for every node, the product of these along its path.
Sequoia (arXiv 2402.12374, section 3.1, its equation with P of the rank alone; here P may change
with the depth) finds the best tree of n nodes from those of fewer: ::

    T(d, n) = 1 + W(d, 0, n - 1)
    W(d, r, m) = max over 1 <= s <= m of chances[d, r] * T(d + 1, s) + W(d, r + 1, m - s)

T(d, n) are the tokens of the best n nodes at and below an accepted one of depth d, itself included,
and W(d, r, m) those of m nodes below it, under its children of ranks r, r + 1, ...
"""

import dataclasses

import numpy as np

from jspec.core import trees
from jspec.core.trees import StaticTree

_NEVER = -np.inf


@dataclasses.dataclass(frozen=True, eq=False)
class BestTrees:
    """The best tree of every size. Made by ``best_trees``.

    Attributes:
      tokens: float64 [n + 1], expected tokens of a round by N, nodes with the root; -inf where
        there is no such tree, as of size 0.
    """

    tokens: np.ndarray
    _sizes: np.ndarray  # [D, R, n], nodes of the subtree of rank r where m nodes are left

    def of_size(self, size: int) -> StaticTree:
        """The tree of N = ``size`` nodes, at least 2.

        Raises:
          ValueError: there is none.
        """
        if not 2 <= size < len(self.tokens) or self.tokens[size] == _NEVER:
            raise ValueError(
                f"size={size} must be 2 to {np.flatnonzero(self.tokens > _NEVER).max()}, the nodes "
                "of the largest tree of this depth and width."
            )
        paths, waiting = [], [((), size - 1)]
        while waiting:
            above, left = waiting.pop()
            for rank in range(self._sizes.shape[1]):
                if not left:
                    break
                taken = int(self._sizes[len(above), rank, left])
                paths.append((*above, rank))
                waiting.append((paths[-1], taken - 1))
                left -= taken
        return trees.from_choices(paths)


def best_trees(chances: np.ndarray, most_nodes: int) -> BestTrees:
    """The best trees of 1 to ``most_nodes`` nodes, root included.

    A node's children have the ranks 0, 1, 2, ... without a gap: those drawn first are judged first.
    Time is O(D R n^2), of numpy's.

    Args:
      chances: float [D, R], as above: D is the greatest depth of a leaf, R the most children.
      most_nodes: n.

    Raises:
      ValueError: an argument is out of range.
    """
    chances = np.asarray(chances, np.float64)
    if chances.ndim != 2 or not chances.size or not ((chances >= 0) & (chances <= 1)).all():
        raise ValueError(f"chances={chances} must be probabilities [depth, rank], at least one.")
    if most_nodes < 1:
        raise ValueError(f"most_nodes={most_nodes} must be at least 1.")
    depth, ranks = chances.shape
    sizes = np.zeros((depth, ranks, most_nodes + 1), np.int32)
    tokens = np.full(most_nodes + 1, _NEVER)
    tokens[1] = 1.0  # a leaf of the greatest depth
    for level in reversed(range(depth)):
        below = np.full(most_nodes + 1, _NEVER)
        below[0] = 0.0
        for rank in reversed(range(ranks)):
            brings = np.full(most_nodes, _NEVER)
            there = tokens[1:] > _NEVER  # times a chance of 0, -inf is no number
            brings[there] = chances[level, rank] * tokens[1:][there]
            below, sizes[level, rank] = _with_rank(brings, below)
        tokens = np.concatenate([[_NEVER], 1.0 + below[:-1]])
    return BestTrees(tokens, sizes)


def expected_tokens(tree: StaticTree, chances: np.ndarray) -> float:
    """Tokens that a round of this tree is expected to emit, the one after the draft included."""
    reached = np.ones(tree.size)
    for node in range(1, tree.size):
        parent = tree.parents[node]
        reached[node] = reached[parent] * chances[tree.depth[parent], tree.ranks[node]]
    return float(reached.sum())


def _with_rank(own: np.ndarray, later: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """W of a rank and the nodes s that its subtree takes, by the m nodes there are: both [n + 1].

    Args:
      own: [n], what a subtree of 1, 2, ... nodes of this rank brings.
      later: [n + 1], W of the rank after it.
    """
    found, taken = np.full_like(later, _NEVER), np.zeros(len(later), np.int32)
    found[0] = 0.0
    for left in range(1, len(later)):
        values = own[:left] + later[left - 1 :: -1]
        taken[left] = 1 + int(values.argmax())
        found[left] = values.max()
    return found, taken

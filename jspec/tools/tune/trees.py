"""The static tree with the largest expected number of emitted tokens, by Sequoia's program.

Let ``chances[d, r]`` be the probability that the child of rank r of an accepted node at depth d is
the accepted one. A round then emits one token, and for each node the product of the chances along
its path. Sequoia (arXiv 2402.12374, section 3.1; its P depends on the rank alone, here on the depth
too) builds the best tree of n nodes from smaller ones::

    T(d, n) = 1 + W(d, 0, n - 1)
    W(d, r, m) = max over 1 <= s <= m of chances[d, r] * T(d + 1, s) + W(d, r + 1, m - s)

T(d, n) is the expected number of tokens of the best n nodes at and below an accepted node of depth
d. W(d, r, m) is that of m nodes below it, under its children of ranks r, r + 1, ...
"""

import dataclasses

import numpy as np

_NEVER = -np.inf


@dataclasses.dataclass(frozen=True, eq=False)
class BestTrees:
    """The best tree of every size; made by ``best_trees``."""

    tokens: np.ndarray  # float64 [n + 1], expected, by nodes with the root; -inf: no such tree
    # [D, R, n + 1], nodes of the subtree of rank r if m > 0 nodes are left
    _sizes: np.ndarray

    def of_size(self, size: int) -> list[tuple[int, ...]]:
        """Return the rank paths of the best tree of ``size`` nodes with the root, parents first."""
        paths, waiting = [], [((), size - 1)]
        for path, left in waiting:  # grows as it goes
            for rank in range(self._sizes.shape[1]):
                if not left:
                    break
                taken = int(self._sizes[len(path), rank, left])
                paths.append((*path, rank))
                waiting.append((paths[-1], taken - 1))
                left -= taken
        return paths


def best_trees(chances: np.ndarray, most_nodes: int) -> BestTrees:
    """Return the best trees of 1 to ``most_nodes`` nodes with the root, for ``chances`` [D, R].

    The children of a node have ranks 0, 1, 2, ... without a gap, because earlier ranks are judged
    first. The time is O(D R n^2).
    """
    depth, ranks = np.shape(chances)
    sizes = np.zeros((depth, ranks, most_nodes + 1), np.int32)
    tokens = np.full(most_nodes + 1, _NEVER)
    tokens[1] = 1.0  # a leaf at the greatest depth
    nodes = np.arange(most_nodes + 1)
    left, size = nodes[:, None], nodes[1:]  # m and s
    for above in reversed(range(depth)):  # depth of the parents
        below = np.where(nodes > 0, _NEVER, 0.0)  # W of the next rank
        for rank in reversed(range(ranks)):
            exists = tokens[1:] > _NEVER  # 0 * -inf is NaN
            subtree = np.where(
                exists, chances[above][rank] * np.where(exists, tokens[1:], 0), _NEVER
            )
            options = np.where(size <= left, subtree + below[left - size], _NEVER)
            sizes[above, rank] = 1 + options.argmax(1)
            below = np.where(nodes > 0, options.max(1), 0.0)
        tokens = np.concatenate([[_NEVER], 1.0 + below[:-1]])
    return BestTrees(tokens, sizes)

"""The static tree with the largest expected number of accepted tokens.

Let ``chances[d, r]`` be the probability that the child of rank r of an accepted node at depth d is
the accepted one. A round then emits one token, and for each node the product of the chances along
its path. Sequoia (arXiv 2402.12374, section 3.1) maximizes this sum. No node has a larger product
than its parent or its sibling before it, so the nodes with the largest products are the optimum.
"""

import heapq

import numpy as np


def likeliest_paths(chances: np.ndarray, count: int) -> list[tuple[int, ...]]:
    """Return the rank paths of the ``count`` likeliest nodes, by ``chances`` [D, R] and in order.

    The first n paths are the best tree of n + 1 nodes with the root. There are fewer paths if a
    full tree has fewer nodes. A rank counts as no likelier than the rank before it.
    """
    chances = np.minimum.accumulate(np.asarray(chances, np.float64), axis=1)
    depth, ranks = chances.shape
    heap = [(-chances[0, 0], 1, (0,))]  # negative product, depth, path: ties favour shallow nodes
    paths: list[tuple[int, ...]] = []
    while heap and len(paths) < count:
        weight, length, path = heapq.heappop(heap)
        paths.append(path)
        if path[-1] + 1 < ranks:
            before, after = chances[length - 1, path[-1] : path[-1] + 2]
            sibling = (*path[:-1], path[-1] + 1)
            heapq.heappush(heap, (weight / before * after if before else 0.0, length, sibling))
        if length < depth:
            heapq.heappush(heap, (weight * chances[length, 0], length + 1, (*path, 0)))
    return paths

"""Static trees: the published ones by name, and the best one for a budget.

A published tree stands here as the number of children of every node, level by level, nodes without
children left out at a level's end; children have the ranks 0, 1, 2, ... (all published trees do).
"""

import heapq
import itertools

from jspec import topology
from jspec.naming import did_you_mean
from jspec.topology import Shape

# The names are those of the tables in EAGLE's and Medusa's repositories, behind the method's: both
# call their first table mc_sim_7b_63.
PUBLISHED = {
    "eagle_mc_sim_7b_63": "4, 3 2 2 1, 3 2 2 1, 3, 2",  # 25 nodes, in spite of its name
    "medusa_mc_sim_7b_63": "10, 10 7 3 2 1 1 1 1 1 1, 10 3 2 1 1 1 1 1 0 0 2 0 0 0 0 0 0 1, 2",
    "medusa_vicuna_7b_stage1":
        "10, 10 7 4 3 2 2 1 1 1 1, 9 3 2 1 1 1 0 0 0 0 2 0 0 0 0 0 0 1, 1",
    "medusa_vicuna_7b_stage1_ablation":
        "10, 10 4 2 2 1 1 1, 10 4 2 1 1 1 0 0 0 0 3 1 0 0 1 0 1, 4 1 1 0 0 0 0 0 0 0 1",
    "medusa_vicuna_7b_stage2":
        "10, 10 5 2 2 1 1 1 1, 9 4 2 1 1 1 0 0 0 0 3 1 0 0 0 1, 4 1 1 0 0 0 0 0 0 1",
    "medusa_vicuna_13b_stage1":
        "10, 10 7 4 2 2 1 1 1 1, 10 4 2 1 1 1 0 0 0 0 2 1 0 0 0 0 0 1, 1",
    "medusa_vicuna_13b_stage2":
        "10, 10 4 2 1 1 1, 10 4 2 1 1 1 0 0 0 0 3 1 0 0 1 0 1, "
        "4 2 1 0 0 0 0 0 0 0 1 0 0 0 0 0 0 0 0 1",
    "medusa_vicuna_33b_stage1":
        "10, 10 8 5 3 2 2 1 1 1 1, 9 3 2 1 1 0 0 0 0 0 2 0 0 0 0 0 0 0 1",
    "medusa_vicuna_33b_stage2":
        "10, 10 5 3 2 1 1 1 1, 10 4 2 1 1 1 0 0 0 0 3 1 0 0 0 1, 3 1 0 0 0 0 0 0 0 0 1",
    "medusa_zephyr_stage2":
        "10, 10 6 4 2 2 1 1 1, 10 4 2 1 1 1 0 0 0 0 2 1 0 0 0 0 1, 2 1",
}  # fmt: skip


def published(name: str) -> Shape:
    """A published tree by its name.

    Raises:
      ValueError: there is none of that name.
    """
    if name not in PUBLISHED:
        raise ValueError(f"no tree is published as {name!r}{did_you_mean(name, PUBLISHED)}")
    return topology.from_choices(_paths(PUBLISHED[name]))


def _paths(counts: str) -> list[tuple[int, ...]]:
    paths, level = [], [()]
    for line in counts.split(","):
        children = [int(count) for count in line.split()]
        level = [(*path, rank) for path, count in zip(level, children, strict=False)
                 for rank in range(count)]  # fmt: skip
        paths += level
    return paths


def best(size: int, max_depth: int, top_k: int) -> Shape:
    """The static tree of ``size`` nodes that is expected to accept most.

    Where the child of rank r is the accepted one with probability a_r, whatever is above it, a node
    is reached with the product of the a's along its path, and the expected number of accepted nodes
    is the sum of these. So the best tree holds the ``size - 1`` most probable paths (what Sequoia's
    dynamic program finds, arXiv 2402.12374). Taken here is a_r = 0.6 / (1 + r) ** 2.

    Args:
      size: N, the root included.
      max_depth: edges from the root to the deepest leaf, at most.
      top_k: children of a node, at most.

    Raises:
      ValueError: a full tree of that depth and width has fewer nodes.
    """
    full = sum(top_k**depth for depth in range(max_depth + 1))
    if not 2 <= size <= full:
        raise ValueError(
            f"tree_size={size} must be 2 to {full}, the nodes of a full tree of "
            f"tree_depth={max_depth} and tree_top_k={top_k}, root included."
        )
    counter = itertools.count()  # of equal paths the one found first, which is never the deeper
    heap = [(-_chance(0), next(counter), (0,))]
    paths: list[tuple[int, ...]] = []
    while len(paths) < size - 1:
        weight, _, path = heapq.heappop(heap)
        paths.append(path)
        if path[-1] + 1 < top_k:
            sibling = weight / _chance(path[-1]) * _chance(path[-1] + 1)
            heapq.heappush(heap, (sibling, next(counter), (*path[:-1], path[-1] + 1)))
        if len(path) < max_depth:
            heapq.heappush(heap, (weight * _chance(0), next(counter), (*path, 0)))
    return topology.from_choices(paths)


def _chance(rank: int) -> float:
    return 0.6 / (1 + rank) ** 2

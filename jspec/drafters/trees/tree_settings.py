"""What a drafter's tree settings ask for: a static shape, or the budget of a tree that has none.

A published tree stands here as the number of children of every node, level by level, nodes without
children left out at a level's end; children have the ranks 0, 1, 2, ... (all published trees do).
"""

import dataclasses
import heapq
import itertools
from typing import Literal

from jspec.core import trees
from jspec.core.trees import StaticTree
from jspec.util.messages import did_you_mean, shown

# The names are those of the tables in EAGLE's and Medusa's repositories, behind the method's: both
# call their first table mc_sim_7b_63.
PUBLISHED = {
    "eagle_mc_sim_7b_63": "4, 3 2 2 1, 3 2 2 1, 3, 2",  # 25 nodes, in spite of its name
    "medusa_mc_sim_7b_63": "10, 10 7 3 2 1 1 1 1 1 1, 10 3 2 1 1 1 1 1 0 0 2 0 0 0 0 0 0 1, 2",
    "medusa_vicuna_7b_stage1": "10, 10 7 4 3 2 2 1 1 1 1, 9 3 2 1 1 1 0 0 0 0 2 0 0 0 0 0 0 1, 1",
    "medusa_vicuna_7b_stage1_ablation": "10, 10 4 2 2 1 1 1, 10 4 2 1 1 1 0 0 0 0 3 1 0 0 1 0 1, 4 1 1 0 0 0 0 0 0 0 1",
    "medusa_vicuna_7b_stage2": "10, 10 5 2 2 1 1 1 1, 9 4 2 1 1 1 0 0 0 0 3 1 0 0 0 1, 4 1 1 0 0 0 0 0 0 1",
    "medusa_vicuna_13b_stage1": "10, 10 7 4 2 2 1 1 1 1, 10 4 2 1 1 1 0 0 0 0 2 1 0 0 0 0 0 1, 1",
    "medusa_vicuna_13b_stage2": "10, 10 4 2 1 1 1, 10 4 2 1 1 1 0 0 0 0 3 1 0 0 1 0 1, "
    "4 2 1 0 0 0 0 0 0 0 1 0 0 0 0 0 0 0 0 1",
    "medusa_vicuna_33b_stage1": "10, 10 8 5 3 2 2 1 1 1 1, 9 3 2 1 1 0 0 0 0 0 2 0 0 0 0 0 0 0 1",
    "medusa_vicuna_33b_stage2": "10, 10 5 3 2 1 1 1 1, 10 4 2 1 1 1 0 0 0 0 3 1 0 0 0 1, 3 1 0 0 0 0 0 0 0 0 1",
    "medusa_zephyr_stage2": "10, 10 6 4 2 2 1 1 1, 10 4 2 1 1 1 0 0 0 0 2 1 0 0 0 0 1, 2 1",
}

OF_ANY_DEPTH = ("chain", "eagle2", "best_first", "sampled")
NAMES = (*OF_ANY_DEPTH, *PUBLISHED)
DRAFT_SAMPLE_METHODS = ("probabilistic", "greedy", "top_plus_one")
_EAGLE2 = {"size": 60, "top_k": 10}  # the authors' defaults
_SAMPLED = {"size": 16, "top_k": 4}
_BEST_FIRST = 16  # nodes

Tree = str | tuple[tuple[int, ...], ...]
Proposal = Literal["point", "chain", "without_replacement", "top_plus_one"]


def check_threshold(threshold: float) -> None:
    """Raises a ValueError unless ``confidence_threshold`` is a probability."""
    if not 0 <= threshold <= 1:
        raise ValueError(f"confidence_threshold={threshold} must be 0 to 1.")


def node_buckets(size: int, varies: bool = False) -> tuple[int, ...]:
    """Node counts of drafts up to ``size`` that are worth a program of the target's own.

    Where the length ``varies``, K tokens, half of them, a quarter and so on, root included.
    """
    halves = itertools.takewhile(bool, ((size - 1) >> step for step in itertools.count()))
    return tuple(sorted({1, size, *(1 + half for half in halves if varies)}))


@dataclasses.dataclass(frozen=True)
class Dynamic:
    """The budget of EAGLE-2's tree.

    Attributes:
      size: N, the root included.
      max_depth: edges from the root to the deepest leaf, at most.
      top_k: children of a node, and nodes of a level that get children.

    Raises:
      ValueError: fewer than ``size`` nodes are ever candidates.
    """

    size: int
    max_depth: int
    top_k: int

    def __post_init__(self):
        most = _num_candidates(self.max_depth, self.top_k) + 1
        if not 2 <= self.size <= most:
            raise ValueError(
                f"tree_size={self.size} must be 2 to {most}, the nodes that an 'eagle2' tree of "
                f"tree_depth={self.max_depth} and tree_top_k={self.top_k} chooses from, root "
                "included."
            )


@dataclasses.dataclass(frozen=True)
class BestFirst:
    """The budget of the likeliest paths of a head that has one law for all nodes of a depth.

    Attributes:
      size: N, the root included.
      max_depth: edges from the root to the deepest leaf, at most.

    Raises:
      ValueError: there is room for the root alone.
    """

    size: int
    max_depth: int

    def __post_init__(self):
        if self.size < 2:
            raise ValueError(f"tree_size={self.size} must be at least 2, the root included.")


Grown = StaticTree | Dynamic | BestFirst  # what a tree may be


def _num_candidates(max_depth: int, top_k: int) -> int:
    """How many nodes EAGLE-2's expansion looks at: k, and k times k at every level below."""
    return top_k + (max_depth - 1) * top_k**2


def requested(
    tree: Tree,
    num_speculative_tokens: int | None = None,
    tree_size: int | None = None,
    tree_depth: int | None = None,
    tree_top_k: int | None = None,
) -> Grown:
    """The tree that the settings of a drafter ask for.

    Args:
      tree: "chain", "eagle2", "best_first", "sampled" (``best`` of the budget), a name in
        ``PUBLISHED``, or rank paths.
      num_speculative_tokens: K, edges from the root to the deepest leaf.
      tree_size: N, nodes with the root. None for 60 ("eagle2") or 16 ("best_first", "sampled"), or
        for as many as there can be where that is less.
      tree_depth: the same as ``num_speculative_tokens``.
      tree_top_k: children of a node at most. None for 10 ("eagle2") or 4 ("sampled"); a tree that
        is "best_first" has no such bound.

    Raises:
      ValueError: a setting is out of range, contradicts another, or is not used by that tree.
    """
    given = {
        "num_speculative_tokens": num_speculative_tokens,
        "tree_depth": tree_depth,
        "tree_size": tree_size,
        "tree_top_k": tree_top_k,
    }
    for name, value in given.items():
        if value is not None and value < 1:
            raise ValueError(f"{name}={value} must be at least 1.")
    if tree not in OF_ANY_DEPTH:
        draft_tree = published(tree) if isinstance(tree, str) else trees.from_choices(tree)
        return _agreeing(tree, draft_tree, given)
    depth = tree_depth if num_speculative_tokens is None else num_speculative_tokens
    if depth is None:
        raise ValueError(f"tree={tree!r} needs num_speculative_tokens, the depth of its leaves.")
    if tree_depth not in (None, depth):
        raise ValueError(
            f"{num_speculative_tokens=} and {tree_depth=} are the same depth of the tree; give one."
        )
    if tree == "chain":
        paths = [(0,) * length for length in range(1, depth + 1)]
        return _agreeing(tree, trees.from_choices(paths), given)
    if tree == "best_first":
        if tree_top_k is not None:
            raise ValueError("tree_top_k is not used by tree='best_first'; leave it out.")
        return BestFirst(tree_size or _BEST_FIRST, depth)
    defaults = _EAGLE2 if tree == "eagle2" else _SAMPLED
    top_k = tree_top_k or defaults["top_k"]
    if tree == "eagle2":
        most = _num_candidates(depth, top_k) + 1
        return Dynamic(tree_size or min(defaults["size"], most), depth, top_k)
    return best(tree_size or min(defaults["size"], full(depth, top_k)), depth, top_k)


def _agreeing(tree: Tree, draft_tree: StaticTree, given: dict[str, int | None]) -> StaticTree:
    """A shape that has a depth and size of its own; settings must not say otherwise."""
    own = {
        "num_speculative_tokens": draft_tree.max_depth,
        "tree_depth": draft_tree.max_depth,
        "tree_size": draft_tree.size,
        "tree_top_k": max(draft_tree.widths),
    }
    for name, value in given.items():
        if value not in (None, own[name]):
            which = f"tree={tree!r}" if isinstance(tree, str) else "the tree of these paths"
            raise ValueError(f"{name}={value}, but {which} has {own[name]}; leave {name} out.")
    return draft_tree


def drawn_by(tree: Tree, draft_tree: Grown, method: str | None) -> str:
    """How the children of a tree are chosen: by ``method``; None draws wherever that is exact.

    Raises:
      ValueError: the method is unknown, or would not be exact for this tree.
    """
    if method is None:
        can_draw = isinstance(draft_tree, StaticTree) and draft_tree.gapless
        return "probabilistic" if can_draw else "greedy"
    if method not in DRAFT_SAMPLE_METHODS:
        known = " or ".join(map(repr, DRAFT_SAMPLE_METHODS))
        near = did_you_mean(method, DRAFT_SAMPLE_METHODS) or "."
        raise ValueError(f"draft_sample_method={shown(method)} must be {known}{near}")
    if not isinstance(draft_tree, StaticTree) and method != "greedy":
        raise ValueError(
            f"draft_sample_method={method!r} is not exact for tree={tree!r}, which drops nodes for "
            "their values; leave it out, or use tree='sampled'."
        )
    if tree == "sampled" and method == "greedy":
        raise ValueError(
            "draft_sample_method='greedy' draws nothing, but tree='sampled' asks for draws; leave "
            "it out, or choose another tree."
        )
    if method == "top_plus_one" and max(draft_tree.widths) < 2:
        raise ValueError(
            "draft_sample_method='top_plus_one' needs a tree with siblings; a chain is "
            "'probabilistic' or 'greedy'."
        )
    if method != "greedy" and not draft_tree.gapless:
        raise ValueError(
            f"draft_sample_method={method!r} needs a tree whose siblings have the ranks 0, 1, 2, "
            "...; list the ranks left out, or use draft_sample_method='greedy'."
        )
    return method


def proposal(draft_tree: Grown, method: str) -> Proposal:
    """The law of the children that ``method`` chooses."""
    if method == "greedy":
        return "point"
    if max(draft_tree.widths) == 1:
        return "chain"
    return "top_plus_one" if method == "top_plus_one" else "without_replacement"


def published(name: str) -> StaticTree:
    """A published tree by its name.

    Raises:
      ValueError: there is none of that name.
    """
    if name not in PUBLISHED:
        raise ValueError(f"no tree is published as {shown(name)}{did_you_mean(name, PUBLISHED)}")
    return trees.from_choices(_paths(PUBLISHED[name]))


def _paths(counts: str) -> list[tuple[int, ...]]:
    paths, level = [], [()]
    for line in counts.split(","):
        children = [int(count) for count in line.split()]
        level = [
            (*path, rank)
            for path, count in zip(level, children, strict=False)
            for rank in range(count)
        ]
        paths += level
    return paths


def best(size: int, max_depth: int, top_k: int) -> StaticTree:
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
    most = full(max_depth, top_k)
    if not 2 <= size <= most:
        raise ValueError(
            f"tree_size={size} must be 2 to {shown(most, 40)}, the nodes of a full tree of "
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
    return trees.from_choices(paths)


def full(max_depth: int, top_k: int) -> int:
    """Nodes of a tree in which all but the deepest have ``top_k`` children, root included."""
    return sum(top_k**depth for depth in range(max_depth + 1))


def _chance(rank: int) -> float:
    return 0.6 / (1 + rank) ** 2

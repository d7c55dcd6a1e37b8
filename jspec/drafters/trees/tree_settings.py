"""The tree settings of a drafter: a static tree, or the budget of a dynamic one.

A published tree is written as the number of children of every node, depth by depth. Nodes without
children are left out at the end of a depth. Children have the ranks 0, 1, 2, ..., as in all
published trees.
"""

import dataclasses
import heapq
import itertools

from jspec.core import static_trees
from jspec.core.static_trees import StaticTree
from jspec.core.types import Proposal
from jspec.util.messages import did_you_mean, shown
from jspec.util.values import is_whole

# The method's name, then that of the table in EAGLE's or Medusa's repository: both call their first
# table mc_sim_7b_63.
PUBLISHED = {
    "eagle_mc_sim_7b_63": "4, 3 2 2 1, 3 2 2 1, 3, 2",  # 25 nodes, in spite of its name
    "medusa_mc_sim_7b_63": "10, 10 7 3 2 1 1 1 1 1 1, 10 3 2 1 1 1 1 1 0 0 2 0 0 0 0 0 0 1, 2",
    "medusa_vicuna_7b_stage1": "10, 10 7 4 3 2 2 1 1 1 1, 9 3 2 1 1 1 0 0 0 0 2 0 0 0 0 0 0 1, 1",
    "medusa_vicuna_7b_stage1_ablation": (
        "10, 10 4 2 2 1 1 1, 10 4 2 1 1 1 0 0 0 0 3 1 0 0 1 0 1, 4 1 1 0 0 0 0 0 0 0 1"
    ),
    "medusa_vicuna_7b_stage2": (
        "10, 10 5 2 2 1 1 1 1, 9 4 2 1 1 1 0 0 0 0 3 1 0 0 0 1, 4 1 1 0 0 0 0 0 0 1"
    ),
    "medusa_vicuna_13b_stage1": "10, 10 7 4 2 2 1 1 1 1, 10 4 2 1 1 1 0 0 0 0 2 1 0 0 0 0 0 1, 1",
    "medusa_vicuna_13b_stage2": (
        "10, 10 4 2 1 1 1, 10 4 2 1 1 1 0 0 0 0 3 1 0 0 1 0 1, "
        "4 2 1 0 0 0 0 0 0 0 1 0 0 0 0 0 0 0 0 1"
    ),
    "medusa_vicuna_33b_stage1": "10, 10 8 5 3 2 2 1 1 1 1, 9 3 2 1 1 0 0 0 0 0 2 0 0 0 0 0 0 0 1",
    "medusa_vicuna_33b_stage2": (
        "10, 10 5 3 2 1 1 1 1, 10 4 2 1 1 1 0 0 0 0 3 1 0 0 0 1, 3 1 0 0 0 0 0 0 0 0 1"
    ),
    "medusa_zephyr_stage2": "10, 10 6 4 2 2 1 1 1, 10 4 2 1 1 1 0 0 0 0 2 1 0 0 0 0 1, 2 1",
}

OF_ANY_DEPTH = ("chain", "eagle2", "best_first", "sampled")
NAMES = (*OF_ANY_DEPTH, *PUBLISHED)
DRAFT_SAMPLE_METHODS = ("probabilistic", "greedy", "top_plus_one")
_SIZES = {"eagle2": 60, "best_first": 16, "sampled": 16}  # default nodes; EAGLE-2's authors' 60
_TOP_KS = {"eagle2": 10, "sampled": 4}

Tree = str | tuple[tuple[int, ...], ...]


@dataclasses.dataclass(frozen=True)
class Dynamic:
    """The budget of EAGLE-2's tree, which chooses from at least ``size`` candidates."""

    size: int  # N, the root included
    max_depth: int  # most edges from the root to a leaf
    top_k: int  # children of a node, and nodes of a depth that are expanded

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
    """The budget of a tree of the likeliest paths, if the nodes of a depth share a distribution."""

    size: int  # N, the root included
    max_depth: int  # most edges from the root to a leaf

    def __post_init__(self):
        if self.size < 2:
            raise ValueError(f"tree_size={self.size} must be at least 2, the root included.")


DraftTree = StaticTree | Dynamic | BestFirst


def _num_candidates(max_depth: int, top_k: int) -> int:
    """Count the candidates of EAGLE-2's tree: k at depth 1, and k times k at each depth below."""
    return top_k + (max_depth - 1) * top_k**2


def requested(
    tree: Tree,
    num_speculative_tokens: int | None = None,
    tree_size: int | None = None,
    tree_depth: int | None = None,
    tree_top_k: int | None = None,
) -> DraftTree:
    """Return the tree of a drafter's settings, which ``TreeDrafter`` describes.

    Raises:
      ValueError: a setting is out of range, contradicts another, or is not used by that tree.
    """
    settings = {
        "num_speculative_tokens": num_speculative_tokens,
        "tree_depth": tree_depth,
        "tree_size": tree_size,
        "tree_top_k": tree_top_k,
    }
    check_positive(**settings)
    if tree not in OF_ANY_DEPTH:
        static = published(tree) if isinstance(tree, str) else static_trees.from_choices(tree)
        return _agreeing(tree, static, settings)
    depth = tree_depth if num_speculative_tokens is None else num_speculative_tokens
    if depth is None:
        raise ValueError(f"tree={tree!r} needs num_speculative_tokens, the depth of its leaves.")
    if tree_depth not in (None, depth):
        raise ValueError(
            f"{num_speculative_tokens=} and {tree_depth=} are the same depth of the tree; give one."
        )
    if tree == "chain":
        paths = [(0,) * length for length in range(1, depth + 1)]
        return _agreeing(tree, static_trees.from_choices(paths), settings)
    if tree == "best_first":
        if tree_top_k is not None:
            raise ValueError("tree_top_k is not used by tree='best_first'; leave it out.")
        return BestFirst(tree_size or _SIZES[tree], depth)
    top_k = tree_top_k or _TOP_KS[tree]
    if tree == "eagle2":
        most = _num_candidates(depth, top_k) + 1
        return Dynamic(tree_size or min(_SIZES[tree], most), depth, top_k)
    return best(tree_size or min(_SIZES[tree], full(depth, top_k)), depth, top_k)


def check_positive(**settings: int | None) -> None:
    """Refuse settings that are neither None nor whole numbers of at least 1."""
    for name, value in settings.items():
        if value is not None and not is_whole(value, 1):
            words = "at least 1" if is_whole(value) else "a whole number of at least 1"
            raise ValueError(f"{name}={shown(value)} must be {words}.")


def _agreeing(tree: Tree, static: StaticTree, settings: dict[str, int | None]) -> StaticTree:
    """Return ``static``; refuse settings that contradict it."""
    actual = {
        "num_speculative_tokens": static.max_depth,
        "tree_depth": static.max_depth,
        "tree_size": static.size,
        "tree_top_k": max(static.widths),
    }
    for name, value in settings.items():
        if value not in (None, actual[name]):
            which = f"tree={tree!r}" if isinstance(tree, str) else "the tree of these paths"
            raise ValueError(f"{name}={value}, but {which} has {actual[name]}; leave {name} out.")
    return static


def drawn_by(tree: Tree, draft_tree: DraftTree, method: str | None) -> str:
    """Return the method that chooses the children of a tree; None draws if that is exact.

    Raises:
      ValueError: the method is unknown, or is not exact for this tree.
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


def proposal(draft_tree: DraftTree, method: str) -> Proposal:
    """Return the ``Proposal`` of the children that ``method`` chooses."""
    if method == "greedy":
        return "deterministic"
    if max(draft_tree.widths) == 1:
        return "chain"
    return "top_plus_one" if method == "top_plus_one" else "without_replacement"


def published(name: str) -> StaticTree:
    """Return a published tree.

    Raises:
      ValueError: there is no tree of that name.
    """
    if name not in PUBLISHED:
        raise ValueError(f"no tree is published as {shown(name)}{did_you_mean(name, PUBLISHED)}")
    paths, above = [], [()]
    for line in PUBLISHED[name].split(","):
        counts = zip(above, map(int, line.split()), strict=False)
        above = [(*path, rank) for path, count in counts for rank in range(count)]
        paths += above
    return static_trees.from_choices(paths)


def best(size: int, max_depth: int, top_k: int) -> StaticTree:
    """Return the static tree of ``size`` nodes with the most expected accepted nodes.

    Let the child of rank r be the accepted one with probability a_r, whatever is above it. Then a
    node is reached with the product of the a's along its path, and the expected number of accepted
    nodes is the sum of these products. So the best tree holds the ``size`` - 1 most probable paths,
    which Sequoia's dynamic program also finds (arXiv 2402.12374). Here a_r = 0.6 / (1 + r) ** 2.

    Raises:
      ValueError: a full tree of that depth and width has fewer nodes.
    """
    most = full(max_depth, top_k)
    if not 2 <= size <= most:
        raise ValueError(
            f"tree_size={size} must be 2 to {shown(most, 40)}, the nodes of a full tree of "
            f"tree_depth={max_depth} and tree_top_k={top_k}, root included."
        )
    counter = itertools.count()  # breaks ties by age, so toward the shallower path
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
    return static_trees.from_choices(paths)


def full(max_depth: int, top_k: int) -> int:
    """Count the nodes of a full tree of that depth and width, root included."""
    return sum(top_k**depth for depth in range(max_depth + 1))


def _chance(rank: int) -> float:
    return 0.6 / (1 + rank) ** 2

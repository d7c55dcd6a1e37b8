"""Static trees, the same in every row: their nodes, and the ranks that their tokens have.

``jspec.core.trees`` has what a round needs of any tree.
"""

import dataclasses
import functools
from collections.abc import Iterable, Sequence

import numpy as np

from jspec.core.trees import MOST_NODES
from jspec.util.messages import shown
from jspec.util.values import is_whole


@dataclasses.dataclass(frozen=True)
class StaticTree:
    """A draft tree whose structure is fixed: node i is child ``ranks[i]`` of ``parents[i]``.

    Nodes are sorted by (depth, path). So parents precede children, siblings ascend by rank, and the
    nodes of a depth are contiguous. Hashable, so that drafters can hold one.
    """

    parents: tuple[int, ...]  # node ids, -1 for the root
    ranks: tuple[int, ...]  # 0 for the likeliest (or first drawn) child of a node, and the root

    @functools.cached_property
    def size(self) -> int:
        """N, root included."""
        return len(self.parents)

    @functools.cached_property
    def depth(self) -> tuple[int, ...]:
        """Number of edges from the root to each node."""
        depth = [0]
        for parent in self.parents[1:]:
            depth.append(depth[parent] + 1)
        return tuple(depth)

    @functools.cached_property
    def max_depth(self) -> int:
        """K, the number of edges from the root to the deepest leaf."""
        return self.depth[-1]

    @functools.cached_property
    def num_children(self) -> tuple[int, ...]:
        """Number of children of each node."""
        return tuple(np.bincount(np.array(self.parents[1:], int), minlength=self.size).tolist())

    @functools.cached_property
    def widths(self) -> tuple[int, ...]:
        """Highest rank among the children of each node, plus one; 0 for leaves."""
        widths = [0] * self.size
        for parent, rank in zip(self.parents[1:], self.ranks[1:], strict=True):
            widths[parent] = max(widths[parent], rank + 1)
        return tuple(widths)

    @property
    def paths(self) -> tuple[tuple[int, ...], ...]:
        """The rank path of every drafted node, as ``from_choices`` takes them."""
        paths: list[tuple[int, ...]] = [()]
        for parent, rank in zip(self.parents[1:], self.ranks[1:], strict=True):
            paths.append((*paths[parent], rank))
        return tuple(paths[1:])

    @property
    def gapless(self) -> bool:
        """True if the children of every node have the ranks 0, 1, 2, ..."""
        return self.widths == self.num_children


def from_choices(paths: Iterable[Sequence[int]]) -> StaticTree:
    """Return the tree of a list of rank paths, the form in which Medusa and EAGLE publish trees.

    A path names a node by the ranks on the way to it: ``(0, 1)`` is the second child of the root's
    first child. The root is not listed.

    >>> from_choices([(0,), (1,), (0, 0), (0, 1)])
    StaticTree(parents=(-1, 0, 0, 1, 1), ranks=(0, 0, 1, 0, 1))
    >>> from_choices([(1,), (0,), (0, 1)]).paths
    ((0,), (1,), (0, 1))

    Raises:
      ValueError: a path is not a list of ranks, is repeated, or lacks its parent; or none is given.
    """
    checked = [_check_path(path) for path in paths]
    if not 1 <= len(checked) < MOST_NODES:
        raise ValueError(
            f"a tree needs at least one path, such as (0,), and at most {MOST_NODES - 1}; got "
            f"{len(checked)}."
        )
    ordered = sorted(set(checked), key=lambda path: (len(path), path))
    if len(ordered) < len(checked):
        twice = next(path for path in ordered if checked.count(path) > 1)
        raise ValueError(f"path {shown(list(twice))} of the tree is listed twice.")
    index = {(): 0} | {path: node for node, path in enumerate(ordered, 1)}
    for path in ordered:
        if path[:-1] not in index:
            raise ValueError(
                f"path {shown(list(path))} of the tree has no parent: list "
                f"{shown(list(path[:-1]))} as well."
            )
    parents = (-1, *(index[path[:-1]] for path in ordered))
    return StaticTree(parents, (0, *(path[-1] for path in ordered)))


def _check_path(path: Sequence[int]) -> tuple[int, ...]:
    is_path = isinstance(path, Sequence) and not isinstance(path, str) and len(path) > 0
    if not is_path or not all(is_whole(rank, 0) for rank in path):
        raise ValueError(f"path {shown(path)} of a tree must be a list of ranks, such as [0, 1].")
    return tuple(int(rank) for rank in path)

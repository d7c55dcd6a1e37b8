"""The best static tree, against all trees and the golden numbers of Sequoia's program."""

import functools
import itertools

import numpy as np
import pytest

from jspec.core import static_trees
from jspec.tools.tune.trees import best_trees

SEQUOIA = (0.7, 0.1, 0.05, 0.03)


@functools.cache
def subtrees(size, depth, ranks):
    """All trees of ``size`` nodes with the root and at most this depth, as tuples of subtrees."""
    if size == 1:
        return [()]
    if depth == 0:
        return []
    trees_of_size = []
    for width in range(1, min(ranks, size - 1) + 1):
        for cut in itertools.combinations(range(1, size - 1), width - 1):
            sizes = np.diff((0, *cut, size - 1))
            trees_of_size += itertools.product(*(subtrees(int(s), depth - 1, ranks) for s in sizes))
    return trees_of_size


def value(tree, chances, depth=0):
    return 1 + sum(
        chances[depth][rank] * value(child, chances, depth + 1) for rank, child in enumerate(tree)
    )


def expected_tokens(paths, chances):
    """Tokens that a round is expected to emit, the one after the draft included."""
    return 1 + sum(
        map(lambda path: np.prod([chances[depth, rank] for depth, rank in enumerate(path)]), paths)
    )


@pytest.mark.parametrize("depth", [1, 2, 4])
def test_no_tree_emits_more(depth):
    chances = np.random.default_rng(depth).dirichlet((3, 1, 1, 0.5), size=depth)[:, :3]
    best = best_trees(chances, 9)
    for size in range(1, 10):
        highest = max((value(t, chances) for t in subtrees(size, depth, 3)), default=-np.inf)
        assert best.tokens[size] == pytest.approx(highest, abs=1e-12), size
        if size > 1 and np.isfinite(highest):
            assert expected_tokens(best.of_size(size), chances) == pytest.approx(highest, abs=1e-12)
    assert len(subtrees(9, 4, 3)) > 500


def test_a_later_rank_that_is_accepted_more_often_gets_the_nodes():
    best = best_trees(np.array([[0.1, 0.6], [0.1, 0.8]]), 5)
    assert sorted(best.of_size(5)) == [(0,), (1,), (1, 0), (1, 1)]
    assert best.tokens[5] == pytest.approx(2.24)


@pytest.mark.parametrize(
    ("chances", "size", "tokens"),
    [
        (SEQUOIA, 16, 3.6358213),
        (SEQUOIA, 64, 4.5872883),
        ((0.8, 0.07, 0.03, 0.01), 16, 4.9071221),
    ],
)
def test_the_golden_numbers_of_the_papers_program(chances, size, tokens):
    deep = np.tile(chances, (size - 1, 1))
    best = best_trees(deep, size)
    assert best.tokens[size] == pytest.approx(tokens, abs=1e-7)
    tree = static_trees.from_choices(best.of_size(size))
    assert (tree.size, tree.gapless) == (size, True)
    assert expected_tokens(best.of_size(size), deep) == pytest.approx(tokens, abs=1e-7)


def test_a_chain_emits_the_sum_of_the_powers():
    chances = np.full((15, 1), 0.7)
    paths = best_trees(chances, 16).of_size(16)
    assert paths == [(0,) * length for length in range(1, 16)]
    assert expected_tokens(paths, chances) == pytest.approx(3.3222557, abs=1e-7)


def test_chances_may_depend_on_the_depth():
    """If the second token is never accepted, all nodes are children of the root."""
    wide = best_trees(np.array([[0.4, 0.3, 0.2], [0, 0, 0]]), 4)
    assert wide.of_size(4) == [(0,), (1,), (2,)] and wide.tokens[4] == pytest.approx(1.9)
    deep = best_trees(np.array([[0.4, 0.01, 0.01], [0.9, 0, 0], [0.9, 0, 0]]), 4)
    assert deep.of_size(4) == [(0,), (0, 0), (0, 0, 0)]


def test_a_full_tree_has_no_more_nodes():
    assert best_trees(np.array([[0.5, 0.2]]), 9).tokens[4] == -np.inf

"""The best static tree, beside all trees there are and the golden numbers of Sequoia's program."""

import functools
import itertools

import numpy as np
import pytest

from jspec.core import trees as core_trees
from jspec.tools.tune.trees import best_trees, expected_tokens

SEQUOIA = (0.7, 0.1, 0.05, 0.03)


@functools.cache
def subtrees(size, depth, ranks):
    """All trees of ``size`` nodes below and with a root, at most so deep, as tuples of subtrees."""
    if size == 1:
        return [()]
    if depth == 0:
        return []
    found = []
    for width in range(1, min(ranks, size - 1) + 1):
        for cut in itertools.combinations(range(1, size - 1), width - 1):
            sizes = np.diff((0, *cut, size - 1))
            found += itertools.product(*(subtrees(int(s), depth - 1, ranks) for s in sizes))
    return found


def value(tree, chances, depth=0):
    return 1 + sum(
        chances[depth][rank] * value(child, chances, depth + 1) for rank, child in enumerate(tree)
    )


@pytest.mark.parametrize("depth", [1, 2, 4])
def test_no_tree_there_is_emits_more(depth):
    chances = np.random.default_rng(depth).dirichlet((3, 1, 1, 0.5), size=depth)[:, :3]
    trees = best_trees(chances, 9)
    for size in range(1, 10):
        every = subtrees(size, depth, 3)
        best = max((value(tree, chances) for tree in every), default=-np.inf)
        assert trees.tokens[size] == pytest.approx(best, abs=1e-12), (size, len(every))
    assert len(subtrees(9, 4, 3)) > 500


@pytest.mark.parametrize(
    ("chances", "size", "tokens"),
    [
        (SEQUOIA, 16, 3.6358213),
        (SEQUOIA, 64, 4.5872883),
        ((0.8, 0.07, 0.03, 0.01), 16, 4.9071221),
    ],
)
def test_the_golden_numbers_of_the_paper_s_program(chances, size, tokens):
    deep = np.tile(chances, (size - 1, 1))
    trees = best_trees(deep, size)
    assert trees.tokens[size] == pytest.approx(tokens, abs=1e-7)
    tree = trees.of_size(size)
    assert (tree.size, tree.gapless) == (size, True)
    assert expected_tokens(tree, deep) == pytest.approx(tokens, abs=1e-7)


def test_a_chain_emits_the_sum_of_the_powers():
    chain = core_trees.from_choices([(0,) * length for length in range(1, 16)])
    assert expected_tokens(chain, np.full((15, 1), 0.7)) == pytest.approx(3.3222557, abs=1e-7)
    assert best_trees(np.full((15, 1), 0.7), 16).of_size(16) == chain


def test_chances_may_depend_on_the_depth():
    """Where the second token is never accepted, all nodes are children of the root."""
    trees = best_trees(np.array([[0.4, 0.3, 0.2], [0, 0, 0]]), 4)
    assert trees.of_size(4).paths == ((0,), (1,), (2,)) and trees.tokens[4] == pytest.approx(1.9)
    deep = best_trees(np.array([[0.4, 0.01, 0.01], [0.9, 0, 0], [0.9, 0, 0]]), 4)
    assert deep.of_size(4).paths == ((0,), (0, 0), (0, 0, 0))


def test_sizes_that_no_tree_has_are_refused():
    trees = best_trees(np.array([[0.5, 0.2]]), 9)
    assert trees.tokens[4] == -np.inf
    with pytest.raises(ValueError, match="size=4 must be 2 to 3"):
        trees.of_size(4)
    with pytest.raises(ValueError, match="must be probabilities"):
        best_trees(np.array([[1.5]]), 4)
    with pytest.raises(ValueError, match="most_nodes=0"):
        best_trees(np.array([[0.5]]), 0)

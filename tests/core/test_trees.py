import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jspec.core import static_trees, trees


@st.composite
def random_parents(draw):
    size = draw(st.integers(1, 70))
    return np.array([-1] + [draw(st.integers(0, i - 1)) for i in range(1, size)], np.int32)


def ancestors_by_walking(parents):
    rows = []
    for node in range(len(parents)):
        row, at = np.zeros(len(parents), bool), node
        while at >= 0:
            row[at] = True
            at = parents[at]
        rows.append(row)
    return np.array(rows)


@settings(max_examples=50)
@given(random_parents())
def test_ancestor_sets_equal_a_walk_to_the_root(parents):
    expected = ancestors_by_walking(parents)
    tree = trees.from_parents(parents, max_depth=int(expected.sum(1).max()) - 1)
    assert (trees.unpack_bits(tree.ancestors, len(parents)) == expected).all()
    assert (tree.depth == expected.sum(1) - 1).all()


def test_the_largest_static_tree_is_that_of_a_walk_to_the_root():
    parents = trees.chain(trees.MOST_NODES - 1)
    tree = trees.from_parents(parents, trees.MOST_NODES - 1)
    expected = ancestors_by_walking(parents)
    assert (trees.unpack_bits(tree.ancestors, len(parents)) == expected).all()
    assert tree.depth.tolist() == list(range(trees.MOST_NODES))


def test_traced_parents_give_the_tree_of_static_parents():
    parents = np.array([[-1, 0, 0, 1, 3], [-1, 0, 1, 2, 3]], np.int32)
    static = trees.from_parents(parents, 4)
    traced = trees.from_parents(jnp.array(parents), 4)
    for left, right in zip(static.__dict__.values(), traced.__dict__.values(), strict=True):
        np.testing.assert_array_equal(left, right)


@pytest.mark.parametrize("size", [1, 31, 32, 33, 64, 65])
def test_unpacking_inverts_packing(size):
    mask = np.random.default_rng(size).random((3, size)) < 0.5
    words = trees.pack_bits(mask)
    assert words.dtype == np.uint32 and words.shape == (3, -(-size // 32))
    assert (trees.unpack_bits(words, size) == mask).all()


@pytest.mark.parametrize("window", [1, 2, 3, 9])
def test_a_window_keeps_ancestors_fewer_edges_up_than_its_size(window):
    tree = trees.from_parents(np.array([-1, 0, 0, 1, 3, 4], np.int32), 4)
    seen = trees.unpack_bits(trees.within(tree, window), 6)
    every = trees.unpack_bits(tree.ancestors, 6)
    for node, ancestor in zip(*np.nonzero(every), strict=True):
        assert seen[node, ancestor] == (tree.depth[node] - tree.depth[ancestor] < window)
    assert not (seen & ~every).any()


def test_the_first_nodes_of_a_tree_are_a_tree():
    parents = np.array([-1, 0, 0, 1, 2, 2], np.int32)
    part = trees.first_nodes(trees.from_parents(parents, 2), 3)
    alone = trees.from_parents(parents[:3], 1)
    assert (part.depth == alone.depth).all() and (part.ancestors == alone.ancestors).all()


def test_nodes_of_a_static_tree_are_sorted_by_depth_and_path():
    tree = static_trees.from_choices([[2], (0, 1), [0], (2, 0, 4), (2, 0)])
    assert tree.parents == (-1, 0, 0, 1, 2, 4) and tree.ranks == (0, 0, 2, 1, 0, 4)
    assert tree.depth == (0, 1, 1, 2, 2, 3) and tree.num_children == (2, 1, 1, 0, 1, 0)
    assert tree.size == 6 and tree.max_depth == 3 and not tree.gapless


@pytest.mark.parametrize("depth", [1, 5])
def test_a_chain_is_the_tree_of_first_children(depth):
    tree = static_trees.from_choices([(0,) * length for length in range(1, depth + 1)])
    assert tree.parents == tuple(trees.chain(depth).tolist()) and tree.gapless


@pytest.mark.parametrize(
    ("paths", "message"),
    [
        ([], "at least one path"),
        ([(0,), ()], r"path \(\) of a tree must be a list of ranks"),
        ([(0,), 1], "path 1 of a tree must be a list of ranks"),
        ([(0,), (-1,)], r"path \(-1,\) of a tree"),
        ([(0,), (True,)], r"path \(True,\) of a tree"),
        ([(0,), "01"], "path '01' of a tree"),
        ([(0,), (0, 0), [0]], r"path \[0\] of the tree is listed twice"),
        ([(0,), (1, 0)], r"path \[1, 0\] of the tree has no parent: list \[1\] as well"),
    ],
)
def test_invalid_rank_paths_raise(paths, message):
    with pytest.raises(ValueError, match=message):
        static_trees.from_choices(paths)

import itertools

import numpy as np
import pytest

from jspec.core import static_trees
from jspec.drafters.trees import tree_settings

# Nodes by depth, as the tables' own repositories count them.
DEPTH_COUNTS = {
    "eagle_mc_sim_7b_63": (4, 8, 8, 3, 2),
    "medusa_mc_sim_7b_63": (10, 28, 23, 2),
    "medusa_vicuna_7b_stage1": (10, 32, 20, 1),
    "medusa_vicuna_7b_stage1_ablation": (10, 21, 25, 7),
    "medusa_vicuna_7b_stage2": (10, 23, 23, 7),
    "medusa_vicuna_13b_stage1": (10, 29, 23, 1),
    "medusa_vicuna_13b_stage2": (10, 19, 25, 9),
    "medusa_vicuna_33b_stage1": (10, 34, 19),
    "medusa_vicuna_33b_stage2": (10, 24, 24, 5),
    "medusa_zephyr_stage2": (10, 27, 23, 3),
}


@pytest.mark.parametrize("name", tree_settings.PUBLISHED)
def test_a_published_tree_has_the_published_number_of_nodes_at_every_depth(name):
    tree = tree_settings.published(name)
    assert tuple(np.bincount(tree.depth)) == (1, *DEPTH_COUNTS[name])
    assert tree.gapless


def test_eagles_tree_has_eagles_paths():
    listed = (
        "0 1 2 3 00 01 02 10 11 20 21 30 000 001 002 010 011 020 021 100 0000 0001 0002 00000 00001"
    )
    paths = [tuple(map(int, path)) for path in listed.split()]
    assert tree_settings.published("eagle_mc_sim_7b_63") == static_trees.from_choices(paths)


def test_medusas_tree_has_medusas_longest_and_last_paths():
    tree = tree_settings.published("medusa_mc_sim_7b_63")
    paths = [()]
    for parent, rank in zip(tree.parents[1:], tree.ranks[1:], strict=True):
        paths.append((*paths[parent], rank))
    assert {(0, 0, 0, 0), (0, 0, 0, 1), (9, 0), (1, 6), (0, 7, 0), (1, 0, 1)} <= set(paths)
    assert not {(2, 0, 1), (1, 7), (1, 2, 0), (0, 0, 1, 0)} & set(paths)
    leaves = set(paths) - {path[:-1] for path in paths}
    assert len(leaves) == 42


def test_a_name_that_is_not_published_is_refused_with_the_nearest_one():
    with pytest.raises(ValueError, match="did you mean 'medusa_vicuna_7b_stage"):
        tree_settings.published("medusa_vicuna_7b_stage")


def expected_accepted(paths):
    return sum(np.prod([0.6 / (1 + rank) ** 2 for rank in path]) for path in paths)


@pytest.mark.parametrize(("size", "depth", "top_k"), [(5, 3, 3), (7, 2, 3), (6, 4, 2)])
def test_no_tree_of_a_budget_is_expected_to_accept_more_than_the_best_one(size, depth, top_k):
    every = [
        path
        for length in range(1, depth + 1)
        for path in itertools.product(range(top_k), repeat=length)
    ]
    closed = (
        set(chosen)
        for chosen in itertools.combinations(every, size - 1)
        if all(
            (len(path) == 1 or path[:-1] in chosen)
            and (path[-1] == 0 or (*path[:-1], path[-1] - 1) in chosen)
            for path in chosen
        )
    )
    tree = tree_settings.best(size, depth, top_k)
    paths = [()]
    for parent, rank in zip(tree.parents[1:], tree.ranks[1:], strict=True):
        paths.append((*paths[parent], rank))
    assert tree.size == size and tree.gapless and tree.max_depth <= depth
    assert expected_accepted(paths[1:]) == pytest.approx(max(map(expected_accepted, closed)))


def test_a_budget_that_fills_the_tree_gives_the_full_tree():
    assert tree_settings.best(1 + 3 + 9, 2, 3).num_children == (3, 3, 3, 3) + (0,) * 9


@pytest.mark.parametrize("size", [1, 14])
def test_a_budget_no_tree_can_fill_is_refused(size):
    with pytest.raises(ValueError, match=f"tree_size={size} must be 2 to 13"):
        tree_settings.best(size, 2, 3)

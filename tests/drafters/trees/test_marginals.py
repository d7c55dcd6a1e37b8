"""Drafts of one pass, with one distribution a depth, against all possible paths."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec.core import static_trees
from jspec.drafters.trees import expand, marginals, tree_settings
from jspec.drafters.trees.drawing import Drawing, chain
from jspec.drafters.trees.tree_settings import BestFirst
from tests.drafters.trees.test_expand import BUSH, history, paths, request

B, K, V = 6, 3, 5
LOGITS = np.random.default_rng(2).normal(0, 2, (B, K, V)).astype(np.float32)


@functools.partial(jax.jit, static_argnames=("tree", "method", "noise", "stepwise"))
def grow(asked, logits, tree, method="probabilistic", noise="own", ids=None, stepwise=False):
    vocab = V if ids is None else 20
    drawing = Drawing(asked, history(len(logits)), method, noise, vocab, ids)
    if not stepwise:
        return marginals.grow(drawing, tree, logits)

    def feed(frontier, drafted, parents, depth, slot):
        del drafted, parents, slot
        return frontier, jax.lax.dynamic_slice_in_dim(logits, depth, 1, 1)

    if max(tree.widths) == 1:
        return chain(drawing, tree.max_depth, logits[:, :1], feed, ())[0]
    return expand.ranked(drawing, tree, logits[:, :1], feed, ())


@pytest.mark.parametrize("noise", ["own", "target"])
@pytest.mark.parametrize("tree", [tree_settings.requested("chain", K), BUSH], ids=["chain", "tree"])
def test_a_draft_equals_that_of_a_head_that_expands_depth_by_depth(tree, noise):
    asked = request(B, jnp.array([0.0, 1.0, 0.7, 1.3, 0.0, 0.5]), top_k=4)
    ids = jnp.array([1, 4, 9, 16, 19], jnp.int32)
    once, stepwise = (
        jax.device_get(grow(asked, LOGITS, tree, noise=noise, ids=ids, stepwise=which))
        for which in (False, True)
    )
    assert (once.logits is None) == (noise == "target")
    for one, other in zip(jax.tree.leaves(once), jax.tree.leaves(stepwise), strict=True):
        np.testing.assert_array_equal(one, other)


def slow_best_first(rows, count):
    """Return the ``count`` likeliest of all paths of at most K tokens."""
    log_probs = np.asarray(jax.nn.log_softmax(rows, -1), np.float64)
    scores = {
        path: sum(log_probs[depth, token] for depth, token in enumerate(path))
        for length in range(1, K + 1)
        for path in itertools.product(range(V), repeat=length)
    }
    return set(sorted(scores, key=lambda path: -scores[path])[:count])


@pytest.mark.parametrize("size", [2, 13, 156])
def test_the_best_first_tree_holds_the_likeliest_of_all_paths(size):
    assert tree_settings.full(K, V) == 156
    draft = jax.device_get(grow(request(B, 0.0), LOGITS, BestFirst(size, K), "greedy"))
    assert draft.logits is None and draft.valid.all() and draft.max_depth == K
    for row in range(B):
        grown = list(paths(draft, row).values())[1:]
        assert len(grown) == size - 1
        assert set(grown) == slow_best_first(LOGITS[row], size - 1)
        assert (draft.parents[row] < np.arange(size)).all()


def test_ties_between_paths_go_to_the_shallower_one():
    certain = jnp.where(jnp.arange(V) == 2, 0.0, -1e9)
    draft = grow(request(1, 0.0), jnp.broadcast_to(certain, (1, K, V)), BestFirst(4, K), "greedy")
    assert draft.tokens[0].tolist() == [3, 2, 2, 2]
    assert draft.parents[0].tolist() == [-1, 0, 1, 2]


def test_paths_of_probability_0_are_no_nodes_of_a_best_first_tree():
    two = jnp.where(jnp.arange(V) < 2, 0.0, -jnp.inf)
    ids = jnp.array([3, 5, 7, 11, 13], jnp.int32)
    logits = jnp.broadcast_to(two, (1, 2, V))
    draft = jax.device_get(grow(request(1, 0.0), logits, BestFirst(10, 2), "greedy", ids=ids))
    assert draft.valid[0].sum() == 1 + 2 + 4
    assert draft.valid[0][draft.parents[0, 1:]].all()
    assert set(draft.tokens[0, 1:][draft.valid[0, 1:]]) == {3, 5}
    assert (draft.tokens[0][~draft.valid[0]] == 0).all()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (dict(tree_top_k=2), "tree_top_k is not used by tree='best_first'"),
        (dict(tree_size=1), "tree_size=1 must be at least 2"),
    ],
)
def test_impossible_budgets_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        tree_settings.requested("best_first", 3, **settings)


def test_a_tree_that_drops_nodes_for_their_values_is_greedy():
    tree = tree_settings.requested("best_first", 3)
    assert tree == BestFirst(16, 3)
    assert tree_settings.drawn_by("best_first", tree, None) == "greedy"
    assert tree_settings.proposal(tree, "greedy") == "deterministic"
    with pytest.raises(ValueError, match="not exact for tree='best_first'"):
        tree_settings.drawn_by("best_first", tree, "probabilistic")
    assert isinstance(static_trees.from_choices([(0,)]), tree_settings.DraftTree)

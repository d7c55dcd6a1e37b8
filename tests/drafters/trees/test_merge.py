"""Combined drafts, against sets of paths in plain Python."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec.core import trees
from jspec.core.types import Draft
from jspec.drafters.trees import merge

VOCAB = 3


def random_draft(rng, size, depth):
    """Return a random tree of distinct siblings, some of them not valid: (draft, valid paths)."""
    paths, parents, tokens, valid = [()], [-1], [7], [True]
    while len(paths) < size:
        parent = int(rng.integers(len(paths)))
        token = int(rng.integers(VOCAB))
        path = (*paths[parent], token)
        fits = len(path) <= depth and valid[parent] and path not in paths
        keeps = fits and rng.random() < 0.9
        paths.append(path if keeps else (*path, len(paths) + 100))
        parents.append(parent if keeps else 0)
        tokens.append(token if keeps else 0)
        valid.append(keeps)
    draft = Draft(*(np.array([x]) for x in (tokens, parents, valid)), max_depth=depth)
    return draft, {path for path, exists in zip(paths, valid, strict=True) if exists}


def paths_of(draft, row=0):
    """Return the valid paths of a draft, in the order of its nodes."""
    paths = {0: ()}
    for node in range(1, draft.tokens.shape[1]):
        if draft.valid[row, node]:
            parent = int(draft.parents[row, node])
            assert parent < node and parent in paths
            paths[node] = (*paths[parent], int(draft.tokens[row, node]))
    return list(paths.values())


def stacked(drafts):
    parts = [
        np.concatenate([getattr(draft, name) for draft in drafts])
        for name in ("tokens", "parents", "valid")
    ]
    return Draft(*map(jnp.asarray, parts), max_depth=drafts[0].max_depth)


def graft(stock, scion):
    """Combine two drafts in one program; their parents stay static."""
    return jax.jit(lambda: merge.graft(stock, scion))()


def test_a_graft_holds_the_paths_of_both_once_those_of_the_stock_first():
    rng = np.random.default_rng(0)
    for sizes in ((6, 6), (9, 3), (1, 5), (5, 1)):
        pairs = [
            (random_draft(rng, sizes[0], 4), random_draft(rng, sizes[1], 3)) for _ in range(40)
        ]
        stock = stacked([stock for (stock, _), _ in pairs])
        scion = stacked([scion for _, (scion, _) in pairs])
        whole = graft(stock, scion)
        assert whole.tokens.shape[1] == sum(sizes) - 1
        assert whole.max_depth == 4 and whole.logits is None and whole.sampled is None
        for row, ((_, stock_paths), (_, added)) in enumerate(pairs):
            merged = paths_of(whole, row)
            assert len(merged) == len(set(merged)) and set(merged) == stock_paths | added
            assert set(merged[: len(stock_paths)]) == stock_paths


def chain(tokens, logits=None, length=None):
    tokens = np.array([[7, *tokens]], np.int32)
    valid = np.arange(tokens.shape[1]) <= (tokens.shape[1] if length is None else length)
    depth = tokens.shape[1] - 1
    return Draft(tokens, trees.chain(depth), valid[None], logits, max_depth=depth)


def test_a_continuation_branches_off_a_drawn_chain_where_the_two_differ():
    drawn = chain([1, 2, 0], jnp.zeros((1, 4, VOCAB)))
    whole = graft(drawn, chain([1, 0, 2, 1]))
    assert paths_of(whole) == [
        (), (1,), (1, 2), (1, 2, 0), (1, 0), (1, 0, 2), (1, 0, 2, 1)
    ]  # fmt: skip
    np.testing.assert_array_equal(whole.sampled[0], [1, 1, 1, 1, 0, 0, 0, 0])
    assert whole.max_depth == 4


@pytest.mark.parametrize("looked_up", [[1, 2, 0], [1, 2], []])
def test_a_continuation_that_was_drawn_too_adds_no_node(looked_up):
    whole = graft(chain([1, 2, 0]), chain(looked_up))
    assert paths_of(whole) == [(), (1,), (1, 2), (1, 2, 0)]


def test_each_row_has_the_draft_that_was_chosen_for_it():
    first = chain([1, 2, 0, 1])
    second = chain([2, 2], jnp.arange(9.0).reshape(1, 3, VOCAB), length=1)
    two = lambda draft: Draft(
        np.repeat(draft.tokens, 2, 0),
        draft.parents,
        np.repeat(draft.valid, 2, 0),
        None if draft.logits is None else jnp.repeat(draft.logits, 2, 0),
        max_depth=draft.max_depth,
    )
    chosen = merge.choose(two(first), two(second), jnp.array([True, False]))
    np.testing.assert_array_equal(chosen.parents, trees.chain(4))  # static when tracing
    assert isinstance(chosen.parents, np.ndarray)
    known = chosen.replace(parents=np.tile(chosen.parents, (2, 1)))
    assert paths_of(known, 0) == [(), (1,), (1, 2), (1, 2, 0), (1, 2, 0, 1)]
    assert paths_of(known, 1) == [(), (2,)]
    np.testing.assert_array_equal(chosen.sampled, [[0] * 5, [1, 1, 0, 0, 0]])
    np.testing.assert_array_equal(chosen.logits[1, :3], second.logits[0])
    assert chosen.logits.shape == (2, 5, VOCAB)


def test_a_tree_and_a_chain_give_parents_for_each_row():
    tree, _ = random_draft(np.random.default_rng(1), 6, 3)
    chosen = merge.choose(chain([1, 2]), tree, jnp.array([False]))
    assert set(paths_of(chosen)) == set(paths_of(tree))
    chosen = merge.choose(chain([1, 2]), tree, jnp.array([True]))
    assert paths_of(chosen) == [(), (1,), (1, 2)]

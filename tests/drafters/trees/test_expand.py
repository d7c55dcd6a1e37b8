"""Trees grown by a head whose logits depend on the whole path, against slow references."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec.core import sampling, static_trees
from jspec.core.types import History, Request
from jspec.drafters.trees import expand, tree_settings
from jspec.drafters.trees.drawing import Drawing, chain
from jspec.drafters.trees.tree_settings import Dynamic
from tests import fakes

V, STATES, B = 12, 97, 5
TABLE = np.asarray(fakes.table(3, STATES, V, scale=2.0))
BUSH = static_trees.from_choices([(0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (0, 0, 0), (0, 1, 0)])


def state_after(state, token):
    """Return the state of a path after ``token``."""
    return (state * 31 + token + 7) % STATES


def feed(states, drafted, parents, depth, slot):
    """A head whose frontier [B, F] holds the state of each path."""
    above = states[:, parents] if parents.ndim == 1 else jnp.take_along_axis(states, parents, 1)
    states = state_after(above, drafted)
    return states, jnp.asarray(TABLE)[states]


def constant(logits):
    """Return a head whose logits do not depend on the drafted tokens."""
    return lambda frontier, *_: (frontier, logits)


def history(batch, length=4):
    tokens = jnp.tile(jnp.arange(8, dtype=jnp.int32), (batch, 1))
    return History(tokens, jnp.full((batch,), length, jnp.int32))  # the root is token length - 1


def request(batch, temperature, **filters):
    keys = jax.random.split(jax.random.key(7), batch)
    stops = jnp.full((batch, 1), -1, jnp.int32)
    return Request(keys, fakes.settings(batch, temperature, **filters), stops, stops[:, 0] + 100)


@functools.partial(jax.jit, static_argnames=("tree", "method", "noise"))
def grow(request, starts, tree, method="greedy", noise="own", draft_to_target=None, length=4):
    """Return a draft for each row, whose root has the state ``starts`` [B]."""
    batch = starts.shape[0]
    drawing = Drawing(request, history(batch, length), method, noise, V, draft_to_target)
    logits = jnp.asarray(TABLE)[starts][:, None]
    if isinstance(tree, Dynamic):
        frontier = jnp.repeat(starts[:, None], tree.top_k, 1)
        return expand.dynamic(drawing, tree, logits, feed, frontier, False)
    if max(tree.widths) == 1:
        return chain(drawing, tree.max_depth, logits, feed, starts[:, None])[0]
    return expand.ranked(drawing, tree, logits, feed, starts[:, None])


def log_softmax(logits):
    shifted = logits - logits.max()
    return shifted - np.log(np.exp(shifted).sum())


def paths(draft, row):
    """Return the tokens above every valid node of a row, without the root."""
    parents = np.broadcast_to(draft.parents, draft.tokens.shape)[row]
    row_paths = {0: ()}
    for node in range(1, len(parents)):
        if draft.valid[row, node]:
            row_paths[node] = (*row_paths[parents[node]], int(draft.tokens[row, node]))
    return row_paths


def state_of(start, path):
    for token in path:
        start = state_after(start, token)
    return start


# ------------------------------------------------------------------------------------------ EAGLE-2


def slow_dynamic(start, size, depth, top_k):
    """Return the paths of EAGLE-2's tree in plain Python, by its description."""
    likeliest = lambda scores: sorted(range(len(scores)), key=lambda i: (-scores[i], i))
    log_probs = log_softmax(TABLE[start])
    looked_at = [((token,), log_probs[token]) for token in likeliest(log_probs)[:top_k]]
    frontier = list(looked_at)
    for _ in range(depth - 1):
        children = []
        for path, score in frontier:
            log_probs = log_softmax(TABLE[state_of(start, path)])
            children += [
                ((*path, token), score + log_probs[token]) for token in likeliest(log_probs)[:top_k]
            ]
        looked_at += children
        frontier = [children[i] for i in likeliest([score for _, score in children])[:top_k]]
    best = likeliest([score for _, score in looked_at])[: size - 1]
    return [looked_at[i][0] for i in sorted(best)]


@pytest.mark.parametrize(
    ("size", "depth", "top_k"), [(2, 1, 1), (5, 4, 1), (4, 1, 5), (9, 3, 3), (22, 3, 3), (40, 5, 4)]
)
def test_a_dynamic_tree_is_what_the_slow_expansion_and_reranking_give(size, depth, top_k):
    starts = jnp.arange(40) * 2
    draft = jax.device_get(grow(request(40, 0.0), starts, Dynamic(size, depth, top_k)))
    assert draft.logits is None and draft.valid.all() and draft.max_depth == depth
    for row, start in enumerate(starts):
        expected = slow_dynamic(int(start), size, depth, top_k)
        assert list(paths(draft, row).values())[1:] == expected
        assert (draft.parents[row] < np.arange(size)).all()


def test_ties_in_confidence_keep_the_nodes_that_were_expanded_first():
    flat = constant(jnp.zeros((1, 3, V)))
    drawing = Drawing(request(1, 0.0), history(1), "greedy", "own", V)
    grown = lambda logits: expand.dynamic(drawing, Dynamic(8, 3, 3), logits, flat, (), False)
    draft = jax.jit(grown)(jnp.zeros((1, 1, V)))
    assert draft.parents[0].tolist() == [-1, 0, 0, 0, 1, 1, 1, 2]
    assert draft.tokens[0].tolist() == [3, 0, 1, 2, 0, 1, 2, 0]


def test_tokens_of_probability_0_are_no_nodes_of_a_dynamic_tree():
    two = jnp.where(jnp.arange(V) < 2, 0.0, -jnp.inf)
    head = constant(jnp.broadcast_to(two, (1, 3, V)))
    drawing = Drawing(request(1, 0.0), history(1), "greedy", "own", V)
    grown = lambda logits: expand.dynamic(drawing, Dynamic(12, 2, 3), logits, head, (), False)
    draft = jax.device_get(jax.jit(grown)(jnp.broadcast_to(two, (1, 1, V))))
    assert draft.valid[0].sum() == 1 + 2 + 4
    assert draft.valid[0][draft.parents[0, 1:]].all()
    assert (draft.tokens[0][~draft.valid[0]] == 0).all()


# ------------------------------------------------------------------------------------- static trees


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_node_of_a_static_tree_is_its_parents_token_of_that_rank(temperature):
    gaps = static_trees.from_choices([(1,), (4,), (1, 2), (4, 0), (4, 3), (4, 3, 1)])
    for tree in (gaps, BUSH, tree_settings.requested("chain", 3)):
        draft = jax.device_get(grow(request(B, temperature), jnp.arange(B), tree))
        assert draft.logits is None and draft.sampled is None and draft.valid.all()
        for row in range(B):
            above = paths(draft, row)
            for node in range(1, tree.size):
                state = state_of(row, above[tree.parents[node]])
                order = np.argsort(-TABLE[state], kind="stable")
                assert above[node][-1] == order[tree.ranks[node]]


def test_greedy_rows_beside_sampled_ones_take_the_likeliest_children():
    temperature = jnp.array([0.0, 1.0, 0.0, 0.7, 0.0])
    alone = jax.device_get(grow(request(B, 0.0), jnp.arange(B), BUSH))
    for method, noise in (
        ("probabilistic", "own"),
        ("top_plus_one", "own"),
        ("probabilistic", "target"),
    ):
        draft = grow(request(B, temperature), jnp.arange(B), BUSH, method, noise)
        draft = jax.device_get(draft)
        greedy = np.asarray(temperature) == 0
        assert (draft.tokens[greedy] == alone.tokens[greedy]).all()
        assert draft.valid[greedy].all()
        if noise == "own":
            assert not draft.sampled[greedy].any() and draft.sampled[~greedy].any(1).all()


@pytest.mark.parametrize("method", ["probabilistic", "top_plus_one"])
def test_the_recorded_distribution_is_the_processed_one_after_each_nodes_path(method):
    asked = request(B, 0.6, top_k=8)
    for tree in (BUSH, tree_settings.requested("chain", 3)):
        draft = jax.device_get(grow(asked, jnp.arange(B), tree, method))
        row_paths = [paths(draft, row) for row in range(B)]
        inner = [node for node in range(tree.size) if tree.widths[node]]
        raw = [[TABLE[state_of(row, row_paths[row][node])] for node in inner] for row in range(B)]
        distribution = jax.jit(sampling.process_logits)(jnp.array(raw), asked.sampling)
        np.testing.assert_allclose(draft.logits[:, inner], distribution, rtol=1e-6)


@pytest.mark.parametrize("method", ["probabilistic", "top_plus_one"])
def test_children_beyond_the_tokens_with_weight_are_invalid_and_so_is_all_below_them(method):
    tree = static_trees.from_choices([(0,), (1,), (2,), (2, 0), (0, 0), (0, 1), (0, 2)])
    draft = jax.device_get(grow(request(B, 1.0, top_k=2), jnp.arange(B), tree, method))
    #                              root  0     1     2      00    01    02     20
    assert (draft.valid == np.array([1, 1, 1, 0, 1, 1, 0, 0], bool)).all()
    assert (draft.tokens[~draft.valid] == 0).all() and not draft.sampled[~draft.valid].any()
    assert (draft.tokens[:, 1] != draft.tokens[:, 2]).all()


def test_a_reduced_vocabulary_is_drafted_in_the_targets_ids():
    ids = jnp.array([1, 2, 3, 5, 8, 13, 21, 34, 55, 89, 90, 96], jnp.int32)
    pair = static_trees.from_choices([(0,), (1,)])
    plain = jax.device_get(grow(request(B, 0.0), jnp.arange(B), pair))
    mapped = grow(request(B, 0.0), jnp.arange(B), pair, draft_to_target=ids)
    assert (np.asarray(mapped.tokens[:, 1:]) == np.asarray(ids)[plain.tokens[:, 1:]]).all()


# -------------------------------------------------------------------------- distributions of draws

ROWS = 20_000
WEIGHTS = np.array([0.5, 0.3, 0.15, 0.05])


@functools.cache
def siblings(method):
    """Return the draft of two nodes at depth 1 with three children each, in many rows."""
    tree = static_trees.from_choices([(0,), (1,), (0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2)])
    distribution = jnp.log(jnp.asarray(WEIGHTS, jnp.float32))
    logits = jnp.broadcast_to(distribution, (ROWS, 1, 4))  # the same for all nodes
    drawing = Drawing(request(ROWS, 1.0), history(ROWS), method, "own", 4)
    run = lambda: expand.ranked(drawing, tree, logits, constant(logits), ())
    return jax.device_get(jax.jit(run)())


def check_distribution(observed, expected):
    """Check counts of outcomes against their probabilities, within five standard deviations."""
    for outcome, chance in expected.items():
        count = (observed == np.array(outcome)).all(-1).sum()
        assert abs(count - ROWS * chance) < 5 * np.sqrt(ROWS * chance) + 1, outcome
    assert sum(expected.values()) == pytest.approx(1)


def successive(order):
    chance, left = 1.0, 1.0
    for token in order:
        chance, left = chance * WEIGHTS[token] / left, left - WEIGHTS[token]
    return chance


def test_siblings_are_successive_draws_without_replacement():
    draft = siblings("probabilistic")
    expected = {order: successive(order) for order in itertools.permutations(range(4), 3)}
    check_distribution(draft.tokens[:, 3:6], expected)
    check_distribution(draft.tokens[:, 6:9], expected)
    assert draft.sampled[:, 1:].all()


def test_draws_of_different_nodes_are_independent():
    draft = siblings("probabilistic")
    once = {(token,): WEIGHTS[token] for token in range(4)}
    for left, right in ((1, 3), (3, 6)):
        pairs = {
            (*a, *b): p * q for (a, p), (b, q) in itertools.product(once.items(), once.items())
        }
        check_distribution(draft.tokens[:, [left, right]], pairs)


def test_top_plus_one_is_the_likeliest_children_and_a_draw_from_the_rest():
    draft = siblings("top_plus_one")
    assert (draft.tokens[:, [1, 3, 4]] == [0, 0, 1]).all()
    assert not draft.sampled[:, [1, 3, 4, 6, 7]].any() and draft.sampled[:, [2, 5, 8]].all()
    check_distribution(draft.tokens[:, [5]], {(2,): 0.75, (3,): 0.25})
    check_distribution(draft.tokens[:, [2]], {(1,): 0.6, (2,): 0.3, (3,): 0.1})
    check_distribution(draft.tokens[:, [5, 8]], {(2, 2): 0.5625, (2, 3): 0.1875, (3, 2): 0.1875,
                                        (3, 3): 0.0625})  # fmt: skip


def test_another_root_position_draws_with_other_noise():
    here, there = (
        grow(request(B, 1.0), jnp.arange(B), BUSH, "probabilistic", length=jnp.int32(length))
        for length in (4, 5)
    )
    assert (here.tokens[:, 1:] == there.tokens[:, 1:]).mean() < 0.5


def test_the_first_children_drawn_with_the_targets_noise_are_the_targets_draws():
    asked = request(B, 1.0)
    draft = jax.device_get(grow(asked, jnp.arange(B), BUSH, "probabilistic", "target"))
    assert draft.logits is None and draft.sampled is None
    row_paths = [paths(draft, row) for row in range(B)]
    first = [node for node in range(1, BUSH.size) if BUSH.ranks[node] == 0]
    above = [BUSH.parents[node] for node in first]
    raw = [[TABLE[state_of(row, row_paths[row][node])] for node in above] for row in range(B)]
    positions = jnp.tile(4 + jnp.array(BUSH.depth)[jnp.array(above)], (B, 1))
    draws = jax.jit(sampling.draw_target)(jnp.array(raw), asked.sampling, asked.keys, positions)
    assert (draft.tokens[:, first] == draws).all()

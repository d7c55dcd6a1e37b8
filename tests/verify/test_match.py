"""Rule ``match`` on trees, by enumeration of all draws of the target."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

from jspec.core import trees
from jspec.core.types import Draft
from jspec.tools.certify.conditionals import context_dependent, context_free, softmax
from jspec.verify import RULES
from jspec.verify.match import follow
from jspec.verify.nodes import take

V, NUM_NODES, DEPTH = 3, 7, 3
EXACT = 1e-12
P = [0.5, 0.3, 0.2]


@jax.jit
def walk(parents, tokens, valid, draws):
    """Return path and num_accepted of ``match`` on [B, N] trees."""
    tree = trees.from_parents(parents, DEPTH)
    draft = Draft(tokens, parents, valid, max_depth=DEPTH)
    processed = jnp.zeros((*tokens.shape, V))
    return RULES["match"].walk(processed, draft, tree, draws, "deterministic")[:2]


@jax.jit
def walk_by_follow(parents, tokens, valid, draws):
    """Return what ``walk`` returns, by ``follow``."""
    draft = Draft(tokens, parents, valid, max_depth=DEPTH)
    return follow(lambda node: take(draws, node), draft, trees.from_parents(parents, DEPTH))[:2]


def tree_distribution(parents, tokens, conditionals, valid=None, walk=walk):
    """Return the exact distribution of DEPTH + 1 tokens, the target's, and P(0..DEPTH accepted).

    Noise belongs to positions, so nodes with equal paths share their draw.
    """
    parents, tokens = (np.pad(x, (0, NUM_NODES - len(x))) for x in (parents, tokens))
    used = np.arange(NUM_NODES) < (NUM_NODES if valid is None else len(valid))
    valid = used if valid is None else np.pad(valid, (0, NUM_NODES - len(valid)))
    prefixes = [()]
    for node in range(1, NUM_NODES):
        prefixes.append((*prefixes[max(parents[node], 0)], int(tokens[node])))
    contexts = sorted(set(prefixes))
    number = lambda prefix: sum(token * V**i for i, token in enumerate(reversed(prefix)))
    distributions = np.stack(
        [softmax(conditionals[len(prefix)][number(prefix)]) for prefix in contexts]
    )
    choices = np.array(list(itertools.product(range(V), repeat=len(contexts))))
    weights = distributions[np.arange(len(contexts)), choices].prod(1)
    draws = choices[:, [contexts.index(prefix) for prefix in prefixes]]
    tile = lambda x: jnp.asarray(np.broadcast_to(x, draws.shape))
    path, num_accepted = walk(
        tile(parents), tile(tokens).astype(jnp.int32), tile(valid), jnp.asarray(draws, jnp.int32)
    )
    path, num_accepted = np.asarray(path), np.asarray(num_accepted)
    ends = path[np.arange(len(path)), num_accepted]
    emitted = draws[np.arange(len(draws)), ends]
    distribution = np.zeros(1)
    for count, rows in enumerate(conditionals):
        here = np.zeros((V**count, V))
        for node in np.flatnonzero(np.array([len(prefix) for prefix in prefixes]) == count):
            mass = weights * (ends == node) * (num_accepted == count)
            here[number(prefixes[node])] += np.bincount(emitted, mass, minlength=V)
        distribution = (distribution[:, None] * softmax(rows)).ravel() * (count > 0) + here.ravel()
    exact = np.ones(1)
    for rows in conditionals:
        exact = (exact[:, None] * softmax(rows)).ravel()
    return distribution, exact, np.bincount(num_accepted, weights, minlength=DEPTH + 1)


def random_tree(rng, distinct=True):
    """Return parents and tokens of a random tree; siblings hold distinct tokens."""
    parents, tokens, depth = [-1], [0], [0]
    while len(parents) < NUM_NODES:
        up, token = int(rng.integers(0, len(parents))), int(rng.integers(0, V))
        taken = {tokens[node] for node in range(1, len(parents)) if parents[node] == up}
        if depth[up] < DEPTH and not (distinct and token in taken):
            parents.append(up)
            tokens.append(token)
            depth.append(depth[up] + 1)
    return np.array(parents), np.array(tokens)


@pytest.mark.parametrize("walk", [walk, walk_by_follow])
@pytest.mark.parametrize("seed", range(6))
def test_any_tree_gives_the_targets_distribution(seed, walk):
    rng = np.random.default_rng(seed)
    distribution, exact, _ = tree_distribution(
        *random_tree(rng), context_dependent(seed, V, DEPTH + 1), walk=walk
    )
    assert 0.5 * np.abs(distribution - exact).sum() < EXACT


@pytest.mark.parametrize("seed", range(3))
def test_every_node_is_accepted_with_the_target_probability_of_its_path(seed):
    # No rule can accept a path more often, so this is the best rule for deterministic drafts.
    parents, tokens = random_tree(np.random.default_rng(seed))
    conditionals = context_dependent(seed, V, DEPTH + 1)
    _, _, accepted = tree_distribution(parents, tokens, conditionals)
    chance, prefix, depth = [1.0], [0], [0]
    for node in range(1, NUM_NODES):
        up, token = parents[node], tokens[node]
        chance.append(chance[up] * softmax(conditionals[depth[up]][prefix[up]])[token])
        prefix.append(prefix[up] * V + int(token))
        depth.append(depth[up] + 1)
    assert max(depth) > 1
    assert accepted @ np.arange(DEPTH + 1) == pytest.approx(sum(chance[1:]), abs=EXACT)


@pytest.mark.parametrize("walk", [walk, walk_by_follow])
@pytest.mark.parametrize("seed", range(3))
def test_siblings_that_repeat_a_token_do_no_harm(seed, walk):
    parents, tokens = random_tree(np.random.default_rng(seed), distinct=False)
    distribution, exact, _ = tree_distribution(
        parents, tokens, context_dependent(seed, V, DEPTH + 1), walk=walk
    )
    assert 0.5 * np.abs(distribution - exact).sum() < EXACT


@pytest.mark.parametrize("seed", range(6))
def test_draws_made_on_the_way_give_the_path_of_draws_after_all_nodes(seed):
    rng, batch = np.random.default_rng(seed), 50
    rows = [random_tree(rng, distinct=False) for _ in range(batch)]
    parents, tokens = (np.stack(part).astype(np.int32) for part in zip(*rows, strict=True))
    valid = rng.random(tokens.shape) < 0.9
    draws = np.empty_like(tokens)
    for row in range(batch):
        prefixes, drawn = [()], {}
        for node in range(1, NUM_NODES):
            prefixes.append((*prefixes[parents[row, node]], tokens[row, node]))
        for node, prefix in enumerate(prefixes):  # equal paths share their draw
            draws[row, node] = drawn.setdefault(prefix, rng.integers(-1, V))  # -1: no token at all
    parents, tokens, valid, draws = map(jnp.asarray, (parents, tokens, valid, draws))
    path, num_accepted = walk(parents, tokens, valid, draws)
    draft = Draft(tokens, parents, valid, max_depth=DEPTH)
    shape = trees.from_parents(parents, DEPTH)
    followed, length, token = follow(lambda node: take(draws, node), draft, shape)
    np.testing.assert_array_equal(length, num_accepted)
    assert len(np.unique(length)) > 2
    texts = lambda path: [
        np.asarray(tokens[row])[np.asarray(path)[row, : length[row] + 1]].tolist()
        for row in range(batch)
    ]
    assert texts(followed) == texts(path)  # either one of equal siblings
    np.testing.assert_array_equal(token, take(draws, take(path, num_accepted)))


def test_nodes_that_are_not_valid_are_never_accepted():
    parents, tokens = np.array([-1, 0, 0, 1, 1, 2, 2]), np.array([0, 0, 1, 0, 1, 0, 1])
    conditionals = context_dependent(0, V, DEPTH + 1)
    valid = np.array([True, True, False, True, False, False, False])
    distribution, exact, accepted = tree_distribution(parents, tokens, conditionals, valid)
    chain = softmax(conditionals[0])[0, 0] * softmax(conditionals[1])[0, 0]
    assert 0.5 * np.abs(distribution - exact).sum() < EXACT
    np.testing.assert_allclose(accepted[2], chain)


def test_golden_acceptance_of_a_two_by_two_tree():
    parents, tokens = np.array([-1, 0, 0, 1, 1, 2, 2]), np.array([0, 1, 2, 1, 2, 1, 2])
    distribution, exact, accepted = tree_distribution(parents, tokens, context_free(P, DEPTH + 1))
    assert 0.5 * np.abs(distribution - exact).sum() < EXACT
    assert accepted @ np.arange(DEPTH + 1) == pytest.approx(0.75, abs=EXACT)


def test_a_chain_is_accepted_as_far_as_the_target_agrees():
    parents, tokens = trees.chain(3), np.array([0, 1, 1, 1])
    _, _, accepted = tree_distribution(
        parents, tokens, context_free(P, DEPTH + 1), np.ones(4, bool)
    )
    np.testing.assert_allclose(accepted, [0.7, 0.21, 0.063, 0.027], atol=EXACT)


def test_the_next_logits_are_the_targets_at_the_end_of_the_path():
    rng = np.random.default_rng(0)
    parents, tokens = (jnp.array([x], jnp.int32) for x in random_tree(rng))
    processed = jnp.array(rng.normal(size=(1, NUM_NODES, V)), jnp.float32)
    shape = trees.from_parents(parents, DEPTH)
    draws = jnp.array(rng.integers(0, V, (1, NUM_NODES)), jnp.int32).at[0, 0].set(tokens[0, 1])
    draft = Draft(tokens, parents, tokens == tokens, max_depth=DEPTH)
    path, num_accepted, logits = RULES["match"].walk(
        processed, draft, shape, draws, "deterministic"
    )
    assert num_accepted[0] > 0
    np.testing.assert_array_equal(logits[0], processed[0, path[0, num_accepted[0]]])


@pytest.mark.parametrize("axis", ["data", "tensor"])
def test_devices_with_rows_of_their_own_ask_no_other_whether_it_is_done(axis):
    mesh = AbstractMesh((2,), (axis,), axis_types=(AxisType.Auto,))
    sharding = NamedSharding(mesh, PartitionSpec())
    array = lambda dtype: jax.ShapeDtypeStruct((4, NUM_NODES), dtype, sharding=sharding)
    whole = array(jnp.int32)
    traced = str(walk_by_follow.trace(whole, whole, array(bool), whole).jaxpr)
    assert (" while[" in traced) == (axis == "tensor")  # there, each device has all rows
    assert (" scan[" in traced) == (axis == "data")

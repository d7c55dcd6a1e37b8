"""The gated delta rule over trees, prompts and lists of nodes equals transformers' rule."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec.core import kv_cache, trees
from jspec.core.entries import Commit
from jspec.core.packing import packing_of
from jspec.models.blocks.block import Pass
from jspec.models.blocks.delta_rule import DeltaRule
from jspec.models.blocks.delta_state import DeltaState, carried, convolved, outputs
from jspec.models.blocks.recur import recurrence_over

torch = pytest.importorskip("torch")
qwen = pytest.importorskip("transformers.models.qwen3_next.modeling_qwen3_next")

HEADS, GROUPS, KEY, VALUE = 4, 2, 16, 12
TREE = np.array([-1, 0, 0, 1, 1, 2, 3, 6, 5, 7])


def values(count, seed=0, gate=0.3, batch=2):
    """Return a state and the values of nodes; ``gate`` scales the logarithms of their decays."""
    rng = np.random.default_rng(seed)
    draw = lambda *shape: rng.standard_normal((batch, *shape)).astype(np.float32)
    state = DeltaState(draw(HEADS, VALUE, KEY), draw(1, 3, 5), GROUPS)
    nodes = dict(
        queries=draw(GROUPS, count, KEY),
        keys=draw(GROUPS, count, KEY),
        values=draw(HEADS, count, VALUE),
        decays=-gate * np.log1p(np.exp(draw(HEADS, count))),
        rates=1 / (1 + np.exp(-draw(HEADS, count))),
    )
    return state, nodes


def sequential(state, nodes, row, path):
    """Return transformers' outputs [R, H, Dv] along a path, and the state behind it, in float64."""
    along = lambda name: torch.tensor(nodes[name][row][:, path].swapaxes(0, 1)[None])
    one = lambda name: along(name)[..., 0] if along(name).ndim == 4 else along(name)
    out, end = qwen.torch_recurrent_gated_delta_rule(
        along("queries"),
        along("keys"),
        along("values"),
        g=one("decays"),
        beta=one("rates"),
        initial_state=torch.tensor(state.state[row].swapaxes(1, 2))[None],
        output_final_state=True,
        use_qk_l2norm_in_kernel=True,
    )
    return out[0].numpy(), end[0].numpy().swapaxes(1, 2)


def solved(state, nodes, tree):
    """Return outputs, normed keys and updates of nodes."""
    queries, keys = (jnp.asarray(nodes[name]) for name in ("queries", "keys"))
    queries, keys = (x / jnp.linalg.norm(x, axis=-1, keepdims=True) for x in (queries, keys))
    mixed, updates = outputs(
        state,
        pairs=jnp.stack([queries * KEY**-0.5, keys], 3),
        values=nodes["values"],
        decays=nodes["decays"],
        rates=nodes["rates"],
        tree=tree,
    )
    return mixed, keys, updates


def path_to(parents, node):
    path = [node]
    while path[0]:
        path.insert(0, int(parents[path[0]]))
    return path


@pytest.mark.parametrize("gate", [0.0, 0.3, 40.0])
@pytest.mark.parametrize("is_static", [True, False])
def test_a_tree_has_the_outputs_and_states_of_every_path(gate, is_static):
    """Strong decays make exponents of thousands, of which only sums of one sign may be taken."""
    state, nodes = values(len(TREE), gate=gate)
    parents = TREE if is_static else jnp.asarray(np.stack([TREE, TREE]))
    tree = trees.broadcast(trees.from_parents(parents, 6), 2)
    mixed, keys, updates = solved(state, nodes, tree)
    for row in range(2):
        for node in range(len(TREE)):
            path = path_to(TREE, node)
            out, end = sequential(state, nodes, row, path)
            np.testing.assert_allclose(mixed[row, :, node], out[-1], atol=2e-6)
            mine = carried(
                state.state, keys[:, :, path], updates[:, :, path], nodes["decays"][:, :, path]
            )
            np.testing.assert_allclose(mine[row], end, atol=5e-6)


@pytest.mark.parametrize("repeats", [False, True])
@pytest.mark.parametrize("count", [17, 64, 150])
def test_a_prompt_in_chunks_has_the_outputs_of_the_sequential_rule(count, repeats):
    state, nodes = values(count, seed=1, gate=0.0 if repeats else 0.5)
    if repeats:  # One token again and again: powers of the system would overflow.
        nodes = {name: np.repeat(x[:, :, :1], count, 2) for name, x in nodes.items()}
    mixed, keys, updates = solved(state, nodes, trees.chain_tree(2, count))
    for row in range(2):
        out, end = sequential(state, nodes, row, list(range(count)))
        np.testing.assert_allclose(mixed[row].swapaxes(0, 1), out, atol=1e-5)
        mine = carried(state.state, keys, updates, nodes["decays"])
        np.testing.assert_allclose(mine[row], end, atol=1e-5)


def test_the_convolution_runs_along_the_paths_of_a_tree():
    rng = np.random.default_rng(2)
    draw = lambda *shape: rng.standard_normal(shape).astype(np.float32)
    inputs, past, kernel = draw(1, 2, len(TREE), 5), draw(1, 2, 3, 5), draw(2, 4, 5)
    for parents in (TREE, jnp.asarray(TREE[None])):
        tree = trees.broadcast(trees.from_parents(parents, 6), 1)
        got = convolved(inputs, past, kernel, tree)
        for node in range(len(TREE)):
            rows = np.concatenate([past, inputs[:, :, path_to(TREE, node)]], 2)[0, :, -4:]
            np.testing.assert_allclose(got[0, :, node], (rows * kernel).sum(1), atol=1e-5)


MIXER = DeltaRule(HEADS, GROUPS, KEY, VALUE, by_key_heads=True)


def run(tokens, cache, parents, packing=None, depth=6):
    """Return the outputs of the mixer, and the values of the nodes."""
    params = weights()
    tree, new = trees.broadcast(trees.from_parents(parents, depth), len(tokens)), [None]
    x = jnp.asarray(tokens) if packing is None else packing.pack(jnp.asarray(tokens))
    part = Pass(None, {}, None, packing=packing, recur=recurrence_over(cache, tree, new))
    mixed = MIXER.mix(params, x, part, 0)
    return (mixed if packing is None else packing.unpack(mixed)), new[0]


def weights():
    params = MIXER.init(jax.random.split(jax.random.key(0)), 24, jnp.float32)
    return jax.tree.map(lambda x: x * 10 if x.ndim > 1 else x, params)


def cache_of(batch):
    return kv_cache.empty(batch, [MIXER.entry(batch, 8, jnp.float32)])


def test_a_list_of_the_valid_nodes_of_all_rows_has_the_outputs_of_whole_trees():
    rng = np.random.default_rng(4)
    x = rng.standard_normal((3, len(TREE), 24)).astype(np.float32)
    listed = np.zeros((3, len(TREE)), bool)
    listed[0], listed[1, :4] = True, True  # The third row lists nothing.
    packing = packing_of(jnp.asarray(listed), (16,))
    x[~listed] = np.nan  # Entries of nodes that are not listed repeat another row's.
    whole, nodes = run(np.nan_to_num(x), cache_of(3), TREE)
    packed, packed_nodes = run(x, cache_of(3), TREE, packing)
    np.testing.assert_allclose(packed[listed], whole[listed], atol=1e-6)
    for one, other in zip(*map(jax.tree.leaves, (packed_nodes, nodes)), strict=True):
        one, other = (np.moveaxis(part, 1, -1) for part in (one, other))
        np.testing.assert_allclose(one[listed], other[listed], atol=1e-6)
        assert not np.isnan(one).any()


def test_committed_paths_leave_the_state_of_a_text_that_was_read_in_order():
    """One tree commits a path of its nodes; a chain over the same inputs commits all of them."""
    rng = np.random.default_rng(5)
    x = rng.standard_normal((2, len(TREE), 24)).astype(np.float32)
    cache = cache_of(2)
    path = np.array([path_to(TREE, 9)] * 2)
    count = jnp.array([path.shape[1], 3])
    for _ in range(2):  # twice: the second one begins behind the first
        _, nodes = run(x, cache, TREE)
        ahead = kv_cache.append(cache, (nodes,), jnp.asarray(path), count)
        steps = path.shape[1]
        _, nodes = run(x[:, path[0]], cache, trees.chain(steps - 1), depth=steps - 1)
        order = jnp.broadcast_to(jnp.arange(steps), path.shape)
        plain = kv_cache.append(cache, (nodes,), order, count)
        for one, other in zip(*map(jax.tree.leaves, (ahead, plain)), strict=True):
            np.testing.assert_allclose(one, other, atol=1e-5)
        cache = plain


def test_rows_that_commit_nothing_stay_to_the_bit_whatever_was_computed():
    state, _ = values(1)
    nodes = jax.tree.map(lambda x: jnp.full(x.shape, jnp.nan), state.of_nodes(2, 3))
    after = state.append(nodes, Commit(jnp.zeros((2, 3), jnp.int32), jnp.zeros(2, jnp.int32), None))
    for one, other in zip(*map(jax.tree.leaves, (after, state)), strict=True):
        np.testing.assert_array_equal(one, other)

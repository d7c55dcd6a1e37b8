"""The compiled program draws from the target's distribution: chi-square, 200 thousand rounds.

Wide vocabularies hide small biases, so the vocabulary is small and the drafter the worst there is:
its logits are the target's, negated.
"""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.special
import scipy.stats

from jspec.core import sampling, trees
from jspec.core.types import Draft, History, Params, Request
from jspec.engine.plan import Plan
from jspec.verify import RULES, verify
from tests import shipped
from tests.fakes import TableDrafter, ToyTarget, settings
from tests.verify import statistics

V = 16
BATCH, CHUNKS = 50_000, 4
LOGITS = np.random.default_rng(0).normal(size=V)


@functools.cache
def one_round(rule, depth, temperature):
    """Tokens [rows, K+1] of one round from the first token on, and how many it emitted."""
    row = jnp.array(LOGITS, jnp.float32)
    params = Params(jnp.tile(row, (V, 1)), jnp.tile(-row, (V, 1)))
    plan = Plan(ToyTarget(V), TableDrafter(depth), rule, node_buckets=(depth + 1,))
    sampled = settings(BATCH, temperature)
    return statistics.texts(plan, params, sampled, depth + 1, chunks=CHUNKS, rounds=1)


@pytest.mark.parametrize("temperature", [0.6, 1.0])
@pytest.mark.parametrize("depth", [1, 3])
@pytest.mark.parametrize("rule", ["rejection", "block"])
def test_every_position_that_a_round_reaches_has_the_targets_distribution(rule, depth, temperature):
    tokens, length = one_round(rule, depth, temperature)
    distribution = scipy.special.softmax(LOGITS / temperature)
    for position in range(depth + 1):
        reached = tokens[length > position, position]
        if len(reached) > 100:
            assert statistics.excess(np.bincount(reached, minlength=V), distribution) < 1
    accept = np.minimum(distribution, scipy.special.softmax(-LOGITS / temperature)).sum()
    assert accept < 0.5  # adversarial indeed
    if rule == "rejection":
        assert (length > 1).mean() == pytest.approx(accept, abs=0.01)


def test_the_checker_sees_a_bias_of_one_percent():
    distribution = scipy.special.softmax(LOGITS)
    biased = distribution * np.where(np.arange(V) % 2, 1.02, 0.98)
    drawn = np.random.default_rng(1).multinomial(BATCH * CHUNKS, biased / biased.sum())
    assert statistics.distance(biased / biased.sum(), distribution) < 0.011
    assert statistics.excess(drawn, distribution) > 1


def test_golden_acceptance_of_shared_gumbel_noise():
    p, q = np.array([0.5, 0.3, 0.2]), np.array([0.2, 0.5, 0.3])
    ratio = np.maximum(p / p[:, None], q / q[:, None])
    wanted = (1 / ratio.sum(1)).sum()
    assert wanted == pytest.approx(0.693548, abs=1e-6)
    count = 500_000
    keys, positions = jax.random.split(jax.random.key(0), 1), jnp.arange(count)[None]
    draw = jax.jit(sampling.draw_target)
    tile = lambda distribution: jnp.broadcast_to(jnp.log(jnp.array(distribution)), (1, count, 3))
    same = draw(tile(p), settings(1), keys, positions) == draw(
        tile(q), settings(1), keys, positions
    )
    assert same.mean() == pytest.approx(wanted, abs=4 * (wanted * (1 - wanted) / count) ** 0.5)


def test_a_sampled_round_makes_noise_for_the_nodes_of_the_path_only():
    batch, vocab, parents = 3, 1000, np.array([-1, 0, 0, 1, 1, 2, 2], np.int32)
    tree = trees.broadcast(trees.from_parents(parents, 2), batch)
    keys = jax.random.split(jax.random.key(0), batch)

    def judge(sampled, logits, tokens, valid):
        draft = Draft(tokens, parents, valid, max_depth=2)
        history = History(jnp.zeros((batch, 9), jnp.int32), jnp.ones((batch,), jnp.int32))
        request = Request(keys, sampled, jnp.full((batch, 1), -1), jnp.full((batch,), 9))
        return verify(RULES["match"], "deterministic", request, draft, tree, logits, history)

    nodes = lambda dtype: jax.ShapeDtypeStruct((batch, len(parents)), dtype)
    rows = jax.ShapeDtypeStruct((batch, len(parents), vocab), jnp.float32)
    sampled = settings(batch, top_p=0.9)
    arguments = sampled, rows, nodes(jnp.int32), nodes(bool)
    program = shipped.compiled(jax.jit(judge).lower(*arguments)).as_text()
    made = re.findall(rf"= \w+\[{batch},{len(parents)},{vocab}\]\S* ([\w-]+)", program)
    assert re.search(rf"= u32\[{batch},(1,)?{vocab}\]", program)
    assert set(made) <= {"parameter", "get-tuple-element", "bitcast"}  # the logits are handed on


def test_a_traversal_copies_none_of_its_distributions():
    batch, depth, vocab, parents = 3, 2, 1000, np.array([-1, 0, 0, 1, 1, 2, 2], np.int32)
    tree = trees.broadcast(trees.from_parents(parents, depth), batch)
    rows = jax.ShapeDtypeStruct((batch, len(parents), vocab), jnp.float32)
    nodes = lambda dtype: jax.ShapeDtypeStruct((batch, len(parents)), dtype)

    def walk(processed, tokens, valid, logits, uniforms):
        draft = Draft(tokens, parents, valid, logits, max_depth=depth)
        return RULES["block"].walk(processed, draft, tree, uniforms, "without_replacement")

    arguments = rows, nodes(jnp.int32), nodes(bool), rows, nodes(jnp.float32)
    program = shipped.compiled(jax.jit(walk).lower(*arguments)).as_text()
    stack = rf"f32\[{batch},{depth},{vocab}\]\S*"
    assert re.search(rf"= {stack} fusion\(.*scatter", program)  # this is what it is called
    assert not re.search(rf"= {stack} copy\(", program)

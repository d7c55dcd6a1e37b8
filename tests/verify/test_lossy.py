"""The lossy rules accept as documented, and run only where they are named."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec import verify
from jspec.core import trees as core_trees
from jspec.core.types import Draft, Params
from jspec.drafters import NoDrafter
from jspec.engine.functional import SequenceParams
from jspec.engine.plan import Plan
from jspec.tools.certify.conditionals import context_dependent, softmax
from jspec.tools.certify.drawing import Case
from jspec.tools.certify.enumeration import outcome
from jspec.verify import RULES
from tests.fakes import (
    NeverRightDrafter,
    ToyTarget,
    run_rows,
    script,
    table,
)

EXACT = 1e-12
V, DEPTH, NUM_NODES = 5, 3, 9
UNEVEN = (-1, 0, 0, 1, 1, 3)  # its first path is 1, 3, 5


# ----------------------------------------------------------------------------------------- typical


def medusa(logits, parents, tokens, valid, threshold, alpha):
    """Return the end of the path by typical acceptance as in its paper, for one tree."""
    best = (0, 0.0, 0)
    for end in np.flatnonzero(valid):
        depth, score, node, accepted = 0, 0.0, end, True
        while node:
            distribution = softmax(logits[parents[node]])
            entropy = -(distribution * np.log(distribution + 1e-5)).sum()
            p = distribution[tokens[node]]
            accepted &= p > min(threshold, alpha * np.exp(-entropy))
            score, depth, node = score + np.log(p), depth + 1, parents[node]
        if accepted and (depth, score) > best[:2] and end:
            best = (depth, score, int(end))
    return best[2]


def bushes(rng, count):
    """Return random trees [B, N] with distinct siblings, some nodes not valid."""
    grown = [bush(rng) for _ in range(count)]
    return tuple(np.stack(part) for part in zip(*grown, strict=True))


def bush(rng):
    parents, tokens = np.zeros((2, NUM_NODES), np.int32)
    valid, depth, taken = np.ones(NUM_NODES, bool), [0], [set() for _ in range(NUM_NODES)]
    for node in range(1, NUM_NODES):
        ups = [up for up in range(node) if depth[up] < DEPTH and len(taken[up]) < V]
        up = parents[node] = rng.choice(ups)
        tokens[node] = rng.choice(sorted(set(range(V)) - taken[up]))
        taken[up].add(int(tokens[node]))
        depth.append(depth[up] + 1)
        valid[node] = valid[up] and rng.random() < 0.9
    return parents, tokens, valid


@functools.partial(jax.jit, static_argnums=0)
def judge(walk, logits, parents, tokens, valid, uniforms):
    tree = core_trees.from_parents(parents, DEPTH)
    draft = Draft(tokens, parents, valid, max_depth=DEPTH)
    path, num_accepted, distribution = walk(logits, draft, tree, uniforms, "deterministic")
    return jnp.take_along_axis(path, num_accepted[:, None], 1)[:, 0], distribution


def judged(walk, logits, parents, tokens, valid):
    uniforms = np.full(tokens.shape, np.nan)  # never read
    return map(np.asarray, judge(walk, logits, parents, tokens, valid, uniforms))


@pytest.mark.parametrize(("threshold", "alpha"), [(0.09, 0.3), (0.5, 0.2), (1.0, 0.0)])
def test_typical_ends_where_medusas_rule_does(threshold, alpha):
    rng = np.random.default_rng(0)
    trees = bushes(rng, 200)
    logits = 2 * rng.normal(size=(200, NUM_NODES, V)).astype(np.float32)
    end, distribution = judged(verify.typical(threshold, alpha).walk, logits, *trees)
    wanted = [medusa(*row, threshold, alpha) for row in zip(logits, *trees, strict=True)]
    np.testing.assert_array_equal(end, wanted)
    assert len(set(wanted)) > 3
    np.testing.assert_array_equal(distribution, logits[np.arange(200), end])


def test_typical_meets_a_target_without_a_choice_exactly():
    rng = np.random.default_rng(1)
    trees = bushes(rng, 200)
    draws = rng.integers(0, V, (200, NUM_NODES)).astype(np.int32)
    certain = np.where(np.arange(V) == draws[..., None], 0.0, -np.inf).astype(np.float32)
    end, _ = judged(RULES["typical"].walk, certain, *trees)
    exact, _ = judge(RULES["match"].walk, certain, *trees, draws)
    np.testing.assert_array_equal(end, exact)
    assert len(set(exact.tolist())) > 3


def test_typical_changes_the_distribution_and_declares_it():
    case = Case(UNEVEN, "deterministic", context_dependent(0, 3, 4), context_dependent(1, 3, 3))
    assert outcome(RULES["typical"].walk, case).distance > 0.05
    assert not RULES["typical"].lossless


def test_greedy_rows_are_exact_under_typical_even_beside_sampled_ones():
    rows = [
        SequenceParams((1, 2), 12),
        SequenceParams((3,), 12, temperature=1.0),
        SequenceParams((4, 4), 12),
    ]
    params = Params(table(0, V, V))
    plain = run_rows(Plan(ToyTarget(V), NoDrafter()), params, rows)
    plan = Plan(ToyTarget(V), NeverRightDrafter(3, V), "typical", node_buckets=(4,))
    answers = run_rows(plan, params._replace(drafter=script(rows, plain)), rows)
    for index in (0, 2):
        assert answers[index].tokens.tolist() == plain[index].tokens.tolist()


# --------------------------------------------------------------------------------------- synthetic


@functools.cache
def synthetic(**settings):
    case = Case(UNEVEN, "deterministic", context_dependent(0, 3, 4), context_dependent(1, 3, 3))
    return outcome(verify.synthetic(**settings).walk, case)


@pytest.mark.parametrize("rates", [(0.8, 0.6, 0.3), (1.0, 0.5, 0.0), (0.0, 0.0, 0.0)])
def test_drafts_are_accepted_at_the_rates_asked_for(rates):
    result = synthetic(rates=rates)
    at_least = np.cumsum(result.accepted[::-1])[::-1]  # P(accepted >= i)
    np.testing.assert_allclose(at_least, (1, *rates), atol=EXACT)


@pytest.mark.parametrize("length", [1, 1.75, 2.5, 4])
def test_a_length_is_the_mean_of_what_a_round_emits(length):
    result = synthetic(length=length)
    assert result.mean_accepted + 1 == pytest.approx(length, abs=EXACT)
    assert (result.accepted > EXACT).sum() <= 2  # two have the smallest variance


def test_the_token_after_a_synthetic_path_is_the_targets():
    case = Case(UNEVEN, "deterministic", context_dependent(0, 3, 4), context_dependent(1, 3, 3))
    none = outcome(verify.synthetic(rates=(0, 0, 0)).walk, case)
    assert none.distance < EXACT
    assert synthetic(rates=(0.8, 0.6, 0.3)).distance > 0.05


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_synthetic_accepts_what_is_always_wrong_whether_rows_are_greedy_or_not(temperature):
    rows = [SequenceParams((1, 2), 12, temperature=temperature)]
    plain = run_rows(Plan(ToyTarget(V), NoDrafter()), Params(table(0, V, V)), rows)
    params = Params(table(0, V, V), script(rows, plain))
    rule = verify.synthetic(rates=(1, 1, 0))
    (answer,) = run_rows(Plan(ToyTarget(V), NeverRightDrafter(3, V), rule, (4,)), params, rows)
    assert answer.accepted.tolist() == [0, 0, 4, 0]
    if temperature == 0:
        last = np.asarray(table(0, V, V)).argmax(-1)
        tokens = answer.tokens.tolist()
        assert [tokens[i + 2] for i in (0, 3, 6)] == [last[tokens[i + 1]] for i in (0, 3, 6)]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, "requires exactly one of"),
        ({"rates": (1,), "length": 2}, "requires exactly one of"),
        ({"rates": (0.5, 1.5)}, r"entries must be in \[0, 1\], got \[0.5, 1.5\]"),
        ({"rates": (float("nan"),)}, "entries must be in"),
        ({"rates": (0.5, 0.6)}, "must be non-increasing"),
        ({"length": 0.5}, "must be at least 1, got 0.5"),
    ],
)
def test_invalid_rates_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        verify.synthetic(**settings)


def test_lossy_rules_are_listed_as_such_and_are_exact_for_nothing():
    lossy = {name for name, rule in RULES.items() if not rule.lossless}
    assert lossy == {"typical", "synthetic"}
    assert not any(RULES[name].exact_for for name in lossy)

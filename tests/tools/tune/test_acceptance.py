"""Recorded wide drafts predict the rounds of other trees; unmeasured costs are lower bounds."""

import functools

import jax.numpy as jnp
import numpy as np
import pytest

from jspec.core import static_trees
from jspec.core.types import Params
from jspec.drafters import NoDrafter
from jspec.engine.functional import generate_sequences
from jspec.engine.plan import Plan
from jspec.engine.sequences import SequenceParams
from jspec.tools.tune import acceptance, prediction
from jspec.tools.tune.acceptance import Recording, Round
from jspec.tools.tune.costs import Costs, RoundSeconds
from jspec.tools.tune.families import Candidate, chain
from tests import tiny
from tests.fakes import RandomDrafter, ToyTarget, TreeTableDrafter, script, table

P, Q = (0.5, 0.3, 0.2), (0.2, 0.5, 0.3)  # of the golden numbers: every draft is accepted alike
BUSH = static_trees.from_choices([(0,), (1,), (0, 0), (0, 1)])


@functools.cache
def sampled_rounds():
    """Rounds of trees drawn without replacement, under the token rule."""
    rows = [SequenceParams((0,), 400, temperature=1.0, seed=seed) for seed in range(8)]
    distributions = [
        jnp.log(jnp.tile(jnp.array(distribution, jnp.float32), (3, 1))) for distribution in (P, Q)
    ]
    drafter = TreeTableDrafter(BUSH.max_depth, parents=BUSH.parents)
    plan = Plan(ToyTarget(3), drafter)
    answers = generate_sequences(plan, Params(*distributions), rows, profile=tiny.NODES)
    assert not acceptance.by_position(plan, 1.0)
    return [acceptance.rounds_of(answer, BUSH, False) for answer in answers]


def test_acceptance_by_rank_follows_from_the_distributions():
    """The first child is accepted with 1 - TV(p, q), both together as draws without replacement."""
    rounds = sampled_rounds()
    counts = acceptance.count([round_ for some in rounds for round_ in some], BUSH)
    exact = np.array([[0.7, 0.108571], [0.7, 0.108571]])
    assert counts.tried[0, 0] == counts.tried[0, 1] > 1000 and counts.tried[1, 0] > 700
    assert np.abs(counts.chances - exact).max() < 0.04


def test_rounds_of_a_tree_are_predicted_from_those_of_a_wider_one():
    recording = Recording(sampled_rounds(), False)
    lengths = [400] * 8
    for tree, expected in (
        (chain(1), 1.7),
        (chain(2), 1 + 0.7 + 0.49),
        (BUSH, 1 + 0.808571 + 0.7 * 0.808571),
    ):
        passes = prediction.replay(recording, tree, lengths, 4)
        assert passes.tokens_per_pass == pytest.approx(expected, rel=0.03)
        slowest = 400 / expected  # of four rows: a little more than the mean
        assert 2 * slowest < passes.drafted < 2.25 * slowest and passes.plain == 0


def test_passes_are_predicted_exactly_if_the_text_does_not_depend_on_the_draft():
    target, weights = ToyTarget(16), table(0, 16, 16)
    rows = [SequenceParams((seed,), 60, temperature=0.9, seed=seed) for seed in range(4)]
    plain = generate_sequences(Plan(target, NoDrafter()), Params(weights), rows)
    params = Params(weights, script(rows, plain, length=80))
    plan = lambda depth: Plan(target, RandomDrafter(depth, vocab_size=16))
    assert acceptance.by_position(plan(4), 0.9)
    answers = generate_sequences(acceptance.one_by_one(plan(4)), params, rows, profile=tiny.NODES)
    assert [a.tokens.tolist() for a in answers] == [a.tokens.tolist() for a in plain]
    recording = Recording([acceptance.rounds_of(a, chain(4), True) for a in answers], True)
    for depth in (1, 4):
        run = generate_sequences(plan(depth), params, rows)
        passes = prediction.replay(recording, chain(depth), [60] * 4, 2)
        counted, rounds = prediction.counted(run, 2), [answer.rounds for answer in run]
        assert passes.tokens_per_pass == counted.tokens_per_pass == 4 * 60 / sum(rounds) > 1
        total = counted.drafted + counted.plain
        assert passes.drafted + passes.plain == pytest.approx(total)
        ends = [0, 0]  # of the slots
        for count in rounds:
            ends[ends.index(min(ends))] += count
        assert total == pytest.approx(max(ends))
        assert passes.plain <= 2  # the last token of a text is not drafted for


def test_a_path_that_reached_a_leaf_is_continued_at_random():
    rounds = [Round((1,))] * 4000 + [Round(()), Round((), drafted=False)]
    tree = static_trees.from_choices([(0,), (1,), (0, 0), (0, 1), (0, 0, 0), (0, 0, 1)])
    counts = acceptance.Acceptance(
        np.full((3, 2), 10**6), 10**5 * np.array([[5, 2], [6, 3], [5, 1]])
    )
    recording = Recording([rounds], False, counts)
    [longer] = acceptance.extended(recording, tree, np.random.default_rng(0)).prompts
    assert [each.path for each in longer[-2:]] == [(), ()]
    second = np.array([each.path[1] if len(each.path) > 1 else -1 for each in longer[:-2]])
    assert (second == 0).mean() == pytest.approx(0.6, abs=0.03)
    assert (second == 1).mean() == pytest.approx(0.3, abs=0.03)
    assert max(len(each.path) for each in longer) == 3


def test_a_row_starts_where_a_slot_is_free():
    fast, slow = [Round((0, 0))], [Round((), drafted=False)]
    recording = Recording([fast, slow, fast], False)  # 10, 12 and 6 rounds
    replay = lambda num_slots: prediction.replay(recording, chain(2), [30, 12, 18], num_slots)
    assert replay(1) == prediction.Passes(16, 12, 60 / 28)
    assert replay(2) == prediction.Passes(16, 0, 60 / 28)  # the third starts after the first
    assert replay(3) == prediction.Passes(10, 2, 60 / 28)
    with pytest.raises(ValueError, match="no round is left"):
        prediction.replay(Recording([[]], False), chain(2), [30], 1)


def test_unmeasured_rounds_cost_at_least_the_bound():
    costs = Costs([1, 2, 4, 8], [2.0, 2.4, 2.2, 3.0], plain=2.5, call=1.0)
    candidate = lambda depth, size: Candidate(1, "", {}, None, depth, size)
    assert [costs.of_pass(size) for size in (1, 2, 4, 6, 8)] == [2.0, 2.2, 2.2, 2.6, 3.0]
    assert costs.of_round(candidate(7, 8)) == RoundSeconds(3.5, 2.5)  # as if drafting were free
    chain4 = candidate(4, 5)
    costs.measured(chain4, 3.5, drafted=0.5)  # half of the rounds run on one node
    assert costs.of_round(chain4) == RoundSeconds(pytest.approx(3.7), pytest.approx(3.3))
    between = costs.of_round(candidate(2, 8))
    assert between.with_draft == pytest.approx(3.0 + (0.5 + 1.3) / 2)
    assert costs.of_round(candidate(6, 8)).with_draft == pytest.approx(3.0 + 1.3)
    costs.prefill[1] = 0.4
    assert costs.of_call(0) == 1.0 and costs.of_call(1) == pytest.approx(1.4)

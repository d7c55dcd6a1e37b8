"""What is recorded of drafts says what other shapes come to; costs are never guessed high."""

import dataclasses
import functools

import jax.numpy as jnp
import numpy as np
import pytest

from jspec.core import trees
from jspec.core.types import Params
from jspec.drafters import NoDrafter
from jspec.engine.batch import SequenceParams, generate_sequences
from jspec.engine.plan import Plan
from jspec.tools.tune import acceptance, prediction
from jspec.tools.tune.acceptance import Recorded, Round
from jspec.tools.tune.costs import Costs, RoundTime
from jspec.tools.tune.families import chain
from tests.fakes import RandomDrafter, ToyTarget, TreeTableDrafter, script, table

P, Q = (0.5, 0.3, 0.2), (0.2, 0.5, 0.3)  # of the golden numbers: any draft is accepted alike
BUSH = trees.from_choices([(0,), (1,), (0, 0), (0, 1)])


@functools.cache
def drawn_rounds():
    """Rounds of drawn trees without replacement, under the token rule."""
    rows = [SequenceParams((0,), 400, temperature=1.0, seed=seed) for seed in range(8)]
    distributions = [
        jnp.log(jnp.tile(jnp.array(distribution, jnp.float32), (3, 1))) for distribution in (P, Q)
    ]
    drafter = TreeTableDrafter(BUSH.max_depth, parents=BUSH.parents)
    plan = Plan(ToyTarget(3), drafter, record_rounds=512)
    answers = generate_sequences(plan, Params(*distributions), rows)
    assert not acceptance.by_position(plan, 1.0)
    return answers, [acceptance.rounds_of(answer, BUSH, False) for answer in answers]


def test_acceptance_by_rank_is_that_of_the_laws():
    """Of the first child 1 - TV(p, q), of both together what draws without replacement come to."""
    _, rounds = drawn_rounds()
    found = acceptance.count([one for some in rounds for one in some], BUSH)
    low, high = found.interval()
    known = np.array([[0.7, 0.108571], [0.7, 0.108571]])
    assert found.tried[0, 0] == found.tried[0, 1] > 1000 and found.tried[1, 0] > 700
    assert ((low <= known) & (known <= high)).all() and (high - low).max() < 0.1
    assert np.abs(found.chances - known).max() < 0.04


def test_passes_of_a_shape_within_are_predicted_from_the_wider_one():
    """Beside a generation of that shape: chains of one token, from rounds that drafted trees."""
    _, rounds = drawn_rounds()
    recorded = [Recorded(some, False) for some in rounds]
    lengths, groups = [400] * 8, [list(range(4)), list(range(4, 8))]
    for tree, expected in ((chain(1), 1.7), (chain(2), 1 + 0.7 + 0.49), (BUSH, None)):
        passes = prediction.play(recorded, tree, lengths, groups)
        expected = expected or 1 + 0.808571 + 0.7 * 0.808571
        assert passes.tokens_per_pass == pytest.approx(expected, rel=0.03)
        slowest = 400 / expected  # of four rows: a little more than the mean
        assert 2 * slowest < passes.drafted < 2.25 * slowest and passes.plain == 0


def test_where_the_text_is_the_same_whatever_is_drafted_passes_are_predicted_exactly():
    target, weights = ToyTarget(16), table(0, 16, 16)
    rows = [SequenceParams((seed,), 60, temperature=0.9, seed=seed) for seed in range(4)]
    plain = generate_sequences(Plan(target, NoDrafter()), Params(weights), rows)
    params = Params(weights, script(rows, plain, length=80))
    plan = lambda depth: Plan(target, RandomDrafter(depth, vocab_size=16))
    wide = dataclasses.replace(plan(4), record_rounds=64)
    assert acceptance.by_position(wide, 0.9)
    answers = generate_sequences(acceptance.one_by_one(wide), params, rows)
    assert [a.tokens.tolist() for a in answers] == [a.tokens.tolist() for a in plain]
    recorded = [Recorded(acceptance.rounds_of(a, chain(4), True), True) for a in answers]
    for depth in (1, 4):
        run = generate_sequences(plan(depth), params, rows)
        passes = prediction.play(recorded, chain(depth), [60] * 4, [[0, 1], [2, 3]])
        counted = prediction.counted(run, [[0, 1], [2, 3]])
        assert passes.tokens_per_pass == counted.tokens_per_pass > 1
        assert passes.drafted + passes.plain == pytest.approx(counted.drafted + counted.plain)
        assert passes.plain <= 2  # the last token of a text is not drafted for


def test_a_draft_that_was_accepted_whole_is_gone_on_with_by_chance():
    rounds = [Round((0,), is_whole=True)] * 4000 + [Round(()), Round((), drafted=False)]
    chances = np.array([[0.5, 0.2], [0.6, 0.3], [0.5, 0.1]])
    longer = acceptance.extended(Recorded(rounds, False), chances, np.random.default_rng(0)).rounds
    assert [each.path for each in longer[-2:]] == [(), ()]
    second = np.array([each.path[1] if len(each.path) > 1 else -1 for each in longer[:-2]])
    assert (second == 0).mean() == pytest.approx(0.6, abs=0.03)
    assert (second == 1).mean() == pytest.approx(0.3, abs=0.03)
    assert max(len(each.path) for each in longer) == 3


def test_a_group_goes_on_for_as_long_as_its_slowest_row():
    fast, slow = Recorded([Round((0, 0))], False), Recorded([Round((), drafted=False)], False)
    passes = prediction.play([fast, slow], chain(2), [30, 12], [[0, 1]])
    assert passes == prediction.Passes(10, 2, 42 / 22)
    with pytest.raises(ValueError, match="no round is left"):
        prediction.play([Recorded([], False)], chain(2), [30], [[0]])


def test_costs_are_measured_or_the_least_that_they_can_be():
    table = Costs([1, 2, 4, 8], [2.0, 2.4, 2.2, 3.0], plain=2.5, bare=2.5)
    assert [table.of_pass(size) for size in (1, 2, 4, 6, 8)] == [2.0, 2.2, 2.2, 2.6, 3.0]
    assert table.rest(5, 6) == 0.5 == table.rest(3, 8)  # as if drafting were free
    assert table.expected(7, 8) == RoundTime(3.5, 2.5)
    assert table.times(4.0, 1.0, None, 8) == RoundTime(4.0, 3.0)
    assert table.times(3.5, 0.5, None, 8) == RoundTime(4.0, 3.0)
    assert table.times(3.3, 0.5, 2.6, 8) == RoundTime(pytest.approx(4.0), 2.6)
    assert table.times(2.7, 0.01, 2.6, 8) == RoundTime(pytest.approx(3.6), 2.6)
    table.learn(4, 5, RoundTime(table.of_pass(5) + 1.3, 2.6))
    assert table.rest(2, 3) == pytest.approx(0.9) and table.rest(6, 7) == pytest.approx(1.7)
    assert table.rest(2, 8) == pytest.approx(0.9)
    table.learn(4, 8, RoundTime(4.9, 2.6))  # three nodes beside the chain
    assert table.rest(2, 5) == pytest.approx(0.9 + 2 * 0.2)

"""The output distribution of every rule on chains equals the target's, by enumeration."""

import functools

import numpy as np
import pytest

from jspec.tools.certify import enumeration
from jspec.tools.certify.conditionals import context_dependent, context_free, float64
from jspec.tools.certify.drawing import drafts
from jspec.verify import RULES
from tests.fakes import settings
from tests.verify.cases import chain

EXACT = 1e-12
ROUND_RULES = ["rejection", "block"]
ALL_RULES = [*ROUND_RULES, "match"]
P, Q = [0.5, 0.3, 0.2], [0.2, 0.5, 0.3]  # golden numbers

FILTERS = {
    "plain": None,
    "temperature": settings(1, 0.6),
    "top-k": settings(1, 0.8, top_k=2),
    "top-p": settings(1, 1.3, top_p=0.7),
    "min-p, top-k and top-p": settings(1, 0.9, 0.05, 3, 0.9),
    "greedy": settings(2, np.array([0.0, 1.0])),
}


def outcome(rule, case):
    return enumeration.outcome(RULES[rule], case)


@functools.cache
def random_case(depth, vocab_size=4, filters="plain", seed=0):
    return chain(
        context_dependent(seed, vocab_size, depth + 1),
        context_dependent(seed + 1, vocab_size, depth),
        sampling=FILTERS[filters],
    )


# ---------------------------------------------------------------------------------- losslessness


@pytest.mark.parametrize("depth", [0, 1, 2, 3])
@pytest.mark.parametrize("rule", ALL_RULES)
def test_the_output_is_the_targets_for_distributions_that_depend_on_the_context(rule, depth):
    assert outcome(rule, random_case(depth)).distance < EXACT


@pytest.mark.parametrize("filters", FILTERS)
@pytest.mark.parametrize("rule", ALL_RULES)
def test_the_output_is_the_processed_targets(rule, filters):
    result = outcome(rule, random_case(2, filters=filters))
    assert result.distance < EXACT
    if filters == "greedy":
        assert sorted(result.probs)[-1] == 1  # the greedy text


@pytest.mark.parametrize("rule", ALL_RULES)
def test_the_output_is_the_targets_where_only_the_target_has_top_k(rule):
    case = random_case(2)
    second = lambda logits: np.sort(logits, -1)[:, -2:-1]
    cut = [np.where(logits >= second(logits), logits, -np.inf) for logits in case.target]
    assert outcome(rule, chain(cut, case.drafter)).distance < EXACT


@pytest.mark.parametrize("rule", ALL_RULES)
def test_a_vocabulary_of_five_is_as_exact(rule):
    assert outcome(rule, random_case(2, vocab_size=5, seed=7)).distance < EXACT


@pytest.mark.parametrize("length", [0, 1, 2])
@pytest.mark.parametrize("rule", ALL_RULES)
def test_ragged_drafts_are_exact(rule, length):
    case = random_case(3)
    ragged = chain(case.target, case.drafter, keep=lambda drafted: _first(drafted, length))
    result = outcome(rule, ragged)
    assert result.distance < EXACT
    assert result.accepted[length + 1 :].sum() == 0


def _first(drafted, length):
    return np.broadcast_to(np.arange(drafted.shape[1]) < length, drafted.shape)


@pytest.mark.parametrize("rule", ALL_RULES)
def test_drafting_may_stop_early_for_what_it_drafted_before(rule):
    def keep(drafted):
        may = np.ones(drafted.shape, bool)
        may[:, 1:] = np.cumprod(drafted[:, :-1] != 2, 1) > 0  # nothing follows a 2
        return may

    case = random_case(3)
    assert outcome(rule, chain(case.target, case.drafter, keep=keep)).distance < EXACT


@pytest.mark.parametrize("rule", ROUND_RULES)
def test_a_rule_depends_on_a_uniform_only_by_the_side_of_its_threshold(rule):
    case, walk = random_case(2), RULES[rule].walk
    with float64():
        every = drafts(case)
        run = enumeration.runner(walk, case, every)
        limit = enumeration.thresholds(run, case, every)
        uniforms = np.random.default_rng(0).random((len(limit), 8, case.size))
        random = run(uniforms)
        inside = run(enumeration.inside(uniforms[:, :, 1:] < limit[:, None], limit, case))
    for result, expected in zip(random, inside, strict=True):
        np.testing.assert_allclose(result, expected, atol=EXACT)


# ----------------------------------------------------------------------------------------- limits


@pytest.mark.parametrize("rule", ROUND_RULES)
def test_everything_is_accepted_where_draft_and_target_agree(rule):
    same = context_dependent(3, 4, 4)
    result = outcome(rule, chain(same, same[:-1]))
    assert result.distance < EXACT
    np.testing.assert_allclose(result.accepted, [0, 0, 0, 1], atol=EXACT)


@pytest.mark.parametrize("rule", ALL_RULES)
def test_nothing_is_accepted_of_a_draft_that_the_target_excludes(rule):
    case = chain(context_free([0.7, 0.3, 0, 0], 4), context_free([0, 0, 0.4, 0.6], 3))
    result = outcome(rule, case)
    assert result.distance < EXACT
    assert result.accepted[0] == pytest.approx(1, abs=EXACT)


@pytest.mark.parametrize("rule", ALL_RULES)
def test_a_target_without_a_choice_gives_its_only_text(rule):
    case = chain(context_free([0, 1, 0, 0], 3), context_free([0.1, 0.6, 0.1, 0.2], 2))
    result = outcome(rule, case)
    assert result.distance < EXACT
    np.testing.assert_allclose(result.accepted, [0.4, 0.24, 0.36], atol=EXACT)


@pytest.mark.parametrize("rule", ROUND_RULES)
def test_a_draft_without_a_choice_is_accepted_with_its_target_probability(rule):
    result = outcome(rule, chain(context_free(P, 4), context_free([0, 1, 0], 3)))
    assert result.distance < EXACT
    np.testing.assert_allclose(result.accepted, [0.7, 0.21, 0.063, 0.027], atol=EXACT)


# ------------------------------------------------------------------------------- how much is kept


@pytest.mark.parametrize("seed", range(4))
def test_block_accepts_at_least_as_much_as_rejection(seed):
    case = random_case(3, seed=10 * seed)
    block, token = outcome("block", case), outcome("rejection", case)
    assert block.mean_accepted > token.mean_accepted + 1e-3
    at_least = lambda result: np.cumsum(result.accepted[::-1])  # P(accepted >= i), i falling
    assert (at_least(block) >= at_least(token) - EXACT).all()  # at every depth, not only on average


def test_block_gains_nothing_over_rejection_on_certain_drafts():
    rng = np.random.default_rng(0)
    points = [np.where(np.eye(4)[rng.integers(0, 4, 4**i)] > 0, 0.0, -np.inf) for i in range(3)]
    case = chain(context_dependent(5, 4, 4), points)
    block, token = outcome("block", case), outcome("rejection", case)
    np.testing.assert_allclose(block.accepted, token.accepted, atol=EXACT)
    assert max(block.distance, token.distance) < EXACT


def test_certain_drafts_are_accepted_alike_by_match():
    points = context_free([0, 1, 0], 3)
    case = chain(context_free(P, 4), points)
    walk, token = outcome("match", case), outcome("rejection", case)
    np.testing.assert_allclose(walk.accepted, token.accepted, atol=EXACT)


# --------------------------------------------------------------------------------- golden numbers


def test_golden_mean_acceptance_of_three_drafted_tokens():
    case = chain(context_free(P, 4), context_free(Q, 3))
    assert outcome("rejection", case).mean_accepted == pytest.approx(1.533, abs=EXACT)
    assert outcome("block", case).mean_accepted == pytest.approx(1.720, abs=5e-13)


def test_golden_acceptance_of_one_token():
    case = chain(context_free(P, 2), context_free(Q, 1))
    assert outcome("rejection", case).accepted[1] == pytest.approx(0.7, abs=EXACT)
    assert outcome("block", case).accepted[1] == pytest.approx(0.7, abs=EXACT)
    assert outcome("match", case).accepted[1] == pytest.approx(0.31, abs=EXACT)
    argmax_draft = chain(context_free(P, 2), context_free([0, 1, 0], 1))
    assert outcome("match", argmax_draft).accepted[1] == pytest.approx(0.3, abs=EXACT)


def test_the_papers_example_of_block_verification():
    case = chain(context_free([1 / 3, 2 / 3], 3), context_free([2 / 3, 1 / 3], 2))
    token, block = outcome("rejection", case), outcome("block", case)
    assert token.mean_accepted == pytest.approx(10 / 9, abs=EXACT)
    assert block.mean_accepted == pytest.approx(11 / 9, abs=EXACT)
    # h_1 and h_2 of the drafts aa, ab, ba, bb.
    golden = [[0, 0.25], [0, 1], [1, 0.5], [1, 1]]
    np.testing.assert_allclose(block.thresholds, golden, atol=EXACT)


def test_only_rules_that_are_enumerated_here_are_listed():
    walks = {RULES[rule].walk for rule in ALL_RULES}
    assert {rule.walk for rule in RULES.values() if rule.lossless} == walks

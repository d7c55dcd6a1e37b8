"""The output distribution of the rules on trees equals the target's, by enumeration."""

import functools

import numpy as np
import pytest

from jspec.tools.certify.conditionals import context_dependent, context_free, softmax
from jspec.tools.certify.drawing import CHILDREN, DEPTH, Case
from jspec.tools.certify.enumeration import outcome
from jspec.verify import RULES
from tests.verify import cases

EXACT = 1e-12
P, Q = [0.5, 0.3, 0.2], [0.2, 0.5, 0.3]  # golden numbers
TWO, THREE, TWO_BY_TWO = (-1, 0, 0), (-1, 0, 0, 0), (-1, 0, 0, 1, 1, 2, 2)
UNEVEN, CHAIN = (-1, 0, 0, 1, 1, 3), (-1, 0, 1, 2)
ROUND_RULES = ["rejection", "block"]
DRAWN = ["without_replacement", "top_plus_one"]


def outcome_of(rule, parents, proposal, target, drafter, **more):
    return outcome(RULES[rule], Case(parents, proposal, target, drafter, **more))


@functools.cache
def golden(rule, parents, proposal):
    return outcome_of(rule, parents, proposal, context_free(P, DEPTH + 1), context_free(Q, DEPTH))


@functools.cache
def random(rule, parents, proposal, seed=0, vocab_size=3):
    target = context_dependent(seed, vocab_size, DEPTH + 1)
    drafter = context_dependent(seed + 1, vocab_size, DEPTH)
    return outcome_of(rule, parents, proposal, target, drafter)


# ---------------------------------------------------------------------------------- losslessness


@pytest.mark.parametrize("parents", [TWO, TWO_BY_TWO, UNEVEN], ids=["two", "2x2", "uneven"])
@pytest.mark.parametrize("proposal", CHILDREN)
@pytest.mark.parametrize("rule", ROUND_RULES)
def test_trees_give_the_targets_distribution(rule, proposal, parents):
    if proposal == "chain":
        parents = CHAIN
    result = random(rule, parents, proposal)
    assert result.distance < EXACT
    assert result.probs.sum() == pytest.approx(1, abs=EXACT)


@pytest.mark.parametrize("rule", ROUND_RULES)
def test_three_children_are_exact(rule):
    for proposal in ("without_replacement", "top_plus_one", "deterministic_last"):
        result = random(rule, THREE, proposal, vocab_size=4)
        assert result.distance < EXACT
        assert result.accepted[1] < 1  # three children would be all of three tokens


@pytest.mark.parametrize("rule", ROUND_RULES)
def test_deterministic_and_drawn_nodes_may_meet_in_one_tree(rule):
    mixed = (
        "without_replacement",
        "deterministic",
        "top_plus_one",
        "deterministic",
        "deterministic",
        "deterministic",
        "deterministic",
    )
    assert random(rule, TWO_BY_TWO, mixed).distance < EXACT


@pytest.mark.parametrize("proposal", DRAWN)
@pytest.mark.parametrize("rule", ROUND_RULES)
def test_nodes_that_are_not_valid_leave_the_distribution_as_it_is(rule, proposal):
    # A first child without children, and a second one whose first child is missing.
    target, drafter = context_dependent(2, 3, DEPTH + 1), context_dependent(3, 3, DEPTH)
    exists = (True, True, True, False, False, False, True)
    result = outcome_of(rule, TWO_BY_TWO, proposal, target, drafter, exists=exists)
    assert result.distance < EXACT
    assert result.accepted[2] > 0
    assert result.accepted[3] == 0


@pytest.mark.parametrize(
    "proposal", ["without_replacement", "top_plus_one", "deterministic_last", "deterministic"]
)
@pytest.mark.parametrize("rule", ROUND_RULES)
def test_a_reduced_draft_vocabulary_is_exact(rule, proposal):
    target, drafter = context_dependent(4, 4, DEPTH + 1), context_dependent(5, 2, 1)
    drafter += [context_dependent(6 + depth, 2, 1)[0].repeat(4**depth, 0) for depth in (1, 2)]
    result = outcome_of(rule, UNEVEN, proposal, target, drafter, vocabulary=(1, 3))
    assert result.distance < EXACT
    assert result.accepted[0] > 0.05  # the other half of the vocabulary


@pytest.mark.parametrize("rule", ROUND_RULES)
def test_fewer_tokens_than_children_leave_the_rest_of_the_children_out(rule):
    drafter = context_free([0.0, 1.0, 0.0], 1) + context_dependent(1, 3, DEPTH)[1:]
    for proposal in ("without_replacement", "top_plus_one"):
        target = context_dependent(7, 3, DEPTH + 1)
        assert outcome_of(rule, UNEVEN, proposal, target, drafter).distance < EXACT


@pytest.mark.parametrize("proposal", DRAWN)
@pytest.mark.parametrize("rule", ROUND_RULES)
def test_nothing_is_accepted_where_draft_and_target_share_no_token(rule, proposal):
    target = context_free([0.0, 0.0, 1.0], DEPTH + 1)
    result = outcome_of(rule, TWO, proposal, target, context_free([0.4, 0.6, 0.0], DEPTH))
    assert result.distance < EXACT
    assert result.accepted[0] == pytest.approx(1, abs=EXACT)


@pytest.mark.parametrize("proposal", DRAWN)
@pytest.mark.parametrize("rule", ROUND_RULES)
def test_everything_is_accepted_where_draft_and_target_agree(rule, proposal):
    same = context_dependent(8, 3, DEPTH + 1)
    result = outcome_of(rule, UNEVEN, proposal, same, same[:-1])
    assert result.distance < EXACT
    # Drawn children alone: the first is accepted at once, and it leads to the deepest leaf.
    if proposal != "top_plus_one":
        assert result.accepted[3] == pytest.approx(1, abs=EXACT)


@pytest.mark.parametrize("rule", ROUND_RULES)
def test_a_target_without_a_choice_gives_its_only_text(rule):
    target = context_free([0.0, 1.0, 0.0], DEPTH + 1)
    for proposal in (*DRAWN, "deterministic"):
        assert outcome_of(rule, UNEVEN, proposal, target, context_free(Q, DEPTH)).distance < EXACT


# --------------------------------------------------------------------------------- golden numbers


@pytest.mark.parametrize(
    ("proposal", "accepted"),
    [("without_replacement", 0.808571), ("top_plus_one", 0.9), ("deterministic", 0.5)],
)
@pytest.mark.parametrize("rule", ROUND_RULES)
def test_golden_acceptance_of_two_children(rule, proposal, accepted):
    assert golden(rule, TWO, proposal).accepted[1] == pytest.approx(accepted, abs=1e-6)


@pytest.mark.parametrize(("rule", "mean"), [("rejection", 1.462359), ("block", 1.558073)])
def test_golden_acceptance_of_a_two_by_two_tree_drawn_without_replacement(rule, mean):
    result = golden(rule, TWO_BY_TWO, "without_replacement")
    assert result.distance < EXACT
    assert result.mean_accepted == pytest.approx(mean, abs=5e-7)


@pytest.mark.parametrize("rule", ROUND_RULES)
def test_golden_acceptance_of_a_two_by_two_tree_of_the_likeliest(rule):
    assert golden(rule, TWO_BY_TWO, "deterministic").mean_accepted == pytest.approx(0.75, abs=EXACT)


def test_top_plus_one_is_accepted_as_far_as_any_rule_can():
    # p(S) and, of the drawn child, the overlap of p and q outside of S.
    for seed in range(3):
        target, drafter = context_dependent(seed, 3, 4), context_dependent(seed + 9, 3, 3)
        p, q = (softmax(each[0])[0] for each in (target, drafter))
        top = q.argmax()
        rest = np.where(np.arange(3) == top, 0, q) / (1 - q[top])
        best = p[top] + np.minimum(p, rest).sum()
        result = outcome_of("rejection", TWO, "top_plus_one", target, drafter)
        assert result.accepted[1] == pytest.approx(best, abs=EXACT)


# ------------------------------------------------------------------------ rules beside each other


@pytest.mark.parametrize("proposal", DRAWN)
def test_traversal_accepts_at_least_as_much_as_the_walk_down(proposal):
    for parents in (TWO_BY_TWO, UNEVEN):
        whole, down = (random(rule, parents, proposal) for rule in ("block", "rejection"))
        assert whole.mean_accepted > down.mean_accepted + 1e-3


def test_traversal_gains_nothing_over_the_walk_down_on_deterministic_drafts():
    for parents in (TWO_BY_TWO, UNEVEN):
        whole, down = (random(rule, parents, "deterministic") for rule in ("block", "rejection"))
        np.testing.assert_allclose(whole.accepted, down.accepted, atol=EXACT)


@pytest.mark.parametrize("rule", ROUND_RULES)
def test_a_tree_that_is_a_chain_is_judged_as_a_chain(rule):
    case = cases.chain(context_dependent(0, 3, 4), context_dependent(1, 3, 3))
    chain = outcome(RULES[rule], case)  # by the code for chains
    tree = random(rule, CHAIN, "chain")  # its parents are traced
    np.testing.assert_allclose(tree.probs, chain.probs, atol=EXACT)
    np.testing.assert_allclose(tree.accepted, chain.accepted, atol=EXACT)


@pytest.mark.parametrize("rule", ROUND_RULES)
def test_chains_of_drawn_and_deterministic_nodes_from_a_reduced_vocabulary_are_exact(rule):
    drafter = [context_dependent(depth, 2, 1)[0].repeat(3**depth, 0) for depth in range(3)]
    target = context_dependent(5, 3, DEPTH + 1)
    known = {"vocabulary": (0, 2), "static": True}
    for proposal in (
        "chain",
        ("chain", "deterministic", "chain", "chain"),
        ("deterministic", "chain") * 2,
    ):
        chain = outcome_of(rule, CHAIN, proposal, target, drafter, **known)
        assert chain.distance < EXACT
        tree = outcome_of(rule, CHAIN, proposal, target, drafter, vocabulary=(0, 2))
        np.testing.assert_allclose(chain.accepted, tree.accepted, atol=EXACT)


@pytest.mark.parametrize("rule", ROUND_RULES)
def test_a_chain_needs_no_rows_of_logits_behind_its_last_drawn_node(rule):
    target, drafter = context_dependent(5, 3, DEPTH + 1), context_dependent(6, 3, DEPTH)
    result = outcome_of(
        rule,
        CHAIN,
        ("chain", "chain", "deterministic", "deterministic"),
        target,
        drafter,
        static=True,
        altered=lambda draft: draft.replace(logits=draft.logits[:, :2]),
    )
    assert result.distance < EXACT
    assert result.accepted[3] > 0


def test_every_proposal_that_a_rule_is_exact_for_is_enumerated_here():
    proven = {*CHILDREN, "mixed"}
    for rule in ROUND_RULES:
        assert RULES[rule].exact_for == proven

"""Classic mistakes, planted to test the enumeration that checks losslessness.

Each mutant must be off by more than ``CAUGHT`` where the shipped rule is exact to 1e-12. Mistakes
of noise, which a single round cannot show, are in ``test_joint_distribution.py``.
"""

from unittest import mock

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jspec.core import sampling
from jspec.tools.certify.conditionals import context_dependent, context_free, processed, softmax
from jspec.tools.certify.drawing import DEPTH as TREE_DEPTH
from jspec.tools.certify.drawing import Case
from jspec.tools.certify.enumeration import accepts_the_impossible, outcome
from jspec.verify import RULES
from jspec.verify.nodes import Nodes, take
from tests.fakes import settings
from tests.verify.cases import chain

EXACT, CAUGHT = 1e-12, 1e-3
DEPTH, V = 2, 4
TARGET, DRAFT = context_dependent(0, V, DEPTH + 1), context_dependent(1, V, DEPTH)
rejection, block = RULES["rejection"].walk, RULES["block"].walk


# ---------------------------------------------------------- drafts that are not what was recorded


def argmax_of(conditionals):
    return [np.where(np.eye(V)[rows.argmax(-1)] > 0, 0.0, -np.inf) for rows in conditionals]


def rounded(conditionals):
    return [rows.astype(ml_dtypes.bfloat16).astype(np.float64) for rows in conditionals]


def drop_improbable(drafted):
    """Keep a drafted token and its descendants only if its own distribution gave it 0.2."""
    index, keep = np.zeros(len(drafted), int), np.ones(drafted.shape, bool)
    for node, rows in enumerate(DRAFT):
        probs = softmax(rows[index])
        keep[:, node:] &= np.take_along_axis(probs, drafted[:, [node]], 1) > 0.2
        index = index * V + drafted[:, node]
    return keep


WRONG_CASES = {
    "the argmax is drafted, a soft distribution recorded": chain(
        TARGET, DRAFT, drawn=argmax_of(DRAFT)
    ),
    "drafted at temperature 0.7, recorded at 1": chain(
        TARGET, DRAFT, drawn_sampling=settings(1, 0.7)
    ),
    "drafted under top-k, recorded without": chain(
        TARGET, DRAFT, drawn_sampling=settings(1, 1.0, top_k=3)
    ),
    "drafted without top-k, recorded under it": chain(
        TARGET, DRAFT, sampling=settings(1, 1.0, top_k=3), drawn_sampling=settings(1)
    ),
    "the distribution of another context is recorded": chain(
        TARGET, context_dependent(2, V, DEPTH), drawn=DRAFT
    ),
    "drafted tokens of small probability are dropped": chain(TARGET, DRAFT, keep=drop_improbable),
    "bfloat16 is recorded of float32 draws": chain(
        TARGET, rounded([4 * rows for rows in DRAFT]), drawn=[4 * rows for rows in DRAFT]
    ),
}


@pytest.mark.parametrize("rule", ["rejection", "block"])
@pytest.mark.parametrize("mistake", WRONG_CASES)
def test_drafts_that_differ_from_their_record_are_caught(mistake, rule):
    result = outcome(RULES[rule], WRONG_CASES[mistake])
    # How much rounding costs grows with the vocabulary; on four tokens it is small.
    assert result.distance > (1e-4 if "bfloat16" in mistake else CAUGHT)


@pytest.mark.parametrize("rule", ["rejection", "block"])
def test_drafts_drawn_from_what_was_recorded_are_exact_though_rounded(rule):
    coarse = rounded([4 * rows for rows in DRAFT])
    assert outcome(RULES[rule], chain(TARGET, coarse)).distance < EXACT


# ------------------------------------------------------------------------------- rules that are off


def at_end(rows, num_accepted):
    return jnp.take_along_axis(rows, num_accepted[:, None, None], 1)[:, 0]


def passes_alone(rule, processed, draft, tree, uniforms, proposal):
    """Return whether each node passes by its own uniform, ancestors passing: [B, K]."""
    index = jnp.arange(uniforms.shape[1])
    alone = [
        rule(
            processed,
            draft,
            tree,
            jnp.where(index < i, 0, jnp.where(index == i, uniforms, jnp.inf)),
            proposal,
        )
        for i in range(1, uniforms.shape[1])
    ]
    return jnp.stack([result[1] > i for i, result in enumerate(alone)], 1)


def ending_at(rule, processed, draft, tree, num_accepted, proposal):
    """Return a rule's result under uniforms that accept exactly ``num_accepted`` nodes."""
    index = jnp.arange(draft.tokens.shape[1])
    uniforms = jnp.where(index <= num_accepted[:, None], 0.0, jnp.inf)
    return rule(processed, draft, tree, uniforms.astype(processed.dtype), proposal)


def resamples_from_p(rule):
    def mutant(processed, draft, tree, uniforms, proposal):
        path, num_accepted, _ = rule(processed, draft, tree, uniforms, proposal)
        return path, num_accepted, at_end(processed, num_accepted)

    return mutant


def is_lenient(rule):
    return lambda processed, draft, tree, uniforms, proposal: rule(
        processed, draft, tree, uniforms / 2, proposal
    )


def judges_placeholders(rule):
    return lambda processed, draft, tree, uniforms, proposal: rule(
        processed, draft.replace(valid=jnp.ones_like(draft.valid)), tree, uniforms, proposal
    )


def shifts_the_recorded_distributions(rule):
    return lambda processed, draft, tree, uniforms, proposal: rule(
        processed, draft.replace(logits=jnp.roll(draft.logits, 1, 1)), tree, uniforms, proposal
    )


def scales_the_bonus(rule):
    def mutant(processed, draft, tree, uniforms, proposal):
        path, num_accepted, logits = rule(processed, draft, tree, uniforms, proposal)
        complete = num_accepted[:, None] == tree.max_depth
        return path, num_accepted, jnp.where(complete, logits * 0.6, logits)

    return mutant


def stops_block_at_its_first_failure(processed, draft, tree, uniforms, proposal):
    passed = passes_alone(block, processed, draft, tree, uniforms, proposal)
    return ending_at(block, processed, draft, tree, jnp.cumprod(passed, 1).sum(1), proposal)


def accepts_by_rejection_with_the_residual_of_block(processed, draft, tree, uniforms, proposal):
    _, num_accepted, _ = rejection(processed, draft, tree, uniforms, proposal)
    return ending_at(block, processed, draft, tree, num_accepted, proposal)


def accepts_by_block_with_the_residual_of_rejection(processed, draft, tree, uniforms, proposal):
    path, num_accepted, _ = block(processed, draft, tree, uniforms, proposal)
    log_p = jax.nn.log_softmax(at_end(processed, num_accepted), -1)
    log_q = jax.nn.log_softmax(at_end(draft.logits, num_accepted), -1)
    refused = num_accepted[:, None] < tree.max_depth
    return path, num_accepted, jnp.where(refused, sampling.log_residual(log_p, log_q), log_p)


def accepts_after_a_rejection(processed, draft, tree, uniforms, proposal):
    passed = passes_alone(rejection, processed, draft, tree, uniforms, proposal)
    last = jnp.where(passed, jnp.arange(1, passed.shape[1] + 1), 0).max(1)
    return ending_at(rejection, processed, draft, tree, last, proposal)


def first_node_only(drafted):
    return np.broadcast_to(np.arange(DEPTH) < 1, drafted.shape)


SOFT = chain(TARGET, DRAFT)
CERTAIN = chain(TARGET, argmax_of(DRAFT))
COOL = chain(TARGET, DRAFT, sampling=settings(1, 0.6))
RAGGED = chain(TARGET, DRAFT, keep=first_node_only)

WRONG_RULES = {
    "rejection draws again from p": (resamples_from_p(rejection), SOFT),
    "block draws again from p": (resamples_from_p(block), SOFT),
    "a refused deterministic node is not masked": (resamples_from_p(rejection), CERTAIN),
    "rejection accepts leniently": (is_lenient(rejection), SOFT),
    "block accepts leniently": (is_lenient(block), SOFT),
    "rejection judges placeholders": (judges_placeholders(rejection), RAGGED),
    "block judges placeholders": (judges_placeholders(block), RAGGED),
    "recorded distributions are one node late": (
        shifts_the_recorded_distributions(rejection),
        SOFT,
    ),
    "the bonus of rejection is not processed": (scales_the_bonus(rejection), COOL),
    "the bonus of block is not processed": (scales_the_bonus(block), COOL),
    "block stops at its first failure": (stops_block_at_its_first_failure, SOFT),
    "rejection with the residual of block": (accepts_by_rejection_with_the_residual_of_block, SOFT),
    "block with the residual of rejection": (accepts_by_block_with_the_residual_of_rejection, SOFT),
    "rejection goes on after a refusal": (accepts_after_a_rejection, SOFT),
}


@pytest.mark.parametrize("mistake", WRONG_RULES)
def test_rules_that_are_off_are_caught(mistake):
    mutant, case = WRONG_RULES[mistake]
    assert outcome(mutant, case).distance > CAUGHT


@pytest.mark.parametrize("rule", ["rejection", "block"])
@pytest.mark.parametrize(
    "case", [SOFT, CERTAIN, COOL, RAGGED], ids=["soft", "deterministic", "cool", "ragged"]
)
def test_the_shipped_rules_are_exact_where_their_mutants_are_not(rule, case):
    assert outcome(RULES[rule], case).distance < EXACT


def test_a_match_that_draws_again_where_the_path_ends_is_caught():
    assert outcome(RULES["match"], SOFT).distance < EXACT
    assert outcome(RULES["match"], SOFT, redraw=True).distance > CAUGHT


def test_a_verifier_that_cuts_top_p_before_the_temperature_is_caught():
    sampled = settings(1, 0.6, top_p=0.8)
    shipped = outcome(rejection, chain(TARGET, DRAFT, sampling=sampled))
    swapped = [rows / 0.6 for rows in processed(TARGET, settings(1, 1.0, top_p=0.8))]
    result = outcome(rejection, chain(swapped, DRAFT))
    assert shipped.distance < EXACT
    assert 0.5 * np.abs(result.probs - shipped.target_probs).sum() > CAUGHT


# ------------------------------------------------------------------------------- trees that are off

TWO, THREE, UNEVEN = (-1, 0, 0), (-1, 0, 0, 0), (-1, 0, 0, 1, 1)


def tree(proposal, parents=TWO, altered=None):
    target = context_dependent(32, V, TREE_DEPTH + 1)
    drafter = context_dependent(132, V, TREE_DEPTH)
    return Case(parents, proposal, target, drafter, altered=altered)


def says_drawn(draft):
    return draft.replace(sampled=np.ones_like(draft.sampled))


def says_certain(draft):
    return draft.replace(sampled=np.zeros_like(draft.sampled))


def pruned_by_their_own_probability(draft):
    parents = np.maximum(draft.parents, 0)
    probs = softmax(np.take_along_axis(draft.logits, parents[..., None], 1))
    likely = np.take_along_axis(probs, draft.tokens[..., None], -1)[..., 0] > 0.25
    likely[:, 0] = True
    return draft.replace(valid=draft.valid & likely & np.take_along_axis(likely, parents, 1))


def missing_where_the_next_sibling_is_zero(draft):
    valid = draft.valid.copy()
    valid[:, 1] &= draft.tokens[:, 2] != 0
    return draft.replace(valid=valid)


def recorded_one_node_late(draft):
    return draft.replace(logits=np.roll(draft.logits, 1, 1))


def draws_again_from_p(rule):
    def mutant(processed, draft, tree, uniforms, proposal):
        path, num_accepted, _ = rule(processed, draft, tree, uniforms, proposal)
        end = jnp.take_along_axis(path, num_accepted[:, None], 1)[:, 0]
        return path, num_accepted, at_end(processed, end)

    return mutant


def with_stale_q(rule):
    def mutant(*arguments):
        with mock.patch.object(
            Nodes, "drops", lambda self, child: take(self.draft.drawn, child) & False
        ):
            return RULES[rule].walk(*arguments)

    return mutant


# What is wrong, by rule: the walk that is run, and the case.
WRONG_TREES = {
    "children drawn without replacement are judged by a stale q": lambda rule: (
        with_stale_q(rule),
        tree("without_replacement", THREE),
    ),
    "children drawn with replacement are judged as if without": lambda rule: (
        RULES[rule].walk,
        tree("chain", THREE),  # independent draws
    ),
    "the likeliest children are judged by p / q": lambda rule: (
        RULES[rule].walk,
        tree("deterministic", altered=says_drawn),
    ),
    "the likeliest child stays in the distribution of the drawn one": lambda rule: (
        RULES[rule].walk,
        tree("top_plus_one", altered=says_drawn),
    ),
    "a last deterministic child leaves the distribution of the drawn one": lambda rule: (
        RULES[rule].walk,
        tree(("deterministic_last",) * len(TWO)),  # judged as "mixed"
    ),
    "children are pruned by their own probability": lambda rule: (
        RULES[rule].walk,
        tree("without_replacement", UNEVEN, pruned_by_their_own_probability),
    ),
    "whether a child exists hangs on its later sibling": lambda rule: (
        RULES[rule].walk,
        tree("without_replacement", TWO, missing_where_the_next_sibling_is_zero),
    ),
    "recorded distributions are one node late": lambda rule: (
        RULES[rule].walk,
        tree("without_replacement", UNEVEN, recorded_one_node_late),
    ),
    "refused children are not masked": lambda rule: (
        draws_again_from_p(RULES[rule].walk),
        tree("without_replacement"),
    ),
    "a refused deterministic node is not masked": lambda rule: (
        draws_again_from_p(RULES[rule].walk),
        tree("deterministic"),
    ),
}


@pytest.mark.parametrize("rule", ["rejection", "block"])
@pytest.mark.parametrize("mistake", WRONG_TREES)
def test_trees_that_are_off_are_caught(mistake, rule):
    walk, case = WRONG_TREES[mistake](rule)
    assert outcome(walk, case).distance > CAUGHT


def test_siblings_pruned_by_value_are_exact_as_deterministic_drafts():
    case = tree(
        "without_replacement",
        UNEVEN,
        lambda draft: says_certain(pruned_by_their_own_probability(draft)),
    )
    assert outcome(rejection, case).distance < EXACT


# ------------------------------------------------------------- mistakes that only u = 0 can show

EXCLUDING = chain(context_free([0.5, 0.5, 0.0], 2), context_free([0.2, 0.3, 0.5], 1))


def compares_with_less_or_equal(rule):
    """``u <= p / q`` differs from ``u < p / q`` at u = 0, as if no ratio were exactly 0."""
    return lambda processed, draft, tree, uniforms, proposal: rule(
        jnp.maximum(processed, -1e30), draft, tree, uniforms, proposal
    )


def test_a_uniform_of_zero_accepts_no_token_that_the_target_excludes():
    assert not accepts_the_impossible(rejection, EXCLUDING)
    assert not accepts_the_impossible(block, EXCLUDING)


def test_less_or_equal_in_place_of_less_is_caught():
    assert accepts_the_impossible(compares_with_less_or_equal(rejection), EXCLUDING)

"""Classic mistakes, kept alive so that the checker of losslessness is itself checked.

Each mutant must be off by more than ``CAUGHT`` where the shipped rule is exact to 1e-12. Mistakes
of noise, which a single round cannot show, are in ``test_joint_distribution.py``.
"""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jspec.core import sampling
from jspec.tools.certify import drafted_trees
from jspec.tools.certify.chains import Case, context_dependent, judge, level_filters, outcome
from jspec.verify import RULES
from tests.fakes import settings

EXACT, CAUGHT = 1e-12, 1e-3
DEPTH, V = 2, 4
TARGET, DRAFT = context_dependent(0, V, DEPTH + 1), context_dependent(1, V, DEPTH)
rejection, block = RULES["rejection"].walk, RULES["block"].walk


# ---------------------------------------------------------- drafts that are not what was recorded


def argmax_of(levels):
    return [np.where(np.eye(V)[level.argmax(-1)] > 0, 0.0, -np.inf) for level in levels]


def rounded(levels):
    return [level.astype(ml_dtypes.bfloat16).astype(np.float64) for level in levels]


def drop_improbable(drafted):
    """Keeps a drafted token, and what follows, only if its own law gave it 0.2."""
    index, keep = np.zeros(len(drafted), int), np.ones(drafted.shape, bool)
    for node, level in enumerate(DRAFT):
        distribution = np.exp(level[index]) / np.exp(level[index]).sum(-1, keepdims=True)
        keep[:, node:] &= np.take_along_axis(distribution, drafted[:, [node]], 1) > 0.2
        index = index * V + drafted[:, node]
    return keep


WRONG_CASES = {
    "the argmax is drafted, a soft law recorded": Case(TARGET, DRAFT, drawn=argmax_of(DRAFT)),
    "drafted at temperature 0.7, recorded at 1": Case(
        TARGET, DRAFT, drawn_sampling=settings(1, 0.7)
    ),
    "drafted under top-k, recorded without": Case(
        TARGET, DRAFT, drawn_sampling=settings(1, 1.0, top_k=3)
    ),
    "drafted without top-k, recorded under it": Case(
        TARGET, DRAFT, sampling=settings(1, 1.0, top_k=3), drawn_sampling=settings(1)
    ),
    "the law of another context is recorded": Case(
        TARGET, context_dependent(2, V, DEPTH), drawn=DRAFT
    ),
    "drafted tokens of small probability are dropped": Case(TARGET, DRAFT, keep=drop_improbable),
    "bfloat16 laws are recorded of float32 draws": Case(
        TARGET, rounded([4 * level for level in DRAFT]), drawn=[4 * level for level in DRAFT]
    ),
}


@pytest.mark.parametrize("rule", ["rejection", "block"])
@pytest.mark.parametrize("mistake", WRONG_CASES)
def test_drafts_that_differ_from_their_record_are_caught(mistake, rule):
    found = outcome(rule, WRONG_CASES[mistake])
    # How much rounding costs grows with the vocabulary; on four tokens it is small.
    assert found.distance > (1e-4 if "bfloat16" in mistake else CAUGHT)


@pytest.mark.parametrize("rule", ["rejection", "block"])
def test_drafts_drawn_from_what_was_recorded_are_exact_though_rounded(rule):
    coarse = rounded([4 * level for level in DRAFT])
    assert outcome(rule, Case(TARGET, coarse)).distance < EXACT


# ------------------------------------------------------------------------------- rules that are off


def at_end(rows, num_accepted):
    return jnp.take_along_axis(rows, num_accepted[:, None, None], 1)[:, 0]


def passes_alone(rule, processed, draft, tree, uniforms):
    """Whether each node's own coin passes, whatever the others do: [B, K]."""
    index = jnp.arange(uniforms.shape[1])
    alone = [
        rule(
            processed,
            draft,
            tree,
            jnp.where(index < i, 0, jnp.where(index == i, uniforms, jnp.inf)),
        )
        for i in range(1, uniforms.shape[1])
    ]
    return jnp.stack([found[1] > i for i, found in enumerate(alone)], 1)


def ending_at(rule, processed, draft, tree, num_accepted):
    """What a rule says when its coins make it accept exactly ``num_accepted`` nodes."""
    index = jnp.arange(draft.tokens.shape[1])
    uniforms = jnp.where(index <= num_accepted[:, None], 0.0, jnp.inf)
    return rule(processed, draft, tree, uniforms.astype(processed.dtype))


def resamples_from_p(rule):
    def mutant(processed, draft, tree, uniforms):
        path, num_accepted, _ = rule(processed, draft, tree, uniforms)
        return path, num_accepted, at_end(processed, num_accepted)

    return mutant


def is_lenient(rule):
    return lambda processed, draft, tree, uniforms: rule(processed, draft, tree, uniforms / 2)


def judges_placeholders(rule):
    return lambda processed, draft, tree, uniforms: rule(
        processed, draft.replace(valid=jnp.ones_like(draft.valid)), tree, uniforms
    )


def shifts_the_recorded_distributions(rule):
    return lambda processed, draft, tree, uniforms: rule(
        processed, draft.replace(logits=jnp.roll(draft.logits, 1, 1)), tree, uniforms
    )


def unwarps_the_bonus(rule):
    def mutant(processed, draft, tree, uniforms):
        path, num_accepted, logits = rule(processed, draft, tree, uniforms)
        complete = num_accepted[:, None] == tree.max_depth
        return path, num_accepted, jnp.where(complete, logits * 0.6, logits)

    return mutant


def stops_block_at_its_first_failure(processed, draft, tree, uniforms):
    passed = passes_alone(block, processed, draft, tree, uniforms)
    return ending_at(block, processed, draft, tree, jnp.cumprod(passed, 1).sum(1))


def accepts_by_rejection_with_the_residual_of_block(processed, draft, tree, uniforms):
    _, num_accepted, _ = rejection(processed, draft, tree, uniforms)
    return ending_at(block, processed, draft, tree, num_accepted)


def accepts_by_block_with_the_residual_of_rejection(processed, draft, tree, uniforms):
    path, num_accepted, _ = block(processed, draft, tree, uniforms)
    log_p = jax.nn.log_softmax(at_end(processed, num_accepted), -1)
    log_q = jax.nn.log_softmax(at_end(draft.logits, num_accepted), -1)
    refused = num_accepted[:, None] < tree.max_depth
    return path, num_accepted, jnp.where(refused, sampling.log_residual(log_p, log_q), log_p)


def accepts_after_a_rejection(processed, draft, tree, uniforms):
    passed = passes_alone(rejection, processed, draft, tree, uniforms)
    last = jnp.where(passed, jnp.arange(1, passed.shape[1] + 1), 0).max(1)
    return ending_at(rejection, processed, draft, tree, last)


def first_node_only(drafted):
    return np.broadcast_to(np.arange(DEPTH) < 1, drafted.shape)


SOFT = Case(TARGET, DRAFT)
POINT = Case(TARGET, argmax_of(DRAFT))
COOL = Case(TARGET, DRAFT, sampling=settings(1, 0.6))
RAGGED = Case(TARGET, DRAFT, keep=first_node_only)

WRONG_RULES = {
    "rejection draws again from p": (resamples_from_p(rejection), SOFT),
    "block draws again from p": (resamples_from_p(block), SOFT),
    "a refused point mass is not masked": (resamples_from_p(rejection), POINT),
    "rejection accepts leniently": (is_lenient(rejection), SOFT),
    "block accepts leniently": (is_lenient(block), SOFT),
    "rejection judges placeholders": (judges_placeholders(rejection), RAGGED),
    "block judges placeholders": (judges_placeholders(block), RAGGED),
    "recorded laws are one node late": (shifts_the_recorded_distributions(rejection), SOFT),
    "the bonus of rejection is not warped": (unwarps_the_bonus(rejection), COOL),
    "the bonus of block is not warped": (unwarps_the_bonus(block), COOL),
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
    "case", [SOFT, POINT, COOL, RAGGED], ids=["soft", "point", "cool", "ragged"]
)
def test_the_shipped_rules_are_exact_where_their_mutants_are_not(rule, case):
    assert outcome(rule, case).distance < EXACT


def test_a_match_that_draws_again_where_the_path_ends_is_caught():
    assert outcome("match", SOFT).distance < EXACT
    assert outcome("match", SOFT, redraw=True).distance > CAUGHT


def test_a_verifier_that_cuts_top_p_before_the_temperature_is_caught():
    sampled = settings(1, 0.6, top_p=0.8)
    shipped = outcome("rejection", Case(TARGET, DRAFT, sampling=sampled))
    swapped = [level / 0.6 for level in level_filters(TARGET, settings(1, 1.0, top_p=0.8))]
    found = outcome("rejection", Case(swapped, DRAFT))
    assert shipped.distance < EXACT
    assert 0.5 * np.abs(found.distribution - shipped.exact).sum() > CAUGHT


# ------------------------------------------------------------------------------- trees that are off

TWO, THREE, UNEVEN = (-1, 0, 0), (-1, 0, 0, 0), (-1, 0, 0, 1, 1)


def tree(proposal, parents=TWO, altered=None):
    target, drafter = (
        context_dependent(32, V, drafted_trees.DEPTH + 1),
        context_dependent(132, V, 3),
    )
    return drafted_trees.TreeCase(parents, proposal, target, drafter, altered=altered)


def says_drawn(draft):
    return draft.replace(sampled=np.ones_like(draft.sampled))


def says_certain(draft):
    return draft.replace(sampled=np.zeros_like(draft.sampled))


def pruned_by_their_own_probability(draft):
    distributions = np.take_along_axis(draft.logits, np.maximum(draft.parents, 0)[..., None], 1)
    distributions = np.exp(distributions) / np.exp(distributions).sum(-1, keepdims=True)
    kept = np.take_along_axis(distributions, draft.tokens[..., None], -1)[..., 0] > 0.25
    kept[:, 0] = True
    return draft.replace(valid=draft.valid & kept & np.take_along_axis(kept, draft.parents, 1))


def missing_where_the_next_sibling_is_zero(draft):
    valid = draft.valid.copy()
    valid[:, 1] &= draft.tokens[:, 2] != 0
    return draft.replace(valid=valid)


def recorded_one_node_late(draft):
    return draft.replace(logits=np.roll(draft.logits, 1, 1))


def draws_again_from_p(rule):
    def mutant(processed, draft, tree, uniforms):
        path, num_accepted, _ = rule(processed, draft, tree, uniforms)
        end = jnp.take_along_axis(path, num_accepted[:, None], 1)[:, 0]
        return path, num_accepted, at_end(processed, end)

    return mutant


def with_replacement(rule):
    return RULES[rule].judging("iid").walk


# What is wrong, by rule: the walk that is run, and the case.
WRONG_TREES = {
    "children drawn without replacement are judged by a stale q": lambda rule: (
        with_replacement(rule),
        tree("without_replacement", THREE),
    ),
    "children drawn with replacement are judged as if without": lambda rule: (
        RULES[rule].walk,
        tree("iid", THREE),
    ),
    "the likeliest children are judged by p / q": lambda rule: (
        RULES[rule].walk,
        tree("point", altered=says_drawn),
    ),
    "the likeliest child is not taken out of the law of the drawn one": lambda rule: (
        RULES[rule].walk,
        tree("top_plus_one", altered=says_drawn),
    ),
    "a point mass that came last is taken out of the law of the drawn one": lambda rule: (
        RULES[rule].walk,
        tree("points_last"),
    ),
    "children are pruned by their own probability": lambda rule: (
        RULES[rule].walk,
        tree("without_replacement", UNEVEN, pruned_by_their_own_probability),
    ),
    "whether a child exists hangs on its later sibling": lambda rule: (
        RULES[rule].walk,
        tree("without_replacement", TWO, missing_where_the_next_sibling_is_zero),
    ),
    "recorded laws are one node late": lambda rule: (
        RULES[rule].walk,
        tree("without_replacement", UNEVEN, recorded_one_node_late),
    ),
    "refused children are not masked": lambda rule: (
        draws_again_from_p(RULES[rule].walk),
        tree("without_replacement"),
    ),
    "a refused point mass is not masked": lambda rule: (
        draws_again_from_p(RULES[rule].walk),
        tree("point"),
    ),
}


@pytest.mark.parametrize("rule", ["rejection", "block"])
@pytest.mark.parametrize("mistake", WRONG_TREES)
def test_trees_that_are_off_are_caught(mistake, rule):
    walk, case = WRONG_TREES[mistake](rule)
    assert drafted_trees.outcome(walk, case).distance > CAUGHT


def test_siblings_pruned_by_value_are_exact_under_the_target_only_walk_alone():
    exact = {name for name, rule in RULES.items() if "pruned" in rule.exact_for}
    assert exact == {"match", "coupled"}
    # For it all children are point masses: that is what it comes to.
    as_points = lambda draft: says_certain(pruned_by_their_own_probability(draft))
    case = tree("without_replacement", UNEVEN, as_points)
    assert drafted_trees.outcome(rejection, case).distance < EXACT


# ---------------------------------------------------------------- what only a single coin can show


def accepts_the_impossible(rule):
    """Whether a coin of exactly 0 lets a token through that the target excludes."""
    processed = jnp.log(jnp.array([[[0.5, 0.5, 0.0]] * 2]))
    recorded = jnp.log(jnp.array([[[0.2, 0.3, 0.5]] * 2]))
    draft = jnp.array([[0, 2]])
    num_accepted, _ = judge(rule, processed, draft, draft == draft, recorded, jnp.zeros((1, 2)))
    return bool(num_accepted[0])


def compares_with_less_or_equal(rule):
    """``u <= p / q`` differs from ``u < p / q`` at u = 0, as if no ratio were quite 0."""
    return lambda processed, draft, tree, uniforms: rule(
        jnp.maximum(processed, -1e30), draft, tree, uniforms
    )


def test_no_coin_lets_a_token_through_that_the_target_excludes():
    assert not accepts_the_impossible(rejection)
    assert not accepts_the_impossible(block)


def test_less_or_equal_in_place_of_less_is_caught():
    assert accepts_the_impossible(compares_with_less_or_equal(rejection))

"""Chains that end where they are no longer likely: where, what is remembered, and what is said."""

import dataclasses
import functools

import numpy as np
import pytest

from jspec.api import config
from jspec.core.types import Params
from jspec.drafters import Cascade, DraftModel, NGram
from jspec.engine import batch as host
from jspec.engine.plan import Plan
from jspec.tools import trace
from tests import tiny
from tests.drafters import dflashes, heads, hydras, mtps, speculators

K = 4
DRAFTERS = {
    "draft_model": (tiny.DRAFT, lambda: tiny.params().drafter),
    "eagle": (heads.drafter("eagle", K), lambda: heads.random_params("eagle")),
    "mtp": (mtps.drafter("one", K), lambda: mtps.random_params("one")),
    "two modules": (mtps.drafter("two", K), lambda: mtps.random_params("two")),
    "mlp": (
        speculators.drafter("tied scaled", num_speculative_tokens=K),
        lambda: speculators.random_params("tied scaled"),
    ),
    "hydra": (hydras.drafter("mlp", num_speculative_tokens=3), lambda: hydras.random_params("mlp")),
}
FAST = ("draft_model", "eagle")
EVERY = [name if name in FAST else pytest.param(name, marks=pytest.mark.slow) for name in DRAFTERS]
ROWS = [
    host.SequenceParams(prompt, max_tokens=size, temperature=t, stream=i)
    for i, (prompt, t, size) in enumerate(
        zip(tiny.prompts((1, 9, 5)), (0, 0.8, 1.1), (24, 30, 20), strict=True)
    )
]


@functools.cache
def plan_of(name, threshold, rule="rejection"):
    drafter, weights = DRAFTERS[name]
    drafter = dataclasses.replace(drafter, confidence_threshold=threshold)
    plan = Plan(tiny.TARGET, drafter, rule, record_rounds=64)
    return plan, Params(tiny.params().target, weights())


@pytest.mark.parametrize("name", EVERY)
def test_a_chain_ends_behind_the_first_token_that_makes_it_unlikely(name):
    plan, params = plan_of(name, 0.001)
    row = host.SequenceParams(tiny.prompts((9,))[0], max_tokens=60, temperature=0.9)
    lengths = []
    for one in trace.of_row(plan, params, row).rounds[1:-5]:  # but for limits of the text
        likely = np.cumprod([node.q for node in one.nodes[1:]])
        assert (likely[:-1] >= 0.001).all()
        assert len(likely) == plan.drafter.max_depth or likely[-1] < 0.001
        lengths.append(len(likely))
    assert len(set(lengths)) > 1


@pytest.mark.parametrize("name", EVERY)
def test_texts_are_those_of_plain_decoding(name):
    plain = host.generate_sequences(Plan(tiny.TARGET, tiny.NONE), tiny.params(), ROWS)
    plan, params = plan_of(name, 0.1, "coupled")
    answers = host.generate_sequences(plan, params, ROWS)
    for answer, expected in zip(answers, plain, strict=True):
        np.testing.assert_array_equal(answer.tokens, expected.tokens)
    assert sum(answer.drafted for answer in answers) < plan.drafter.max_depth * sum(
        answer.drafts for answer in answers
    )


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("name", FAST)
def test_what_a_request_makes_certain_ends_no_chain(name, temperature):
    plan, params = plan_of(name, 0.1)
    row = host.SequenceParams(ROWS[1].prompt, 20, temperature=temperature, allowed_token_ids=(11,))
    [answer] = host.generate_sequences(plan, params, [row])
    assert answer.acceptance_length == plan.drafter.max_depth + 1


def test_a_draft_model_remembers_what_it_saw_of_a_chain_that_ended():
    own = DraftModel(tiny.TARGET.config, K, confidence_threshold=0.05)
    plan = Plan(tiny.TARGET, own, record_rounds=64)
    params = Params(tiny.params().target, tiny.params().target)
    rows = [dataclasses.replace(row, temperature=0, max_tokens=40) for row in ROWS]
    lengths = set()
    for answer in host.generate_sequences(plan, params, rows):
        accepted, drafted = answer.trace[0], (answer.trace[1][:, 1:] >= 0).sum(1)
        assert accepted[:-1].tolist() == drafted[:-1].tolist()
        lengths |= set(drafted[:-1].tolist())
    assert len(lengths) > 1


def test_the_target_has_programs_for_shorter_drafts():
    assert plan_of("draft_model", 0.3)[0].node_buckets == (1, 2, 3, 5)
    assert plan_of("draft_model", None)[0].node_buckets == (1, 5)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: DraftModel(tiny.DRAFT_CONFIG, 3, confidence_threshold=1.5), "must be 0 to 1"),
        (lambda: heads.drafter("eagle", 3, confidence_threshold=-0.1), "must be 0 to 1"),
        (
            lambda: heads.drafter("eagle", 3, tree="eagle2", tree_size=8, confidence_threshold=0.3),
            "ends chains, but tree='eagle2'",
        ),
        (lambda: heads.drafter("medusa", 3, confidence_threshold=0.3), "drafts all at once"),
        (lambda: dflashes.drafter("dflash", 3, confidence_threshold=0.3), "drafts all at once"),
        (
            lambda: Cascade.of(
                NGram(2, 1, 2), DraftModel(tiny.DRAFT_CONFIG, 3, confidence_threshold=0.3)
            ),
            "a cascade drafts several in a pass",
        ),
        (
            lambda: config.read(
                {"model": "x", "num_speculative_tokens": 3, "confidence_threshold": "high"}
            ),
            "confidence_threshold='high' must",
        ),
        (
            lambda: config.read(
                {"method": "ngram", "num_speculative_tokens": 3, "confidence_threshold": 0.5}
            ),
            "is not used by method='ngram'",
        ),
    ],
)
def test_what_a_threshold_does_not_go_with_is_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()

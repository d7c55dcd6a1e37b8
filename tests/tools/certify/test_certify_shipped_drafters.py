"""``jspec certify`` of drafters: shipped ones, and noise that the loop uses twice."""

import jax.numpy as jnp
import pytest

from jspec.core import sampling
from jspec.core.types import Params
from jspec.engine.plan import Plan
from jspec.engine.sequences import SequenceParams
from jspec.tools.certify import drafts
from tests import tiny
from tests.test_conformance import DRAFTERS
from tests.tools.certify.test_certify_drafters import (
    NOISE,
    NUM_DRAFTS,
    Chain,
    failures,
    findings,
    slow_but,
)

SHIPPED = sampling.round_noise


def keyed_by_position(keys, root, purpose, count):
    one = lambda rank: SHIPPED(keys, root + rank, purpose, 1)[:, 0]
    return jnp.stack([one(rank) for rank in range(count)], 1)


def keyed_by_row(keys, root, purpose, count):
    return SHIPPED(keys, jnp.zeros_like(root), purpose, count)


def residual_as_drafted(keys, root, purpose, count):
    purpose = sampling.DRAFT if purpose == sampling.RESIDUAL else purpose
    return SHIPPED(keys, root, purpose, count)


@pytest.mark.slow
@pytest.mark.parametrize("noise", [keyed_by_position, keyed_by_row, residual_as_drafted])
def test_noise_that_the_loop_uses_twice_is_caught(noise, monkeypatch):
    monkeypatch.setattr(sampling, "round_noise", noise)
    reused = lambda keys, root, count: noise(
        keys, root, sampling.DRAFT, count
    )  # another plan: no shared program
    assert NOISE in failures(Chain(noise_of=reused))


# ----------------------------------------------------------------------------- shipped drafters


def test_a_drafter_without_draws_has_its_form_checked_alone():
    (only,) = findings(tiny.NGRAM)
    assert only.passed and f"{NUM_DRAFTS} drafts are well formed" in only.subject


def raises(drafted, distributions):
    raise ZeroDivisionError("by nothing")


def test_a_drafter_that_raises_is_a_finding():
    (only,) = findings(Chain(keeps=raises))
    assert not only.passed and "ZeroDivisionError" in only.note


@pytest.mark.parametrize("number", [0, 2.5, True])
def test_too_few_drafts_are_refused(number):
    with pytest.raises(ValueError, match=r"num_drafts=.* must be a whole number of at least 100"):
        findings(Chain(), num_drafts=number)


def test_too_few_rounds_to_compare_draws_are_refused():
    with pytest.raises(ValueError, match="num_drafts is too small for Chain: no two of its draws"):
        findings(Chain(), num_drafts=128)


SHIPPED_DRAFTERS = [(method, shape) for method, shapes in DRAFTERS.items() for shape in shapes]
FAST = [("custom_class", "chain")]


@pytest.mark.parametrize("case", slow_but(FAST, SHIPPED_DRAFTERS), ids="-".join)
def test_shipped_drafters_draw_from_what_they_record(case):
    method, shape = case
    drafter, weights = DRAFTERS[method][shape]
    rows = [SequenceParams(prompt, temperature=1.0, top_p=0.95) for prompt in tiny.prompts()]
    params = Params(tiny.params().target, weights())
    every = list(drafts(Plan(tiny.TARGET, drafter), params, rows))
    assert [each for each in every if not each.passed] == []
    drawn = drafter.proposal != "deterministic"
    assert len(every) == (4 if drawn else 1)

"""A draft model that is drafted for: the same drafts, laws and texts, in fewer passes."""

import dataclasses

import jax
import numpy as np
import pytest

from jspec.drafters import Cascade, NGram, Suffix
from jspec.engine import batch as host
from jspec.engine.plan import Plan
from jspec.models import decoder
from tests import tiny
from tests.drafters import heads, rounds

FIRST = NGram(3, 1, 3)
TEMPERATURES = (0, 0.4, 0)
ROWS = [
    host.SequenceParams(prompt, max_tokens=24 - 5 * i, temperature=temperature, stream=i)
    for i, (prompt, temperature) in enumerate(
        zip(tiny.prompts((1, 9, 12)), TEMPERATURES, strict=True)
    )
]


def traces(drafter, rule):
    plan = rounds.plan_of(drafter, rule, record_rounds=32)
    answers = host.generate_sequences(plan, tiny.params(), ROWS)
    return [(answer.tokens, *answer.trace) for answer in answers]


@pytest.mark.parametrize("rule", ["rejection", "coupled"])
def test_every_round_drafts_and_accepts_what_the_draft_model_alone_does(rule):
    plain, cascade = tiny.DRAFT, Cascade.of(FIRST, tiny.DRAFT)
    assert cascade.proposal == plain.proposal and cascade.tree_size == plain.tree_size
    for expected, found in zip(traces(plain, rule), traces(cascade, rule), strict=True):
        for one, other in zip(expected, found, strict=True):
            np.testing.assert_array_equal(one, other)


def proposed(drafter, params, rows, temperature):
    """The first draft of texts that repeat themselves."""
    rows = [
        host.SequenceParams((7, 8, 9, 10) * 4, max_tokens=20, temperature=temperature, stream=i)
        for i in range(rows)
    ]
    batch = host.start(Plan(tiny.TARGET, drafter), params, rows)
    state = batch.state
    return jax.jit(drafter.propose)(params, batch.request, (), state.memory, state.history)[0]


def test_the_laws_of_a_draft_are_those_of_the_draft_model():
    params = tiny.params()
    one, other = (
        proposed(drafter, params, 2, 0.5) for drafter in (tiny.DRAFT, Cascade.of(FIRST, tiny.DRAFT))
    )
    np.testing.assert_array_equal(one.tokens, other.tokens)
    np.testing.assert_array_equal(one.valid, other.valid)
    np.testing.assert_allclose(one.logits[:, :-1], other.logits[:, :-1], atol=1e-4)


def test_a_draft_model_that_repeats_what_was_said_takes_fewer_passes(monkeypatch):
    passes, extend = [], decoder.extend

    def counting(*arguments):
        jax.debug.callback(lambda: passes.append(1))
        return extend(*arguments)

    monkeypatch.setattr(decoder, "extend", counting)
    model = dataclasses.replace(tiny.DRAFT, num_speculative_tokens=8)
    params = tiny.params()
    counts = []
    for drafter in (model, Cascade.of(FIRST, model)):
        passes.clear()
        draft = proposed(drafter, params, 1, 0.0)
        jax.effects_barrier()
        counts.append((len(passes), np.asarray(draft.tokens)))
    np.testing.assert_array_equal(counts[0][1], counts[1][1])
    assert counts[0][0] == 8  # one a token
    assert counts[1][0] < 8


class Weighed(NGram):
    """A look-up with weights."""

    def load_params(self, target_params):
        return target_params


class Remembering(NGram):
    """A look-up with a memory."""

    def init(self, params, request, capacity):
        return request.max_length


def test_what_cannot_draft_for_a_draft_model_is_refused():
    for first in (Suffix(), tiny.DRAFT, heads.drafter("eagle", 2)):
        with pytest.raises(ValueError, match="cannot draft for a draft model: it must look up"):
            Cascade.of(first, tiny.DRAFT)
    with pytest.raises(ValueError, match="Weighed has weights of its own"):
        Cascade.of(Weighed(3), tiny.DRAFT)
    plan = Plan(tiny.TARGET, Cascade.of(Remembering(3), tiny.DRAFT))
    with pytest.raises(ValueError, match="Remembering remembers more than the text"):
        host.start(plan, tiny.params(), ROWS)
    with pytest.raises(ValueError, match="must be a 'draft_model' that drafts token by token"):
        Cascade.of(FIRST, FIRST)

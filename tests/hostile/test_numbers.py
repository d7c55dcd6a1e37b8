"""Numbers that are none: laws without a token, in target or drafter, and what becomes of rows."""

import dataclasses
import functools

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jspec import verify
from jspec.core import sampling
from jspec.core.types import Params, Sampling
from jspec.drafters import NoDrafter
from jspec.engine.batch import SequenceParams, generate_sequences
from jspec.engine.plan import Plan
from jspec.kernels.rejection_sampling import pallas_tpu
from tests import fakes
from tests.hostile.junk import few

VOCAB = 8
LEAVING, CERTAIN, BROKEN, EMPTY, PEAKED = 3, 4, 5, 6, 7  # tokens, by what follows them
LOST = (BROKEN, EMPTY)
TARGET = np.array(fakes.table(0, VOCAB, VOCAB))
TARGET[:LEAVING, LEAVING:] = -np.inf  # who has not left stays among the first three
TARGET[LEAVING, BROKEN:PEAKED] = 1.0
TARGET[CERTAIN] = [-np.inf, 0, np.inf, 5, 0, 0, 0, 0]
TARGET[BROKEN] = np.nan
TARGET[EMPTY] = -np.inf
TARGET[PEAKED] = [np.nan, np.nan, 1e38, -np.inf, np.nan, np.nan, -1e38, np.nan]
DRAFTS = np.array(fakes.table(1, VOCAB, VOCAB))
DRAFTS[0], DRAFTS[1], DRAFTS[2, :LEAVING] = np.nan, -np.inf, np.inf
PARAMS = Params(jnp.array(TARGET), jnp.array(DRAFTS))

CHAIN = fakes.TableDrafter(3)
TREE = fakes.TreeTableDrafter(2, parents=(-1, 0, 0, 1, 1, 2))
PLANS = [
    *((CHAIN, rule) for rule in ("rejection", "block", "match", "coupled")),
    (CHAIN, verify.typical()),
    (CHAIN, verify.synthetic((0.9, 0.8, 0.7))),
    (TREE, "rejection"),
    (TREE, "block"),
    (TREE, verify.typical()),
]


def rows(prompts, temperature):
    return [
        SequenceParams(prompt, 12, temperature=temperature, stream=index)
        for index, prompt in enumerate(prompts)
    ]


FAST = {(1, 0.9), (6, 0.9), (7, 0.9), (0, 0.0)}
CASES = [
    pytest.param(*plan, heat, marks=() if (place, heat) in FAST else pytest.mark.slow)
    for place, plan in enumerate(PLANS)
    for heat in (0.0, 0.9)
]


@pytest.mark.parametrize(("drafter", "rule", "temperature"), CASES)
def test_a_row_whose_law_is_lost_ends_there_and_the_others_go_on(drafter, rule, temperature):
    plan = Plan(fakes.ToyTarget(VOCAB), drafter, rule)
    last = (0, LEAVING, CERTAIN, BROKEN, EMPTY, PEAKED, 1, LEAVING)
    answers = generate_sequences(plan, PARAMS, rows([(2, token) for token in last], temperature))
    healthy = [0 if token in LOST else token for token in last]
    others = generate_sequences(plan, PARAMS, rows([(2, token) for token in healthy], temperature))
    for token, answer, other in zip(last, answers, others, strict=True):
        said = [token, *answer.tokens.tolist()]
        assert min(said) >= 0 and max(said) < VOCAB
        assert not {*said[:-1]} & {*LOST}
        assert answer.finish_reason == ("error" if said[-1] in LOST else "length")
        assert len(said) == 13 or said[-1] in LOST
        if token in (CERTAIN, PEAKED) and drafter is CHAIN and isinstance(rule, str):
            assert said[1] == 2
        if token not in LOST:
            assert said[1:] == other.tokens.tolist()


@pytest.mark.parametrize(
    ("drafter", "rule"),
    [
        (CHAIN, "rejection"),
        *(
            pytest.param(drafter, rule, marks=pytest.mark.slow)
            for drafter, rule in (
                (CHAIN, "block"),
                (TREE, "rejection"),
                (TREE, "block"),
            )
        ),
    ],
)
def test_kernels_say_of_broken_numbers_what_the_rule_says(monkeypatch, drafter, rule):
    kernel = functools.partial(pallas_tpu.rejection_sampling, interpret=True)
    monkeypatch.setattr(pallas_tpu, "rejection_sampling", kernel)
    by_kernel = dataclasses.replace(verify.RULES[rule], implementation="pallas_tpu")
    asked = rows([(2, token) for token in range(VOCAB)], 0.9)
    found, expected = (
        generate_sequences(Plan(fakes.ToyTarget(VOCAB), drafter, each), PARAMS, asked)
        for each in (by_kernel, rule)
    )
    for one, other in zip(found, expected, strict=True):
        assert one.tokens.tolist() == other.tokens.tolist()
        assert one.finish_reason == other.finish_reason


@pytest.mark.parametrize(
    "settings",
    [
        {"allowed_token_ids": (1,), "bad_words": ((1,),)},
        {"bad_words": tuple((token,) for token in range(VOCAB))},
        {"logits_processors": (lambda logits, _, __: logits * jnp.nan,)},
    ],
)
@pytest.mark.parametrize("temperature", [0.0, pytest.param(1.0, marks=pytest.mark.slow)])
def test_a_row_that_may_say_nothing_says_so(settings, temperature):
    plan = Plan(fakes.ToyTarget(VOCAB), CHAIN)
    asked = [
        SequenceParams((0,), 6, temperature=temperature, **settings),
        SequenceParams((0,), 6, temperature=temperature),
    ]
    silent, other = generate_sequences(plan, PARAMS, asked)
    assert silent.finish_reason == "error" and not silent.tokens.size
    assert other.finish_reason == "length" and other.tokens.size == 6


@pytest.mark.parametrize("rule", ["rejection", "block", "match", "coupled"])
def test_a_greedy_row_that_may_say_nothing_says_so_beside_a_sampled_one(rule):
    silent = SequenceParams((0,), 4, allowed_token_ids=(1,), bad_words=((1,),))
    other = SequenceParams((0,), 4, temperature=1.0, stream=3)
    for drafter in (CHAIN, fakes.TableDrafter(1)):
        plan = Plan(fakes.ToyTarget(VOCAB), drafter, rule)
        lost, fine = generate_sequences(plan, PARAMS, [silent, other])
        assert lost.finish_reason == "error" and not lost.tokens.size
        assert fine.tokens.tolist() == generate_sequences(plan, PARAMS, [other])[0].tokens.tolist()


def test_a_temperature_that_float32_cannot_divide_by_is_refused():
    for temperature in (1e-6, 1e-37, 1e31, -1.0):
        with pytest.raises(ValueError, match=r"temperature=.* must be 0 \(greedy\), or 1e-05 to"):
            SequenceParams((0,), 4, temperature=temperature)


def test_a_tree_that_follows_confidence_grows_where_an_infinite_logit_forces_tokens():
    force = lambda logits, tokens, length: logits.at[(tokens[length - 1] + 1) % VOCAB].set(jnp.inf)
    rows = [SequenceParams((1,), max_tokens=25, logits_processors=(force,))]
    table = fakes.table(0, VOCAB, VOCAB)
    plain = fakes.run_rows(Plan(fakes.ToyTarget(VOCAB), NoDrafter()), Params(table), rows)
    said = fakes.script(rows, plain)
    tree = Plan(fakes.ToyTarget(VOCAB), fakes.OnePassDrafter(4, VOCAB, "best_first"))
    grown = fakes.run_rows(tree, Params(table, said), rows)[0]
    assert grown.tokens.tolist() == plain[0].tokens.tolist()
    assert grown.rounds == 5 and grown.drafted == 40


def test_an_infinite_logit_of_a_function_of_the_users_forces_its_token():
    force = lambda logits, _, __: logits.at[1].set(jnp.inf)
    for temperature in (0.0, 1.0):
        row = SequenceParams((0,), 6, temperature=temperature, logits_processors=(force,))
        (answer,) = generate_sequences(Plan(fakes.ToyTarget(VOCAB), CHAIN), PARAMS, [row])
        assert answer.tokens.tolist() == [1] * 6


NUMBER = st.floats(width=32) | st.sampled_from([np.nan, np.inf, -np.inf, 3e38, -3e38, 0.0])


@few(60)
@given(
    st.lists(NUMBER, min_size=8, max_size=8),
    st.sampled_from([0.0, 1e-5, 0.7, 1e30]),
    st.integers(0, 9),
    st.floats(0.01, 1),
    st.floats(0, 1),
    st.floats(0, 1, exclude_max=True),
)
def test_what_is_drawn_of_any_numbers_is_a_token_that_has_weight(logits, heat, k, p, low, uniform):
    one = lambda value, dtype=jnp.float32: jnp.array([value], dtype)
    settings = Sampling(
        dict(temperature=one(heat), min_p=one(low), top_k=one(k, jnp.int32), top_p=one(p)),
        names=tuple(sampling.FILTERS) if heat else (),
    )
    logits = jnp.array([logits], jnp.float32)
    distribution = sampling.process_logits(logits, settings)
    assert settings.greedy or not (jnp.isnan(distribution) | jnp.isposinf(distribution)).any()
    usable = ~(jnp.isnan(logits) | jnp.isneginf(logits))
    if not usable.any():
        assert jnp.isneginf(distribution).all() or settings.greedy
        return
    draw = (
        sampling.argmax
        if settings.greedy
        else lambda distribution: sampling.draw(distribution, one((uniform, 0)))
    )
    token = int(draw(distribution)[0])
    assert usable[0, token] and distribution[0, token] > -jnp.inf

"""Tests of NaN and infinite logits in target and drafter, and of fully masked rows."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jspec import verify
from jspec.core import sampling
from jspec.core.filters import FILTERS
from jspec.core.types import Params, Sampling
from jspec.drafters import NoDrafter
from jspec.engine.functional import SequenceParams, generate_sequences
from jspec.engine.plan import Plan
from jspec.kernels.rejection_sampling import pallas_tpu
from tests import fakes
from tests.hostile.junk import few

VOCAB = 8
LEAVING, CERTAIN, BROKEN, EMPTY, PEAKED = 3, 4, 5, 6, 7  # tokens, named by what follows them
DEGENERATE = (BROKEN, EMPTY)  # no token has positive probability
TARGET = np.array(fakes.table(0, VOCAB, VOCAB))
TARGET[:LEAVING, LEAVING:] = -np.inf  # the first three tokens lead only to each other
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
    pytest.param(*plan, heat, marks=() if (index, heat) in FAST else pytest.mark.slow)
    for index, plan in enumerate(PLANS)
    for heat in (0.0, 0.9)
]


@pytest.mark.parametrize(("drafter", "rule", "temperature"), CASES)
def test_a_row_finishes_at_a_degenerate_distribution_and_others_continue(
    drafter, rule, temperature
):
    plan = fakes.whole(fakes.ToyTarget(VOCAB), drafter, rule)
    last = (0, LEAVING, CERTAIN, BROKEN, EMPTY, PEAKED, 1, LEAVING)
    answers = generate_sequences(plan, PARAMS, rows([(2, token) for token in last], temperature))
    healthy = [0 if token in DEGENERATE else token for token in last]
    others = generate_sequences(plan, PARAMS, rows([(2, token) for token in healthy], temperature))
    for token, answer, other in zip(last, answers, others, strict=True):
        tokens = [token, *answer.tokens.tolist()]
        assert min(tokens) >= 0 and max(tokens) < VOCAB
        assert not {*tokens[:-1]} & {*DEGENERATE}
        assert answer.finish_reason == ("error" if tokens[-1] in DEGENERATE else "length")
        assert len(tokens) == 13 or tokens[-1] in DEGENERATE
        if token in (CERTAIN, PEAKED) and drafter is CHAIN and isinstance(rule, str):
            assert tokens[1] == 2
        if token not in DEGENERATE:
            assert tokens[1:] == other.tokens.tolist()


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
def test_kernels_equal_the_rules_on_broken_numbers(monkeypatch, drafter, rule):
    kernel = functools.partial(pallas_tpu.rejection_sampling, interpret=True)
    monkeypatch.setattr(pallas_tpu, "rejection_sampling", kernel)
    target = fakes.ToyTarget(VOCAB)
    sequences = rows([(2, token) for token in range(VOCAB)], 0.9)
    actual, expected = (
        generate_sequences(
            fakes.whole(target, drafter, rule, sampling_backend=backend), PARAMS, sequences
        )
        for backend in ("pallas_tpu", "xla")
    )
    for left, right in zip(actual, expected, strict=True):
        assert left.tokens.tolist() == right.tokens.tolist()
        assert left.finish_reason == right.finish_reason


@pytest.mark.parametrize(
    "settings",
    [
        {"allowed_token_ids": (1,), "bad_words": ((1,),)},
        {"bad_words": tuple((token,) for token in range(VOCAB))},
        {"logits_processors": (lambda logits, _, __: logits * jnp.nan,)},
    ],
)
@pytest.mark.parametrize("temperature", [0.0, pytest.param(1.0, marks=pytest.mark.slow)])
def test_a_row_that_allows_no_token_finishes_with_an_error(settings, temperature):
    plan = fakes.whole(fakes.ToyTarget(VOCAB), CHAIN)
    sequences = [
        SequenceParams((0,), 6, temperature=temperature, **settings),
        SequenceParams((0,), 6, temperature=temperature),
    ]
    masked, other = generate_sequences(plan, PARAMS, sequences)
    assert masked.finish_reason == "error" and not masked.tokens.size
    assert other.finish_reason == "length" and other.tokens.size == 6


@pytest.mark.parametrize("rule", ["rejection", "block", "match", "coupled"])
def test_a_greedy_row_that_allows_no_token_does_not_affect_a_sampled_one(rule):
    masked = SequenceParams((0,), 4, allowed_token_ids=(1,), bad_words=((1,),))
    healthy = SequenceParams((0,), 4, allowed_token_ids=(1,), bad_words=((2,),))  # same program
    other = SequenceParams((0,), 4, temperature=1.0, stream=3)
    for drafter in (CHAIN, fakes.TableDrafter(1)):
        plan = fakes.whole(fakes.ToyTarget(VOCAB), drafter, rule)
        failed, sampled = generate_sequences(plan, PARAMS, [masked, other])
        beside, alike = generate_sequences(plan, PARAMS, [healthy, other])
        assert failed.finish_reason == "error" and not failed.tokens.size
        assert beside.tokens.tolist() == [1] * 4
        assert sampled.tokens.tolist() == alike.tokens.tolist()


def test_temperatures_outside_the_range_of_float32_raise():
    for temperature in (1e-6, 1e-37, 1e31, -1.0):
        with pytest.raises(
            ValueError, match=r"temperature=.* must be 0 \(greedy\), or 1e-05 to 1e\+30; "
        ):
            SequenceParams((0,), 4, temperature=temperature)


def test_a_best_first_tree_grows_where_an_infinite_logit_forces_tokens():
    force = lambda logits, tokens, length: logits.at[(tokens[length - 1] + 1) % VOCAB].set(jnp.inf)
    rows = [SequenceParams((1,), max_tokens=25, logits_processors=(force,))]
    table = fakes.table(0, VOCAB, VOCAB)
    plain = fakes.run_rows(Plan(fakes.ToyTarget(VOCAB), NoDrafter()), Params(table), rows)
    texts = fakes.script(rows, plain)
    tree = fakes.whole(fakes.ToyTarget(VOCAB), fakes.OnePassDrafter(4, VOCAB, "best_first"))
    answer = fakes.run_rows(tree, Params(table, texts), rows)[0]
    assert answer.tokens.tolist() == plain[0].tokens.tolist()
    assert answer.rounds == 5 and answer.drafted == 40


def test_an_infinite_logit_of_a_logits_processor_forces_its_token():
    force = lambda logits, _, __: logits.at[1].set(jnp.inf)
    for temperature in (0.0, 1.0):
        row = SequenceParams((0,), 6, temperature=temperature, logits_processors=(force,))
        plan = fakes.whole(fakes.ToyTarget(VOCAB), CHAIN)
        (answer,) = generate_sequences(plan, PARAMS, [row])
        assert answer.tokens.tolist() == [1] * 6


processed = jax.jit(sampling.process_logits)
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
def test_a_token_drawn_from_any_logits_has_positive_probability(logits, heat, k, p, low, uniform):
    one = lambda value, dtype=jnp.float32: jnp.array([value], dtype)
    settings = Sampling(
        dict(temperature=one(heat), min_p=one(low), top_k=one(k, jnp.int32), top_p=one(p)),
        names=tuple(FILTERS) if heat else (),
    )
    logits = jnp.array([logits], jnp.float32)
    distribution = processed(logits, settings)
    assert settings.greedy or not (jnp.isnan(distribution) | jnp.isposinf(distribution)).any()
    scaled = logits / (heat or 1)  # a logit may leave float32 here; ``no_token`` reads it so too
    usable = ~(jnp.isnan(scaled) | jnp.isneginf(scaled))
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

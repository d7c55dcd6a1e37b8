import dataclasses
import functools
import importlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec.drafters import DraftModel
from jspec.models import decoder
from jspec.plan import Plan
from jspec.types import Params
from tests import tiny

host = importlib.import_module("jspec.generate")
ROWS = [
    host.Row(prompt, max_tokens=24, temperature=temperature, stream=index)
    for index, (prompt, temperature) in enumerate(zip(tiny.prompts(), (0.0, 0.7, 1.0), strict=True))
]


def answers(drafter, rule="coupled", drafter_params=None, record_rounds=0):
    plan = Plan(tiny.TARGET, drafter, rule, record_rounds=record_rounds)
    weights = tiny.params().drafter if drafter_params is None else drafter_params
    return host.generate_rows(plan, Params(tiny.params().target, weights), ROWS)


def texts(found):
    return [answer.tokens.tolist() for answer in found]


@functools.cache
def plain():
    return texts(answers(tiny.NONE))


def test_a_single_drafted_token_changes_no_text():
    assert texts(answers(DraftModel(tiny.DRAFT_CONFIG, 1))) == plain()


@pytest.mark.parametrize("size", [48, 80])
def test_a_vocabulary_of_another_size_is_cut_or_padded(size):
    config = dataclasses.replace(tiny.DRAFT_CONFIG, vocab_size=size)
    weights = decoder.init_params(jax.random.key(1), config)
    drafter = DraftModel(config, 4, vocab_size=tiny.VOCAB)
    found = answers(drafter, drafter_params=weights, record_rounds=24)
    assert texts(found) == plain()
    drafted = [answer.trace[1][:, 1:].max() for answer in found]
    assert max(drafted) < min(size, tiny.VOCAB)


def test_rounds_past_the_reach_of_the_draft_model_are_plain_steps():
    found = answers(DraftModel(tiny.DRAFT_CONFIG, 4, max_length=20), record_rounds=24)
    assert texts(found) == plain()
    for row, answer in zip(ROWS, found, strict=True):
        accepted, drafted, _ = answer.trace
        roots = len(row.prompt) - 1 + np.cumsum([0, *(accepted + 1)])[:-1]
        nodes = roots[:, None] + np.arange(5)
        assert (drafted[:, 1:][nodes[:, 1:] >= 20] == -1).all()
        assert answer.drafts == (roots < 19).sum()


def test_a_model_that_drafts_for_itself_is_always_right_when_greedy():
    drafter = DraftModel(tiny.TARGET.config, 4)
    greedy = answers(drafter, drafter_params=tiny.params().target)[0]
    assert greedy.accepted[4] == greedy.drafts - 1  # the limit cuts the last draft short
    assert greedy.acceptance_length == pytest.approx(24 / 5, abs=0.3)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (dict(num_speculative_tokens=0), "num_speculative_tokens=0 must be at least 1"),
        (dict(draft_sample_method="argmax"), "draft_sample_method='argmax' must be"),
    ],
)
def test_settings_out_of_range_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        DraftModel(**{"config": tiny.DRAFT_CONFIG, "num_speculative_tokens": 4, **settings})


def test_a_sliding_window_must_hold_a_round():
    config = dataclasses.replace(tiny.DRAFT_CONFIG, windows=(5,))
    with pytest.raises(ValueError, match="sliding window of 5; it must be at most 3"):
        DraftModel(config, 4)


def test_models_in_bfloat16_throughout_run_as_they_do_on_an_accelerator():
    narrow = dict(cache_dtype="bfloat16", activation_dtype="bfloat16")
    target = decoder.Decoder(dataclasses.replace(tiny.TARGET.config, **narrow))
    drafter = DraftModel(dataclasses.replace(tiny.DRAFT_CONFIG, **narrow), 4)
    weights = jax.tree.map(lambda x: x.astype(jnp.bfloat16), tiny.params())
    short = [dataclasses.replace(row, max_tokens=6) for row in ROWS[1:2]]
    batch = host.start(Plan(target, drafter), weights, short)
    batch = host.advance(Plan(target, drafter), weights, batch)
    assert {leaf.dtype.name for leaf in jax.tree.leaves(batch.state.cache.layers)} == {"bfloat16"}
    assert [len(answer.tokens) for answer in host.read(batch)] == [6]

"""MLP and LSTM speculators: draws, memory, depths."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec.core.types import Params
from jspec.engine import functional as host
from tests import tiny
from tests.drafters import heads, rounds, speculators
from tests.drafters.rounds import ROWS, plan_of


def params_of(name, trained=True):
    weights = speculators.trained_params if trained else speculators.random_params
    return Params(tiny.params().target, weights(name))


def test_draws_depend_on_the_tokens_drawn_before():
    """Each stage sees the tokens before it: equal distributions at the root, others below."""
    drafter = speculators.drafter("lstm")
    params = params_of("lstm", trained=False)
    prompt = tiny.prompts((9,))[0]
    rows = [host.SequenceParams(prompt, max_tokens=20, temperature=1.0, stream=i) for i in range(4)]
    batch = host.start(plan_of(drafter, "rejection"), params, rows)
    state = batch.state
    draft, _ = jax.jit(drafter.propose)(params, batch.request, (), state.memory, state.history)
    first = np.asarray(draft.logits[:4, 0])
    np.testing.assert_allclose(first, np.broadcast_to(first[:1], first.shape), atol=1e-5)
    for row, other in ((0, 1), (0, 2), (0, 3)):
        same = bool(draft.tokens[row, 1] == draft.tokens[other, 1])
        near = np.allclose(draft.logits[row, 1], draft.logits[other, 1], atol=1e-3)
        assert near == same
    assert len(set(np.asarray(draft.tokens[:4, 1]).tolist())) > 1


def test_the_memory_is_the_targets_last_hidden_state_after_any_round():
    drafter = speculators.drafter("tied", 2, tree="sampled", tree_size=6)
    texts, lengths, state = rounds.after_rounds(drafter, params_of("tied"))
    features = heads.hidden_states(texts, drafter.capture_layers)[0][0]
    expected = np.asarray(features)[np.arange(3), lengths - 2]
    np.testing.assert_allclose(state.memory.hidden[:3], expected, atol=2e-4)
    leaves = jax.tree.leaves(state.memory)
    assert sum(leaf.size for leaf in leaves) == len(state.history.length) * (speculators.WIDTH + 1)


def test_the_default_depth_is_that_of_the_speculators_training():
    assert speculators.drafter("untied").max_depth == 4
    assert speculators.drafter("untied", tree="sampled", tree_size=9).max_depth == 4
    assert speculators.drafter("lstm", tree="eagle2").max_depth == 3
    assert speculators.drafter("lstm", tree_depth=2).max_depth == 2
    assert speculators.drafter("untied", tree=((0,), (0, 0))).max_depth == 2
    assert speculators.drafter("untied") == speculators.drafter("untied", 4)


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        (
            "untied",
            dict(num_speculative_tokens=5),
            "the draft is 5 deep, but the speculator has weights for n_predict=4 tokens",
        ),
        (
            "untied scaled",
            dict(tree=((0,), (0, 0), (0, 0, 0), (0, 0, 0, 0))),
            "the draft is 4 deep, but the speculator has weights for n_predict=3 tokens",
        ),
        (
            "tied",
            dict(num_speculative_tokens=5),
            "num_speculative_tokens:5 must be divisible by n_predict=2",
        ),
        (
            "lstm",
            dict(num_speculative_tokens=4),
            "num_speculative_tokens:4 must be divisible by n_predict=3",
        ),
        (
            "tied",
            dict(tree="eagle2", draft_sample_method="probabilistic"),
            "is not exact for tree='eagle2'",
        ),
        ("tied", dict(num_speculative_tokens=0), "num_speculative_tokens=0 must be at least 1"),
    ],
)
def test_depths_without_weights_are_refused(name, settings, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        speculators.drafter(name, **settings)


def test_a_speculator_in_bfloat16_drafts_as_it_does_on_an_accelerator():
    config = dataclasses.replace(speculators.CONFIGS["lstm"], activation_dtype="bfloat16")
    drafter = dataclasses.replace(speculators.drafter("lstm"), config=config)
    narrow = jax.tree.map(lambda x: x.astype(jnp.bfloat16), speculators.random_params("lstm"))
    rows = [host.SequenceParams(ROWS[1].prompt, max_tokens=6)]
    plan, params = plan_of(drafter), Params(tiny.params().target, narrow)
    batch = host.advance(plan, params, host.start(plan, params, rows))
    assert batch.state.memory.hidden.dtype == jnp.bfloat16
    assert [len(answer.tokens) for answer in batch.answers] == [6]

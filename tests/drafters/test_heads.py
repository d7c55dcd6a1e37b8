"""Drafters with a head: memory, prompts, programs."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec.core.types import Params
from jspec.drafters import Eagle
from jspec.engine import chunks
from jspec.engine import functional as host
from jspec.models import decoder
from tests import tiny
from tests.drafters import heads, rounds
from tests.drafters.rounds import ROWS, plain, plan_of
from tests.fakes import whole

WEIGHTS = {"random": heads.random_params, "trained": heads.trained_params}


def params_of(method, weights):
    return Params(tiny.params().target, WEIGHTS[weights](method))


# ----------------------------------------------------------------------------------------- memory


@pytest.mark.parametrize("method", heads.METHODS)
def test_the_memory_of_a_head_equals_that_of_one_pass_over_the_text(method):
    """No drafted row is left in the cache, whatever was accepted."""
    drafter = heads.drafter(method, 3, tree="sampled", tree_size=8)
    params = params_of(method, "trained")
    texts, lengths, state = rounds.after_rounds(drafter, params)
    fresh = rounds.recomputed(drafter, params, texts, lengths)
    np.testing.assert_allclose(state.memory.hidden[:3], fresh.hidden, atol=2e-4)
    if method == "medusa":
        assert state.memory.has_hidden[:3].all()
    else:
        rounds.assert_same_rows(state.memory.cache, fresh.cache, lengths - 1)


@pytest.mark.parametrize("method", heads.METHODS)
def test_a_prompt_prefilled_in_chunks_gives_the_memory_of_one_prefilled_at_once(
    method, monkeypatch
):
    drafter = heads.drafter(method, 3, tree="sampled", tree_size=8)
    plan, params = plan_of(drafter), params_of(method, "random")
    rows = [host.SequenceParams(prompt, max_tokens=8) for prompt in tiny.prompts((1, 17, 40, 33))]
    whole = host.start(plan, params, rows).state.memory
    monkeypatch.setattr(chunks, "TOTALS", (16,))
    parts = host.start(plan, params, rows).state.memory
    np.testing.assert_allclose(parts.hidden, whole.hidden, atol=1e-5)
    if method == "medusa":
        assert whole.has_hidden.tolist() == parts.has_hidden.tolist() == [False, True, True, True]
        return
    rounds.assert_same_rows(parts.cache, whole.cache, [0, 16, 39, 32], atol=1e-5)


# --------------------------------------------------------------------------------------- programs


def test_an_equal_drafter_traces_nothing_new(monkeypatch):
    traced = []
    propose = Eagle.propose
    monkeypatch.setattr(Eagle, "propose", lambda *a: traced.append(1) or propose(*a))
    for seed in (1, 2):
        drafter = heads.drafter("eagle3", 2, tree="eagle2", tree_size=6, tree_top_k=3)
        rows = [dataclasses.replace(row, seed=seed, max_tokens=30 + seed) for row in ROWS]
        host.generate_sequences(plan_of(drafter), params_of("eagle3", "random"), rows)
    assert len(traced) == 1


def test_models_in_bfloat16_throughout_run_as_they_do_on_an_accelerator():
    narrow = dict(cache_dtype="bfloat16", activation_dtype="bfloat16")
    target = decoder.Decoder(dataclasses.replace(tiny.TARGET.config, **narrow))
    config = heads.CONFIGS["eagle3"]
    config = dataclasses.replace(config, network=dataclasses.replace(config.network, **narrow))
    for tree in ("chain", "eagle2"):
        drafter = Eagle(config, target, 2, tree=tree, tree_size=3 if tree == "chain" else 5)
        plan = whole(target, drafter)
        weights = jax.tree.map(
            lambda x: x.astype(jnp.bfloat16) if x.dtype == jnp.float32 else x,
            params_of("eagle3", "random"),
        )
        rows = [dataclasses.replace(ROWS[1], max_tokens=6)]
        batch = host.advance(plan, weights, host.start(plan, weights, rows))
        held = jax.tree.leaves((batch.state.cache.layers, batch.state.memory.cache.layers))
        assert {leaf.dtype.name for leaf in held} == {"bfloat16"}
        assert [len(answer.tokens) for answer in batch.answers] == [6]


def test_nodes_past_the_longest_text_to_draft_for_are_not_drafted():
    drafter = heads.drafter("eagle", 3, tree="sampled", tree_size=8, max_length=30)
    plan = plan_of(drafter)
    answers = host.generate_sequences(plan, params_of("eagle", "trained"), ROWS, profile=tiny.NODES)
    for row, answer in zip(ROWS, answers, strict=True):
        root = len(row.prompt) - 1
        for accepted, nodes, _ in zip(*answer.trace, strict=True):
            depths = np.array(drafter.draft_tree.depth)[nodes >= 0]
            assert root + depths[1:].max(initial=0) < 30 or len(depths) == 1
            if 0 < root < min(26, len(row.prompt) + row.max_tokens - 4):
                assert depths.max() == 3
            root += accepted + 1
    texts = [text[len(row.prompt) :] for row, text in zip(ROWS, plain(), strict=True)]
    assert [answer.tokens.tolist() for answer in answers] == texts

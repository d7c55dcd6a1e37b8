"""Weights that are replaced between two steps of an engine."""

import dataclasses
import functools
import gc
import re
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jspec
from jspec import SamplingParams
from jspec.core.types import Params
from jspec.engine import functional as host
from jspec.engine.engine import Engine
from jspec.engine.pages import Pool
from jspec.engine.plan import Plan
from jspec.models import decoder
from tests import llm_fixtures, tiny

PLAN = Plan(tiny.TARGET, tiny.DRAFT, "coupled")


@functools.cache
def others() -> Params:
    """Return weights of the sizes of ``tiny.params()``."""
    loud = lambda params: jax.tree.map(lambda x: x * 6 if x.ndim > 1 else x, params)
    return Params(
        loud(decoder.init_params(jax.random.key(7), tiny.TARGET.config)),
        loud(decoder.init_params(jax.random.key(8), tiny.DRAFT_CONFIG)),
    )


def engine_of(params, has_pages=True):
    pool = Pool(PLAN, params, num_pages=80, page_size=4) if has_pages else None
    return Engine(PLAN, params, num_slots=3, capacity=64, pool=pool)


def sequences(**options):
    return [
        host.SequenceParams(prompt, **(dict(max_tokens=24, temperature=0.8 * (i % 2)) | options))
        for i, prompt in enumerate(tiny.prompts((1, 9, 23, 30)))
    ]


def texts(answers):
    return [answer.tokens.tolist() for answer in answers]


@pytest.mark.parametrize("has_pages", [True, False])
def test_new_weights_compile_nothing_and_no_page_of_the_old_ones_is_used(has_pages, caplog):
    rows, fresh = sequences(), engine_of(others(), has_pages)
    expected, engine = texts(fresh.run(rows)), engine_of(tiny.params(), has_pages)
    before = texts(engine.run(rows))
    assert before != expected and texts(engine.run(rows)) == before
    hits = engine.pool.blocks.hits if has_pages else None
    with jax.log_compiles():
        engine.params = jax.tree.map(np.asarray, others())
        answers = engine.run(rows)
    assert not re.findall(r"Compiling jit\((launch|prefill|seat|cancel)", caplog.text)
    assert texts(answers) == expected
    assert not has_pages or 0 < hits == engine.pool.blocks.hits
    for leaf, new in zip(*map(jax.tree.leaves, (engine.params, others())), strict=True):
        np.testing.assert_array_equal(leaf, new)


def test_sequences_that_run_go_on_with_the_new_weights():
    engine = engine_of(tiny.params())
    tickets = [engine.submit(row, rounds=2) for row in sequences(temperature=0.0)]
    while not any(len(ticket.answer.tokens) > 4 for ticket in tickets):
        engine.step()
    engine.params = others()
    begun = [len(ticket.answer.tokens) for ticket in tickets]
    while not engine.is_idle:
        engine.step()
    assert any(begun) and sum(ticket.num_preemptions for ticket in tickets) > 0
    rest = [
        host.SequenceParams(
            (*ticket.params.prompt, *ticket.answer.tokens[:count].tolist()), max_tokens=24 - count
        )
        for ticket, count in zip(tickets, begun, strict=True)
    ]
    answers = engine_of(others()).run(rest)
    for ticket, count, answer in zip(tickets, begun, answers, strict=True):
        np.testing.assert_array_equal(ticket.answer.tokens[count:], answer.tokens)


def test_weights_of_other_shapes_and_dtypes_are_refused_by_name():
    engine, params = engine_of(tiny.params()), tiny.params()
    narrow = params.target.replace(norm=params.target.norm.astype(jnp.bfloat16))
    tall = params.target.replace(head=jnp.zeros((32, 65)))
    tied = params.target.replace(head=None)
    for target, words in (
        (narrow, r"params.target.norm is bfloat16\[32\], but the engine has float32\[32\]"),
        (tall, r"params.target.head is float32\[32, 65\], but the engine has float32\[32, 64\]"),
        (tied, r"params.target.head is missing, but the engine has float32\[32, 64\]"),
        (None, "the weights do not fit Decoder: pass DecoderParams, not None"),
    ):
        with pytest.raises(ValueError, match=words):
            engine.params = params._replace(target=target)
    assert engine.params is params


def test_old_weights_leave_the_memory(root):
    model = llm_fixtures.loaded(root)["target"]
    draft = dataclasses.replace(model, params=jax.tree.map(jnp.copy, model.params))
    config = {"model": draft, "num_speculative_tokens": 2}
    llm = jspec.LLM(model.with_params(jax.tree.map(jnp.copy, model.params)), config, block_size=8)
    text, settings = "the quick brown fox", SamplingParams(temperature=0, max_tokens=5)
    [before] = llm.generate(text, settings)
    old = [weakref.ref(leaf) for leaf in jax.tree.leaves(llm.build.params)]
    llm.update_params(*jax.tree.map(np.asarray, (model.params, model.params)))
    del draft, config
    gc.collect()
    assert [ref() for ref in old if ref() is not None] == []
    [after] = llm.generate(text, settings)
    assert after.outputs[0].token_ids == before.outputs[0].token_ids
    assert all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(llm.build.params))


def test_an_llm_generates_with_new_weights(root):
    model = llm_fixtures.loaded(root)["target"]
    llm, settings = jspec.LLM(model, block_size=8), SamplingParams(temperature=0, max_tokens=9)
    text = "the quick brown fox jumps over the lazy dog. "
    [before], old = llm.generate(text, settings), llm.build.params.target
    llm.update_params(jax.tree.map(lambda x: jnp.roll(x, 1, -1), old))
    [after], hits = llm.generate(text, settings), llm.runtime.pools[0].blocks.hits
    llm.update_params(old)
    [again] = llm.generate(text, settings)
    assert again.outputs[0].token_ids == before.outputs[0].token_ids != after.outputs[0].token_ids
    assert hits == llm.runtime.pools[0].blocks.hits == 0

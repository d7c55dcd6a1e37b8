"""Targets with the gated delta rule through the engine: preemption, aborts, n and sampling."""

import functools

import jax
import pytest

import jspec
from jspec.core.types import Params
from jspec.drafters import NGram, NoDrafter, TokenRecycling
from jspec.engine import functional as host
from jspec.engine.engine import Engine
from jspec.engine.pages import Pool
from jspec.engine.plan import Plan
from jspec.models import decoder
from tests.families import models
from tests.families.prompts import PROMPTS
from tests.families.rows import SIZES

VOCAB = SIZES["vocab_size"]
DRAFTERS = {
    "plain": NoDrafter(),
    "chain": NGram(3, prompt_lookup_min=1, prompt_lookup_max=2),
    "tree": TokenRecycling(VOCAB, 3, tree_size=8),
}


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return models.saved("qwen3_next", tmp_path_factory.getbasetemp() / "families")


@functools.cache
def loaded(directory):
    return jspec.load(directory)


def rows():
    """Return sequences, greedy and sampled in turn; some share a beginning."""
    prompts = [*PROMPTS, [*PROMPTS[0], 5, 7], [*PROMPTS[0] * 3]]
    return [
        host.SequenceParams(tuple(prompt), max_tokens=20, temperature=0.8 * (i % 2), stream=i)
        for i, prompt in enumerate(prompts)
    ]


def texts(directory, name, *, num_pages=60, num_slots=3, rounds=None):
    """Return the texts of ``rows`` under ``coupled``, and the engine."""
    model = loaded(directory)
    plan, params = Plan(model.target, DRAFTERS[name], "coupled"), Params(model.params)
    pool = Pool(plan, params, num_pages=num_pages, page_size=4)
    engine = Engine(plan, params, num_slots=num_slots, capacity=80, pool=pool)
    tickets = [engine.submit(row, rounds=rounds) for row in rows()]
    while not engine.is_idle:
        engine.step()
    return [ticket.answer.tokens.tolist() for ticket in tickets], tickets


@functools.cache
def expected(directory):
    return texts(directory, "plain", num_slots=1)[0]


@pytest.mark.parametrize("name", ["chain", "tree"])
def test_texts_under_coupled_are_those_without_a_drafter(directory, name):
    found, tickets = texts(directory, name)
    assert found == expected(directory)
    accepted, drafted = (sum(int(x.answer.steps[part].sum()) for x in tickets) for part in (0, 1))
    assert drafted > 0 and (accepted > 0 or name == "chain")


def test_a_preempted_sequence_goes_on_with_the_same_text(directory):
    found, tickets = texts(directory, "tree", num_pages=18, rounds=2)
    assert sum(ticket.num_preemptions for ticket in tickets) > 0
    assert found == expected(directory)


def test_several_answers_of_a_prompt_and_an_abort_leave_the_others_as_they_are(directory):
    settings = jspec.SamplingParams(
        n=4, temperature=0.8, seed=3, max_tokens=12, detokenize=False, ignore_eos=True
    )
    prompts = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
    found = []
    for speculative in (None, {"method": "ngram", "num_speculative_tokens": 3}):
        config = speculative and speculative | {"rejection_sample_method": "coupled"}
        llm = jspec.LLM(loaded(directory), config, max_num_seqs=3, max_model_len=64, block_size=8)
        stream = llm.stream(prompts[0], settings)
        next(stream)
        stream.close()
        outputs = llm.generate(prompts, settings)
        found.append([list(each.token_ids) for output in outputs for each in output.outputs])
    assert found[0] == found[1] and len({*map(tuple, found[0])}) == 8


def test_a_network_with_states_is_refused_where_it_cannot_run(directory):
    model = loaded(directory)
    with pytest.raises(ValueError, match="draft model has layers of the gated delta rule"):
        jspec.LLM(model, {"method": "draft_model", "model": model, "num_speculative_tokens": 2})
    with pytest.raises(ValueError, match="runs as a target only"):
        decoder.trunk(model.params, model.config, jax.numpy.zeros((1, 2, 64)), None, None)
    with pytest.raises(ValueError, match="the gated delta rule"):
        jspec.LLM(model, deterministic=True)

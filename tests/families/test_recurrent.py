"""Networks with the gated delta rule through the engine: as targets and as draft models."""

import dataclasses
import functools

import jax
import numpy as np
import pytest

import jspec
from jspec.core import trees
from jspec.core.types import Params
from jspec.drafters import DFlash, DraftModel, NGram, NoDrafter, ParallelDraftModel, TokenRecycling
from jspec.engine import functional as host
from jspec.engine.engine import Engine
from jspec.engine.pages import Pool
from jspec.engine.plan import Plan
from jspec.models import decoder
from jspec.models.heads import dflash
from jspec.models.heads.dflash import DFlashConfig
from tests import networks, tiny
from tests.families import models
from tests.families.prompts import PROMPTS
from tests.families.rows import SIZES

VOCAB = SIZES["vocab_size"]
DRAFTERS = {
    "plain": NoDrafter(),
    "chain": NGram(3, prompt_lookup_min=1, prompt_lookup_max=2),
    "tree": TokenRecycling(VOCAB, 3, tree_size=8),
}
DEPTH = 3


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return models.saved("qwen3_next", tmp_path_factory.getbasetemp() / "families")


@functools.cache
def loaded(directory):
    return jspec.load(directory)


@functools.cache
def drafter(directory, name):
    """Return a drafter and its weights; draft models are like the target, or the target itself."""
    if name in DRAFTERS:
        return DRAFTERS[name], None
    model = loaded(directory)
    if name.startswith("dflash"):
        network = networks.build(
            vocab_size=VOCAB,
            hidden_size=SIZES["hidden_size"],
            intermediate_size=48,
            num_layers=1,
            num_heads=2,
            num_kv_heads=1,
            head_dim=16,
            max_positions=model.config.max_positions,
        )
        config = DFlashConfig(network, (0, 1), SIZES["hidden_size"], VOCAB, DEPTH + 1, VOCAB - 1)
        weights = networks.loud(dflash.init_params(jax.random.key(1), config))
        tree = {} if name == "dflash" else {"tree": "best_first", "tree_size": 8}
        return DFlash(config, model.target, DEPTH, noise="target", **tree), weights
    if name == "masks":
        masks = functools.partial(ParallelDraftModel, mask_token_id=VOCAB - 1, noise="target")
        return masks(
            model.config, model.target, DEPTH, tree="best_first", tree_size=8
        ), model.params
    weights = model.params if name == "same" else networks.loud(model.params, 1.05)
    return DraftModel(model.config, DEPTH, noise="target"), weights


def rows():
    """Return sequences, greedy and sampled in turn; some share a beginning."""
    prompts = [*PROMPTS, [*PROMPTS[0], 5, 7], [*PROMPTS[0] * 3]]
    return [
        host.SequenceParams(tuple(prompt), max_tokens=20, temperature=0.8 * (i % 2), stream=i)
        for i, prompt in enumerate(prompts)
    ]


def texts(directory, name, *, num_pages=60, num_slots=3, rounds=None):
    """Return the texts of ``rows`` under ``coupled``, their tickets, and the cached tokens."""
    model, (network, weights) = loaded(directory), drafter(directory, name)
    plan, params = Plan(model.target, network, "coupled"), Params(model.params, weights)
    pool = Pool(plan, params, num_pages=num_pages, page_size=4)
    engine = Engine(plan, params, num_slots=num_slots, capacity=80, pool=pool)
    tickets = [engine.submit(row, rounds=rounds) for row in rows()]
    while not engine.is_idle:
        engine.step()
    texts = [ticket.answer.tokens.tolist() for ticket in tickets]
    return texts, tickets, pool.blocks.hits


@functools.cache
def expected(directory):
    return texts(directory, "plain", num_slots=1)[0]


@pytest.mark.parametrize("name", ["chain", "tree", "like", "masks", "dflash", "dflash tree"])
def test_texts_under_coupled_are_those_without_a_drafter(directory, name):
    found, tickets, _ = texts(directory, name)
    assert found == expected(directory)
    accepted, drafted = (sum(int(x.answer.steps[part].sum()) for x in tickets) for part in (0, 1))
    assert drafted > 0 and (accepted > 0 or name not in ("tree", "like"))


def test_a_target_that_drafts_for_itself_accepts_all_behind_a_cached_prefix_too(directory):
    found, tickets, hits = texts(directory, "same")
    assert found == expected(directory) and hits > 0
    for ticket in tickets:
        accepted, drafted = (
            part[:-1] for part in ticket.answer.steps[:2]
        )  # A limit cuts the last.
        np.testing.assert_array_equal(accepted, drafted)


def test_drafted_tokens_are_those_of_the_text_before_them_read_at_once(directory):
    """Some drafts are rejected, so states behind accepted nodes are states of the text."""
    model, (network, weights) = loaded(directory), drafter(directory, "like")
    plan, params = Plan(model.target, network, "coupled"), Params(model.params, weights)
    row = dataclasses.replace(rows()[0], max_tokens=48)
    (answer,) = host.generate_sequences(plan, params, [row], profile=tiny.NODES)
    accepted, nodes, _ = answer.trace
    assert 0 < accepted.mean() < DEPTH
    text = [*row.prompt, *answer.tokens.tolist()]
    roots = len(row.prompt) - 1 + np.cumsum([0, *(accepted + 1)])[:-1]
    full = [index for index, drafted in enumerate(nodes) if (drafted >= 0).all()]
    tokens = np.zeros((len(full), len(text) + DEPTH), np.int32)
    for line, index in zip(tokens, full, strict=True):
        before = [*text[: roots[index]], *nodes[index]]
        line[: len(before)] = before
    tree = trees.chain_tree(*tokens.shape)
    cache = decoder.init_cache(model.config, len(tokens), 0)
    logits = decoder.forward(weights, model.config, tokens, tree, cache).logits
    at = roots[full][:, None] + np.arange(DEPTH)
    likeliest = np.take_along_axis(np.asarray(logits.argmax(-1)), at, 1)
    np.testing.assert_array_equal(nodes[full][:, 1:], likeliest)


@pytest.mark.parametrize("name", ["tree", "same"])
def test_the_next_turn_of_a_chat_begins_behind_the_last_answer(directory, name):
    """Its prompt is the first turn's with the answer; without a copy only the first turn's counts.

    An engine without a prefix cache gives the same texts.
    """
    model, (network, weights) = loaded(directory), drafter(directory, name)
    plan, params = Plan(model.target, network, "coupled"), Params(model.params, weights)
    turn, found, cached = rows()[3], [], []
    for keeps in (True, False, None):
        pool = Pool(
            plan, params, num_pages=60, page_size=4, enable_prefix_caching=keeps is not None
        )
        if keeps is False:
            pool.snapshots.has_copies = False
        engine = Engine(plan, params, num_slots=1, capacity=96, pool=pool)
        first = engine.run([turn])[0].tokens.tolist()
        longer = dataclasses.replace(turn, prompt=(*turn.prompt, *first, 9, 8, 7))
        second = engine.run([longer])[0]
        found.append((first, second.tokens.tolist()))
        cached.append(second.num_cached_tokens)
    assert found == found[:1] * 3
    assert len(turn.prompt) == 39 and len(first) == 20
    assert cached == [56, 36, 0]


@pytest.mark.parametrize("name", ["tree", "like"])
def test_a_preempted_sequence_goes_on_with_the_same_text(directory, name):
    found, tickets, _ = texts(directory, name, num_pages=18, rounds=2)
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
    with pytest.raises(ValueError, match="runs as a target or a draft model"):
        decoder.trunk(model.params, model.config, jax.numpy.zeros((1, 2, 64)), None, None)
    with pytest.raises(ValueError, match="the gated delta rule"):
        jspec.LLM(model, deterministic=True)

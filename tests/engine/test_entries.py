"""Cache entries: a layer with a state per row runs through the engine as one with slots does."""

import functools
import itertools

import jax.numpy as jnp
import numpy as np
import pytest

from jspec.core.entries import Commit
from jspec.core.types import Params
from jspec.drafters import NGram, TokenRecycling
from jspec.engine import functional as host
from jspec.engine import memory
from jspec.engine.engine import Engine
from jspec.engine.pages import Pool
from jspec.engine.plan import Plan
from tests import recurrent, tiny
from tests.recurrent import VOCAB, RecurrentDrafter, RecurrentTarget

CHAIN = NGram(4, prompt_lookup_min=1, prompt_lookup_max=3)
TREE = TokenRecycling(VOCAB, 3, tree_size=8)
NETWORK = RecurrentDrafter(3)  # Its weights are the target's, without attention.
AMPLE, SCARCE = 200, 46  # pages of 4 tokens


def sequences(count=6):
    """Return sequences, of which some are longer than a chunk, greedy and sampled in turn."""
    rng, lengths = np.random.default_rng(3), (150, 1, 9, 30, 2, 70)[:count]
    prompts = [tuple(rng.integers(0, VOCAB, size=length).tolist()) for length in lengths]
    options = [dict(max_tokens=20, temperature=0.7 * (i % 2), stream=i) for i in range(count)]
    return [host.SequenceParams(p, **each) for p, each in zip(prompts, options, strict=True)]


@functools.cache
def expected(attends):
    target, params = RecurrentTarget(attends), recurrent.init_params()
    return [recurrent.plain_text(target, params, each) for each in sequences()]


def engine_of(attends, drafter, num_pages=AMPLE):
    plan = Plan(RecurrentTarget(attends), drafter, "coupled")
    params = Params(recurrent.init_params(), recurrent.init_params())
    pool = num_pages and Pool(plan, params, num_pages=num_pages, page_size=4)
    return Engine(plan, params, num_slots=3, capacity=200, pool=pool or None)


def run(engine, rows, *, staggered=False, **options):
    """Run rows; if ``staggered``, each one arrives a step after the one before it."""
    tickets = []
    for row in rows:
        tickets.append(engine.submit(row, **options))
        if staggered:
            engine.step()
    while not engine.is_idle:
        engine.step()
    return tickets


def texts(tickets):
    return [ticket.answer.tokens.tolist() for ticket in tickets]


@pytest.mark.parametrize(
    ("attends", "drafter", "num_pages", "staggered"),
    [
        (True, CHAIN, AMPLE, True),
        (True, TREE, AMPLE, False),
        (False, TREE, AMPLE, True),
        (True, CHAIN, 0, False),
        (True, NETWORK, AMPLE, True),
        (True, NETWORK, 0, False),
    ],
)
def test_a_recurrent_target_has_the_texts_of_its_recurrence(attends, drafter, num_pages, staggered):
    """Six sequences share three slots, so states of ended ones must not reach those after them."""
    engine = engine_of(attends, drafter, num_pages)
    tickets = run(engine, sequences(), staggered=staggered)
    assert texts(tickets) == expected(attends)
    accepted, drafted = (
        sum(int(ticket.answer.steps[part].sum()) for ticket in tickets) for part in (0, 1)
    )
    assert 0 < accepted < drafted
    assert len(engine.runner.prefills) > 1 and max(engine.runner.prefills.values()) > 1


@pytest.mark.parametrize(("attends", "drafter"), [(False, TREE), (True, TREE), (True, NETWORK)])
def test_a_preempted_sequence_gets_its_state_back(attends, drafter):
    """Pages run out with attention; a state alone has none, so the test preempts by hand."""
    engine = engine_of(attends, drafter, SCARCE)
    tickets = [engine.submit(row, rounds=2) for row in sequences()]
    for count in itertools.count():
        engine.step()
        if not attends and count % 3 == 2:
            engine.preempt()  # reads the launch in flight
            engine.preempt()
        if engine.is_idle:
            break
    assert sum(ticket.num_preemptions for ticket in tickets) > 1
    assert texts(tickets) == expected(attends)


def test_a_recurrent_drafter_of_a_target_with_pages_gives_prefixes_up():
    plan = Plan(tiny.TARGET, NETWORK, "coupled")
    params = Params(tiny.params().target, recurrent.init_params(vocab_size=64))
    rows = [host.SequenceParams(each, max_tokens=12) for each in tiny.prompts()]
    alone = Engine(plan, params, num_slots=1, capacity=64, pool=None)
    expected = texts(run(alone, rows))
    pool = Pool(plan, params, num_pages=80, page_size=4)
    engine = Engine(plan, params, num_slots=2, capacity=64, pool=pool)
    assert [texts(run(engine, rows, staggered=True)) for _ in range(2)] == [expected] * 2
    assert engine.pool.blocks.hits == 0
    with pytest.raises(ValueError, match="RecurrentDrafter cannot start behind a cached prefix"):
        memory.pool_if_any(plan, params, settings={}, shares_prefixes=True, num_tokens=64)


def test_the_state_behind_prompts_of_several_chunks_has_nothing_of_their_padding():
    plan = Plan(RecurrentTarget(True), CHAIN, "coupled")
    params, rows = Params(recurrent.init_params()), sequences()
    batch = host.start(plan, params, rows)
    for row, h in zip(rows, batch.state.cache.layers[0].h, strict=False):
        plain = recurrent.Plain(plan.target, params.target)
        for token in row.prompt[:-1]:
            plain.feed(token)
        np.testing.assert_allclose(h, plain.h, rtol=1e-5, atol=1e-6)


def test_a_state_begins_behind_no_cached_prefix():
    engine, [first] = engine_of(True, CHAIN), sequences(1)
    once, again = run(engine, [first]), run(engine, [first])
    assert texts(once) == texts(again) == expected(True)[:1]
    assert engine.pool.blocks.hits == 0 and again[0].answer.num_cached_tokens == 0
    given = dict(settings={}, shares_prefixes=True, num_tokens=64)
    with pytest.raises(ValueError, match="RecurrentTarget cannot start behind a cached prefix"):
        memory.pool_if_any(engine.plan, engine.params, **given)
    assert memory.pool_if_any(Plan(tiny.TARGET, CHAIN), tiny.params(), **given)


def test_a_row_that_commits_nothing_keeps_its_state_whatever_was_computed_for_it():
    state = recurrent.State(jnp.ones((2, 8)))
    new = recurrent.Added(jnp.full((2, 1, 3, 8), np.nan).at[1, 0, 2].set(1.0))
    path, count = np.array([[0, 1], [2, 0]]), np.array([0, 1])
    after = state.append(new, Commit(path, count, length=np.array([5, 5])))
    np.testing.assert_array_equal(after.h, np.stack([np.ones(8), recurrent.DECAY + 1]))

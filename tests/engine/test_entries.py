"""Cache entries: a layer with a state per row runs through the engine as one with slots does."""

import dataclasses
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


def engine_of(attends, drafter, num_pages=AMPLE, **options):
    plan = Plan(RecurrentTarget(attends), drafter, "coupled")
    params = Params(recurrent.init_params(), recurrent.init_params())
    pool = num_pages and Pool(plan, params, num_pages=num_pages, page_size=4, **options)
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
        given = dict(shares_prefixes=True, num_tokens=64, num_seqs=2)
        memory.pool_if_any(plan, params, settings={}, **given)


def test_the_state_behind_prompts_of_several_chunks_has_nothing_of_their_padding():
    plan = Plan(RecurrentTarget(True), CHAIN, "coupled")
    params, rows = Params(recurrent.init_params()), sequences()
    batch = host.start(plan, params, rows)
    for row, h in zip(rows, batch.state.cache.layers[0].h, strict=False):
        plain = recurrent.Plain(plan.target, params.target)
        for token in row.prompt[:-1]:
            plain.feed(token)
        np.testing.assert_allclose(h, plain.h, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("attends", [True, False])
def test_a_state_begins_behind_a_prefix_as_far_as_a_snapshot_was_kept(attends):
    engine, [first] = engine_of(attends, CHAIN), sequences(1)
    longer = dataclasses.replace(first, prompt=(*first.prompt, 3, 1, 4, 1, 5))
    once, again, more = (run(engine, [each]) for each in (first, first, longer))
    assert texts(once) == texts(again) == expected(attends)[:1]
    plain = recurrent.plain_text(engine.plan.target, engine.params.target, longer)
    assert texts(more) == [plain]
    # 150 tokens: pages of 4 end at 148, where the prefill stopped for a snapshot.
    assert [each[0].answer.num_cached_tokens for each in (once, again, more)] == [0, 148, 148]


def test_snapshots_are_dropped_least_recently_used_first():
    engine = engine_of(True, CHAIN, most_snapshots=2)
    rows = [host.SequenceParams((token,) * 30, max_tokens=4) for token in (1, 2, 3)]
    first, second, third = rows
    cached = [run(engine, [row])[0].answer.num_cached_tokens for row in (*rows, second, first)]
    assert cached == [0, 0, 0, 28, 0] and len(engine.pool.snapshots) == 2
    assert run(engine, [third])[0].answer.num_cached_tokens == 0  # ``first`` took its place


def test_texts_that_share_a_prefix_share_the_snapshot_of_those_before_them():
    engine = engine_of(True, TREE)
    rng = np.random.default_rng(7)
    head = tuple(rng.integers(0, VOCAB, size=64).tolist())
    rows = [host.SequenceParams((*head, *tail), max_tokens=8) for tail in ((), (1, 2), (3, 4, 5))]
    target, params = engine.plan.target, engine.params.target
    plain = [recurrent.plain_text(target, params, row) for row in rows]
    assert texts(run(engine, rows, staggered=True)) == plain
    again = run(engine, rows, staggered=True)
    assert texts(again) == plain
    assert [each.answer.num_cached_tokens for each in again] == [60, 64, 64]


def test_new_weights_and_failed_sequences_leave_no_snapshot():
    engine, [first] = engine_of(True, CHAIN), sequences(1)
    run(engine, [first])
    assert len(engine.pool.snapshots) == 1
    engine.pool.blocks.clear_cache()
    assert len(engine.pool.snapshots) == 0
    ticket = engine.submit(first, listener=lambda _: 1 / 0)
    while not engine.is_idle:
        engine.step()
    assert ticket.error is not None and len(engine.pool.snapshots) == 0


def test_a_row_that_commits_nothing_keeps_its_state_whatever_was_computed_for_it():
    state = recurrent.State(jnp.ones((2, 8)))
    new = recurrent.Added(jnp.full((2, 1, 3, 8), np.nan).at[1, 0, 2].set(1.0))
    path, count = np.array([[0, 1], [2, 0]]), np.array([0, 1])
    after = state.append(new, Commit(path, count, length=np.array([5, 5])))
    np.testing.assert_array_equal(after.h, np.stack([np.ones(8), recurrent.DECAY + 1]))

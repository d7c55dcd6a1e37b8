"""Adaptive draft length: the length of each round, the texts, and the caches."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec import verify
from jspec.api import config
from jspec.core.types import Params
from jspec.drafters import NGram, ParallelDraftModel, Suffix
from jspec.drafters.adaptive.drafter import Adaptive
from jspec.engine import batch as host
from jspec.engine import costs as engine_costs
from jspec.engine import loop
from jspec.engine.plan import Plan
from jspec.verify import rejection
from tests import shipped, tiny
from tests.drafters import heads, hydras, speculators
from tests.fakes import (
    OracleDrafter,
    PrefixTarget,
    ScriptedDrafter,
    TableDrafter,
    ToyTarget,
    run_rows,
    script,
    table,
    whole,
)

V = 8
TARGET, WEIGHTS = PrefixTarget(V), table(3, 64, V, scale=3.0)
ROWS = [host.SequenceParams((1 + i,) * 3, max_tokens=(48, 12)[i], stream=i) for i in range(2)]
PLAIN = run_rows(Plan(TARGET, tiny.NONE), Params(WEIGHTS), ROWS)


@pytest.fixture
def quick_costs(monkeypatch):
    """Measure costs coarsely: these tests need some, not good ones."""
    monkeypatch.setattr(engine_costs, "_SECONDS", 0.5)
    monkeypatch.setattr(engine_costs, "_LAUNCH_SECONDS", 0.03)


def rounds(drafter, rows=ROWS, shared=None, kind=0, plain=PLAIN):
    """Return accepted and drafted tokens of every round of the first row; check all texts."""
    plan = Plan(TARGET, drafter)
    params = Params(WEIGHTS, script(rows, plain, kind, length=128))
    batch = host.start(plan, params, rows, profile=tiny.NODES)
    shared = loop.init_shared(plan) if shared is None else shared
    answers = host.advance(plan, params, batch.replace(shared=shared)).answers
    for answer, expected in zip(answers, plain, strict=True):
        np.testing.assert_array_equal(answer.tokens, expected.tokens)
    return answers[0].trace[0].tolist(), (answers[0].trace[1][:, 1:] >= 0).sum(1).tolist()


def costs(drafter, *seconds):
    """Return the shared state after a measurement of rounds."""
    return drafter.init_shared().replace(seconds=jnp.array(seconds, jnp.float32))


def test_a_table_of_batch_sizes_counts_the_rows_that_still_run():
    drafter = Adaptive(OracleDrafter(4, V), (0, 2, 4), ((2, 8, 2),))
    accepted, drafted = rounds(drafter)
    # The second row ends after its 12 tokens, in four rounds of three.
    assert drafted[:4] == [2] * 4 and set(drafted[4:-1]) == {4}
    assert accepted[:-1] == drafted[:-1]
    _, drafted = rounds(Adaptive(OracleDrafter(4, V), (0, 4), ((1, 8, 0),)))
    assert set(drafted) == {0}


def test_drafts_have_the_longest_length_until_costs_are_measured():
    drafter = Adaptive(ScriptedDrafter(4, V), (0, 2, 4))
    assert set(rounds(drafter)[1][:-1]) == {4}


def test_the_length_of_best_goodput_is_chosen_for_what_is_accepted():
    drafter = Adaptive(ScriptedDrafter(4, V), (0, 2, 4))
    right, wrong, half = 0, 1, 2
    even = costs(drafter, 1.0, 1.2, 1.4)
    assert set(rounds(drafter, shared=even, kind=right)[1][1:-1]) == {4}
    drafted = rounds(drafter, shared=costs(drafter, 1.0, 1.3, 1.6), kind=wrong)[1]
    assert drafted[0] > 0 and np.count_nonzero(drafted[6:40]) <= 3  # retried now and then
    drafted = rounds(drafter, shared=costs(drafter, 1.0, 1.2, 2.2), kind=half)[1]
    assert np.mean(np.array(drafted[:-2]) == 2) > 0.6
    dear = costs(drafter, 1.0, 6.0, 7.0)  # no draft can pay
    assert set(rounds(drafter, shared=dear, kind=right)[1]) == {0}


def test_a_length_is_kept_until_another_looks_better_by_more_than_a_little():
    drafter = Adaptive(OracleDrafter(4, V), (2, 4))
    # All drafts are accepted: in the end 3 and 5 tokens a round are expected.
    for better, lengths in ((1.04, {2}), (1.15, {2, 4})):
        _, drafted = rounds(drafter, shared=costs(drafter, 3.0, 5.0 / better))
        assert drafted[0] == 2 and set(drafted[:-1]) == lengths, better


@functools.cache
def long_text():
    """Return a row, and its text by plain decoding."""
    rows = [dataclasses.replace(ROWS[0], max_tokens=440)]
    return rows, run_rows(Plan(TARGET, tiny.NONE), Params(WEIGHTS), rows)


def test_a_paused_row_is_retried_at_intervals_that_double():
    rows, plain = long_text()
    drafter = Adaptive(ScriptedDrafter(4, V), (0, 2, 4))
    plan = Plan(TARGET, drafter)
    params = Params(WEIGHTS, script(rows, plain, 1, length=512))
    batch = host.start(plan, params, rows, profile=tiny.NODES).replace(
        shared=costs(drafter, 1.0, 1.3, 1.4)
    )
    (answer,) = host.advance(plan, params, batch).answers
    lengths = (answer.trace[1][:, 1:] >= 0).sum(1)
    drafted = np.flatnonzero(lengths)
    pauses = np.diff(drafted)[np.diff(drafted) > 1] - 1
    assert lengths[0] == 4 and set(lengths[drafted[-8:-1]]) == {2}  # a retry is short
    assert pauses[:6].tolist() == [4, 8, 16, 32, 64, 128] and set(pauses[6:]) == {128}


def test_a_prompt_that_ends_like_a_text_is_drafted_for_like_any_other():
    around = jnp.eye(V)[(jnp.arange(V) + 1) % (V - 1)] * 30  # emits 0 to V - 2 in turn, never V - 1
    drafter = Adaptive(NGram(4, 1, 3), (0, 2, 4))
    plan, answers = Plan(ToyTarget(V), drafter), []
    for stops in ((), (V - 1,)):
        row = host.SequenceParams((*range(V - 1), V - 1), max_tokens=80, stop_token_ids=stops)
        batch = host.start(plan, Params(around, None), [row])
        batch = batch.replace(shared=costs(drafter, 1.0, 1.05, 1.1))
        [answer] = host.advance(plan, Params(around, None), batch).answers
        answers.append(answer)
    np.testing.assert_array_equal(answers[0].tokens, answers[1].tokens)
    assert answers[1].rounds <= answers[0].rounds + 1 < 40


def test_a_text_that_becomes_easy_is_drafted_for_within_a_few_rounds():
    rows, plain = long_text()
    drafter = Adaptive(ScriptedDrafter(4, V), (0, 2, 4))
    plan = Plan(TARGET, drafter)
    known = script(rows, plain, 0, length=512)
    wrong = script(rows, plain, 1, length=512)
    batch = host.start(plan, Params(WEIGHTS, wrong), rows, profile=tiny.NODES)
    batch = batch.replace(shared=costs(drafter, 1.0, 1.2, 1.4))
    batch = host.advance(plan, Params(WEIGHTS, wrong), batch, 60)
    (answer,) = host.advance(plan, Params(WEIGHTS, known), batch).answers
    drafted = (answer.trace[1][:, 1:] >= 0).sum(1)[60:]
    assert np.flatnonzero(drafted == 4)[0] <= 40 and (drafted[-9:-1] == 4).all()


DRAFTERS = {
    "ngram": (NGram(4, 1, 3), lambda: None),
    "suffix": (Suffix(4, suffix_decoding_max_cached_tokens=64), lambda: None),
    "draft_model": (tiny.DRAFT, lambda: tiny.params().drafter),
    "parallel": (
        ParallelDraftModel(tiny.TARGET.config, tiny.TARGET, 4, mask_token_id=3),
        lambda: tiny.params().target,
    ),
    "eagle": (heads.drafter("eagle", 4), lambda: heads.random_params("eagle")),
    "medusa": (heads.drafter("medusa", 4), lambda: heads.random_params("medusa")),
    "mlp": (
        speculators.drafter("tied scaled", num_speculative_tokens=4),
        lambda: speculators.random_params("tied scaled"),
    ),
    "hydra": (hydras.drafter("mlp", num_speculative_tokens=3), lambda: hydras.random_params("mlp")),
}
LINES = [
    host.SequenceParams(prompt, max_tokens=20, temperature=t, stream=i)
    for i, (prompt, t) in enumerate(zip(tiny.prompts((1, 9, 5, 3)), (0, 0.8, 0, 1), strict=True))
]


@pytest.mark.parametrize(
    "name",
    [
        name if name in ("draft_model", "eagle") else pytest.param(name, marks=pytest.mark.slow)
        for name in DRAFTERS
    ],
)
def test_texts_stay_those_of_plain_decoding_while_lengths_change(name):
    inner, weights = DRAFTERS[name]
    most = inner.max_depth
    # As rows end one by one, every length is used, then none, then the longest again.
    drafter = Adaptive(inner, (0, 1, most), ((1, 1, most), (2, 2, 0), (3, 3, 1)))
    params = Params(tiny.params().target, weights())
    rows = [dataclasses.replace(row, max_tokens=20 - 5 * i) for i, row in enumerate(LINES)]
    plain = host.generate_sequences(Plan(tiny.TARGET, tiny.NONE), tiny.params(), rows)
    plan = Plan(tiny.TARGET, drafter, "coupled")
    answers = host.generate_sequences(plan, params, rows)
    for answer, expected in zip(answers, plain, strict=True):
        np.testing.assert_array_equal(answer.tokens, expected.tokens)
    assert plan.node_buckets == tuple(sorted({1, 2, most + 1}))


@pytest.mark.parametrize(
    "name",
    [
        name if name in ("draft_model", "parallel") else pytest.param(name, marks=pytest.mark.slow)
        for name in DRAFTERS
    ],
)
def test_a_shortened_draft_is_that_of_a_drafter_of_its_length(name):
    inner, weights = DRAFTERS[name]
    shaped = {"tree_size", "tree_depth"} & {field.name for field in dataclasses.fields(inner)}
    short = dataclasses.replace(inner, num_speculative_tokens=1, **dict.fromkeys(shaped))
    shortened = Adaptive(inner, (0, 1, inner.max_depth), ((1, 1, 1),))
    params = Params(tiny.params().target, weights())
    row = host.SequenceParams(tiny.prompts((19,))[0], max_tokens=60)
    (one, other) = (
        host.generate_sequences(Plan(tiny.TARGET, drafter), params, [row], profile=tiny.NODES)[0]
        for drafter in (shortened, short)
    )
    assert one.rounds == other.rounds
    np.testing.assert_array_equal(one.trace[0], other.trace[0])
    np.testing.assert_array_equal(one.trace[1][:, :2], other.trace[1])


def test_a_draft_model_pauses_and_catches_up():
    drafting_target = dataclasses.replace(
        tiny.DRAFT, config=tiny.TARGET.config
    )  # the target itself
    drafter = Adaptive(drafting_target, (0, 4), ((2, 2, 0),))
    params = Params(tiny.params().target, tiny.params().target)
    rows = [dataclasses.replace(LINES[i], max_tokens=size) for i, size in ((0, 60), (2, 24))]
    plan = Plan(tiny.TARGET, drafter)
    answer = host.generate_sequences(plan, params, rows, profile=tiny.NODES)[0]
    accepted, drafted = answer.trace[0], (answer.trace[1][:, 1:] >= 0).sum(1)
    assert set(drafted[:24]) == {0}  # while both rows run
    first = int(np.argmax(drafted > 0))
    assert first == 24  # all missing tokens are prefilled at once
    assert set(accepted[first:-1]) == {4}


@pytest.mark.parametrize("name", ["eagle", pytest.param("draft_model", marks=pytest.mark.slow)])
def test_a_paused_drafter_catches_up_before_it_drafts(name):
    inner, weights = DRAFTERS[name]
    params = Params(tiny.params().target, weights())
    rests, drafts = (
        Plan(tiny.TARGET, Adaptive(inner, (0, 4), ((1, 1, length),))) for length in (0, 4)
    )
    # 32 tokens are prefilled together, and the 9 after them before there is a draft.
    row = host.SequenceParams(tiny.prompts((19,))[0], max_tokens=45)
    batch = host.advance(rests, params, host.start(rests, params, [row]), 41)
    assert batch.answers[0].drafted == 0
    begun = host.advance(drafts, params, batch, 1)
    assert begun.answers[0].drafted > 0
    late = begun.state
    always = host.advance(drafts, params, host.start(drafts, params, [row])).state
    length = int(late.memory.inner.cache.length[0])
    assert length > 58
    for one, other in zip(
        jax.tree.leaves(late.memory.inner.cache.layers),
        jax.tree.leaves(always.memory.inner.cache.layers),
        strict=True,
    ):
        np.testing.assert_allclose(one[:, :, :length], other[:, :, :length], atol=1e-5)


@pytest.mark.parametrize(("name", "taken_in"), [("eagle", 32), ("draft_model", 0)])
def test_a_paused_drafter_prefills_only_when_its_buffer_is_full(name, taken_in):
    inner, weights = DRAFTERS[name]
    plan = Plan(tiny.TARGET, Adaptive(inner, (0, 4), ((1, 1, 0),)))
    params = Params(tiny.params().target, weights())
    row = host.SequenceParams(tiny.prompts((19,))[0], max_tokens=45)
    begun = host.start(plan, params, [row])
    before = int(begun.state.memory.inner.cache.length[0])
    rested = host.advance(plan, params, begun, 41).state
    assert rested.memory.inner.cache.length[0] - before == taken_in


def test_a_head_of_nan_does_not_hang_the_loop():
    inner, weights = DRAFTERS["eagle"]
    broken = jax.tree.map(
        lambda x: jnp.full_like(x, jnp.nan) if x.dtype.kind == "f" else x, weights()
    )
    plan = Plan(tiny.TARGET, Adaptive(inner, (0, 4), ((2, 2, 0),)))
    rows = [
        dataclasses.replace(LINES[i], max_tokens=size, temperature=0)
        for i, size in ((0, 56), (2, 42))
    ]
    answers = host.generate_sequences(plan, Params(tiny.params().target, broken), rows)
    plain = host.generate_sequences(Plan(tiny.TARGET, tiny.NONE), tiny.params(), rows)
    for answer, expected in zip(answers, plain, strict=True):
        np.testing.assert_array_equal(answer.tokens, expected.tokens)


def equations(program):
    """Return all equations of a program, with those of its branches and loops."""
    for line in program.eqns:
        yield line
        for inner in jax.tree.leaves(list(line.params.values()), is_leaf=_is_program):
            if _is_program(inner):
                yield from equations(getattr(inner, "jaxpr", inner))


def _is_program(x):
    return hasattr(x, "eqns") or hasattr(x, "jaxpr")


@pytest.mark.parametrize("name", ["draft_model", "eagle"])
def test_each_length_has_a_loop_of_its_own_and_no_branch_returns_a_cache(name):
    inner, weights = DRAFTERS[name]
    plan = Plan(tiny.TARGET, Adaptive(inner, (0, 1, 4)))
    params = Params(tiny.params().target, weights())
    batch = host.start(plan, params, LINES)
    shared = loop.init_shared(plan)
    run = lambda *state: loop.decode(plan, params, batch.request, *state, jnp.int32(99))
    lines = list(equations(jax.make_jaxpr(run)(shared, batch.state).jaxpr))
    shapes = lambda cache: {leaf.shape for leaf in jax.tree.leaves(cache.layers)}
    target, draft_cache = shapes(batch.state.cache), shapes(batch.state.memory.inner.cache)
    given_out = lambda kind: [
        {out.aval.shape for out in line.outvars} for line in lines if line.primitive.name == kind
    ]
    assert sum(target <= sizes for sizes in given_out("while")) == 1 + 3  # of turns, and of lengths
    assert given_out("cond")
    assert not any(sizes & (target | draft_cache) for sizes in given_out("cond"))


@pytest.mark.parametrize("name", ["eagle", pytest.param("draft_model", marks=pytest.mark.slow)])
def test_no_loop_copies_a_cache(name):
    inner, weights = DRAFTERS[name]
    plan = Plan(tiny.TARGET, Adaptive(inner, (0, 4)))
    params = Params(tiny.params().target, weights())
    batch = host.start(plan, params, LINES)
    arguments = (plan, params, batch.request, loop.init_shared(plan), batch.state, np.int32(9))
    text = shipped.compiled(loop.decode.lower(*arguments)).as_text()
    caches = batch.state.cache.layers, batch.state.memory.inner.cache.layers
    for shape in {leaf.shape for leaf in jax.tree.leaves(caches)}:
        copies = re.findall(rf"f32\[{','.join(map(str, shape))}\]\S* copy(?:-start)?\(", text)
        assert not copies, f"{len(copies)} copies of a cache of shape {shape}"


def test_one_step_is_one_round_of_any_length():
    plan = Plan(TARGET, Adaptive(NGram(4, 1, 3), (0, 1, 4), ((1, 2, 1), (3, 3, 0))))
    rows = [
        host.SequenceParams((1 + i,) * 3, max_tokens=28 - 7 * i, temperature=t, stream=i)
        for i, t in enumerate((0, 0.8, 0, 1))
    ]
    params = Params(WEIGHTS)
    begun = host.start(plan, params, rows)
    step = jax.jit(lambda shared, state: loop.step(plan, params, begun.request, shared, state))
    shared, state = loop.init_shared(plan), begun.state
    for count in range(1, 40):
        if state.done.all():
            break
        shared, state = step(shared, state)
        assert state.round == count
    whole = host.advance(plan, params, begun.replace(shared=loop.init_shared(plan)))
    assert whole.state.done.all()
    for one, other in zip(
        jax.tree.leaves((state.history, state.round)),
        jax.tree.leaves((whole.state.history, whole.state.round)),
        strict=True,
    ):
        np.testing.assert_array_equal(one, other)
    assert len({answer.drafted for answer in whole.answers}) > 1


def test_a_rule_for_drawn_chains_is_not_used_where_nothing_is_drafted():
    def walk(processed, draft, tree, uniforms, proposal):
        assert draft.logits is not None, "a chain without its distribution"
        return rejection.rejection(processed, draft, tree, uniforms, proposal)

    rule = verify.Rule("mine", walk, "round", frozenset({"chain"}))
    row, params = dataclasses.replace(ROWS[0], temperature=0.8), Params(WEIGHTS, table(1, V, V))
    plain = host.generate_sequences(Plan(TARGET, tiny.NONE), params, [row])
    plan = Plan(TARGET, Adaptive(TableDrafter(4), (0, 4), ((1, 1, 0),)), rule)
    (answer,) = host.generate_sequences(plan, params, [row])
    np.testing.assert_array_equal(answer.tokens, plain[0].tokens)
    assert answer.drafted == 0
    assert plan.in_mode(plan.drafter.modes[1]).effective_rule.name == "mine"


def test_given_node_buckets_are_used_in_every_mode():
    plan = Plan(tiny.TARGET, Adaptive(tiny.DRAFT, (0, 2, 4)), node_buckets=(5,))
    ladders = [plan.in_mode(mode).node_buckets for mode in plan.drafter.modes]
    assert ladders == [(1,), (3,), (5,)]


@pytest.mark.parametrize(
    ("inner", "ladders"),
    [(tiny.DRAFT, [(1,), (3,), (5,)]), (NGram(4), [(1,), (1, 3), (1, 5)])],  # may find nothing
)
def test_a_network_that_drafts_needs_no_program_for_no_draft(inner, ladders):
    plan = Plan(tiny.TARGET, Adaptive(inner, (0, 2, 4)))
    assert plan.node_buckets == (1, 3, 5)
    assert [plan.in_mode(mode).node_buckets for mode in plan.drafter.modes] == ladders


@pytest.mark.usefixtures("quick_costs")
def test_costs_are_measured_in_the_program_that_decodes():
    drafter = Adaptive(tiny.DRAFT, (0, 4))
    plan = Plan(tiny.TARGET, drafter)
    batch = host.start(plan, tiny.params(), LINES).replace(shared=loop.init_shared(plan))
    before = loop.launch._cache_size()
    shared = engine_costs.calibrate(plan, tiny.params(), batch)
    batch = batch.replace(shared=shared)
    assert (shared.seconds > 0).all() and np.isfinite(shared.seconds).all()
    assert shared.seconds[1] > shared.seconds[0]  # four passes of a draft model more
    host.advance(plan, tiny.params(), batch)  # the batch was not consumed
    assert loop.launch._cache_size() == before + 1


def test_costs_are_those_of_the_middle_of_a_text(monkeypatch):
    plan = Plan(tiny.TARGET, Adaptive(tiny.DRAFT, (0, 4)))
    rows = [
        host.SequenceParams((5, 6, 7), max_tokens=200),
        host.SequenceParams((8, 9), max_tokens=100),
    ]
    batch = host.start(plan, tiny.params(), rows).replace(shared=loop.init_shared(plan))
    states = []
    monkeypatch.setattr(
        engine_costs,
        "_seconds_per_round",
        lambda _plan, _params, batch, _rounds: states.append(batch.state) or 1.0,
    )
    engine_costs.calibrate(plan, tiny.params(), batch)
    history = states[0].history
    assert history.length.tolist() == [103, 52]
    assert states[0].cache.length.tolist() == states[0].memory.inner.cache.length.tolist()
    assert states[0].cache.length.tolist() == [102, 51]  # all but the root
    assert history.tokens[:, :5].tolist() == [[5, 6, 7, 5, 6], [8, 9, 8, 9, 8]]

    short = [host.SequenceParams((5, 6, 7), max_tokens=40)]  # too short for its middle to matter
    batch = host.start(plan, tiny.params(), short).replace(shared=loop.init_shared(plan))
    engine_costs.calibrate(plan, tiny.params(), batch)
    assert states[-1].history.length.tolist() == [3]


def test_a_batch_moved_to_another_device_continues_like_one_started_there():
    plan = whole(tiny.TARGET, tiny.DRAFT)
    batch = host.start(plan, tiny.params(), [host.SequenceParams((5, 6, 7), max_tokens=80)])
    other = host.start(plan, tiny.params(), [host.SequenceParams((9, 8) * 15, max_tokens=53)])
    there = host.with_prompts(
        plan, tiny.params(), batch, other.state.history.tokens, np.array([30], np.int32)
    )
    texts = [
        host.advance(plan, tiny.params(), each).state.history.tokens[0, :83].tolist()
        for each in (there, other)
    ]
    assert texts[0] == texts[1]
    assert batch.state.history.length.tolist() == [3]


def test_a_longer_draft_is_never_measured_as_cheaper(monkeypatch):
    drafter = Adaptive(tiny.NGRAM, (0, 2, 4))
    plan = Plan(tiny.TARGET, drafter)
    batch = host.start(plan, tiny.params(), LINES).replace(shared=loop.init_shared(plan))
    disturbed = {0: 2.0, 1: 3.0, 2: 1.0}  # seconds, by the length that is forced
    monkeypatch.setattr(
        engine_costs,
        "_seconds_per_round",
        lambda _plan, _params, batch, _rounds: disturbed[int(np.argmin(batch.shared.seconds))],
    )
    shared = engine_costs.calibrate(plan, tiny.params(), batch)
    assert shared.seconds.tolist() == [2.0, 3.0, 3.0]


def test_a_lookup_is_timed_as_if_it_always_matched():
    drafter = Adaptive(NGram(4, prompt_lookup_min=3, prompt_lookup_max=3), (0, 4))
    drafted, timed = (
        rounds(drafter, shared=costs(drafter, 9, 1).replace(timed=jnp.array(which)))[1]
        for which in (False, True)
    )
    assert drafted[:-1].count(0) > len(drafted) / 2
    assert timed[:-1].count(4) > len(timed) / 2 and 0 not in timed[:-1]


@pytest.mark.usefixtures("quick_costs")
def test_batches_of_another_shape_have_costs_of_their_own():
    drafter = Adaptive(tiny.NGRAM, (0, 4))
    plan, table = Plan(TARGET, drafter), engine_costs.CostTable()
    seconds = []
    for rows in (ROWS[:1], ROWS, ROWS[:1]):
        batch = host.start(plan, Params(WEIGHTS), rows).replace(shared=loop.init_shared(plan))
        seconds.append(table.price(plan, Params(WEIGHTS), batch).seconds)
    np.testing.assert_array_equal(seconds[0], seconds[2])
    assert (seconds[0] != seconds[1]).any() and (np.array(seconds) > 0).all()
    fixed = Plan(tiny.TARGET, Adaptive(tiny.NGRAM, (0, 4), ((1, 8, 0),)))
    assert loop.init_shared(fixed) == ()  # nothing to measure, nothing to save


@pytest.mark.parametrize(
    ("drafter", "settings", "message"),
    [
        (
            tiny.NONE,
            {"lengths": (0,)},
            "drafter=NoDrafter must draft chains of num_speculative_tokens; use a chain, or a "
            "fixed length.",
        ),
        (
            heads.drafter("eagle", tree="sampled", num_speculative_tokens=2),
            {"lengths": (0, 2)},
            "drafter=Eagle must draft chains of num_speculative_tokens; use a chain, or a fixed "
            "length.",
        ),
        (tiny.DRAFT, {"lengths": (0, 2)}, "lengths=(0, 2) must ascend to 4, the drafter's K."),
        (tiny.DRAFT, {"lengths": (-1, 4)}, "lengths=(-1, 4) must be at least 0."),
        (
            tiny.DRAFT,
            {"lengths": (0, 4), "batch_sizes": ((1, 2, 3),)},
            "batch_sizes=((1, 2, 3),) must be of 1 or more rows and of one of the lengths (0, 4), "
            "unlike (1, 2, 3).",
        ),
    ],
)
def test_lengths_that_cannot_be_chosen_are_refused(drafter, settings, message):
    with pytest.raises(ValueError) as error:
        Adaptive(drafter, **settings)
    assert str(error.value) == message


NGRAM = {"method": "ngram", "num_speculative_tokens": 5}


@pytest.mark.parametrize(
    ("keys", "lengths", "batch_sizes"),
    [
        ({"adaptive_length": True}, (0, 1, 2, 4, 5), ()),
        ({"adaptive_length": [0, 3]}, (0, 3, 5), ()),
        (
            {"num_speculative_tokens_per_batch_size": [[5, 64, 0], [1, 4, 3]]},
            (0, 3, 5),
            ((1, 4, 3), (5, 64, 0)),
        ),
    ],
)
def test_a_config_asks_for_lengths(keys, lengths, batch_sizes):
    drafter = config.read(NGRAM | keys).drafter(None, tiny.TARGET)
    assert drafter == Adaptive(NGram(5), lengths, batch_sizes)
    assert config.read(NGRAM | {"adaptive_length": False}) == config.read(NGRAM)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"adaptive_length": [0, 7]}, "K=7 is not among 0 to num_speculative_tokens=5"),
        ({"adaptive_length": "yes"}, "adaptive_length='yes' must be true or a list of whole"),
        ({"num_speculative_tokens_per_batch_size": [(1, 2)]}, "must be a list of (least, most, K)"),
        ({"num_speculative_tokens_per_batch_size": [(1, 4, 3), (4, 8, 2)]}, "overlap."),
        (
            {"num_speculative_tokens_per_batch_size": [(1, 4, 3)], "adaptive_length": True},
            "both choose K; give one.",
        ),
        (
            {"num_speculative_tokens": None, "adaptive_length": True},
            "num_speculative_tokens must be",
        ),
    ],
)
def test_lengths_that_do_not_fit_are_refused(keys, message):
    with pytest.raises(ValueError) as error:
        config.read(NGRAM | keys)
    assert message in str(error.value)


def test_methods_without_a_length_of_their_own_refuse_the_keys():
    given = {"method": "hybrid", "parts": [NGRAM, NGRAM], "adaptive_length": True}
    with pytest.raises(ValueError, match="adaptive_length=True is not used by method='hybrid'"):
        config.read(given)
    with pytest.raises(ValueError, match="must draft chains of num_speculative_tokens"):
        config.read(
            {
                "method": "suffix",
                "num_speculative_tokens": 4,
                "tree": "best_first",
                "adaptive_length": True,
            }
        ).drafter(None, tiny.TARGET)
    assert Suffix().tree_size == 13  # its chains follow the length of the match already

"""The length of drafts and the verification budget, in worlds whose costs and rates are known."""

import dataclasses
import functools
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jspec.core import trees
from jspec.core.types import Draft, Params
from jspec.engine import loop
from jspec.engine.budget import Budget, expected
from jspec.engine.costs import Costs
from jspec.engine.engine import Engine
from jspec.engine.functional import SequenceParams, generate_sequences
from jspec.engine.pacing import Pacing
from jspec.engine.plan import Pass, Plan
from jspec.engine.profile import Profile
from tests import fakes, tiny
from tests.fakes import ScriptedDrafter, TableDrafter, ToyTarget, table
from tests.verify import statistics
from tests.verify.test_joint_distribution import LENGTH, V

ROWS, LONGEST, ROUNDS = 8, 4, 8


@dataclasses.dataclass(frozen=True)
class PackedTarget(ToyTarget):
    """A target whose logits do not depend on which nodes its pass lists."""

    packs_nodes = True

    def forward(self, params, tokens, tree, cache, capture_layers=(), packing=None):
        return super().forward(params, tokens, tree, cache, capture_layers)


PLAN = Plan(PackedTarget(8), ScriptedDrafter(LONGEST, 8), packed=True, lengths=(0, 2, LONGEST))


class World:
    """Rounds that take known seconds, on rows whose drafts are accepted at known rates.

    A row has a draft in a known share of the rounds.
    """

    def __init__(self, rates, *, draft, node, shares=1.0, noise=0.05):
        self.rates, self.draft, self.node, self.noise = np.array(rates), draft, node, noise
        self.shares = np.broadcast_to(shares, ROWS)
        self.random = np.random.default_rng(0)
        self.pacing = Pacing(PLAN, ROWS)
        self.paces = []  # of the launches so far

    def seconds(self, length, total):
        return 1 + self.draft * length / LONGEST + self.node * total

    def fixed(self, length):
        """Return the tokens a second of a fixed K."""
        emitted = ROWS + sum(self.shares @ self.rates**depth for depth in range(1, length + 1))
        return emitted / self.seconds(length, ROWS * (length + 1))

    @property
    def best(self):
        return max(self.fixed(length) for length in PLAN.lengths)

    def run(self, launches):
        """Return the tokens a second."""
        tokens = seconds = 0
        for _ in range(launches):
            pace = self.pacing.choose(np.ones(ROWS, bool))
            ran, took = self.launch(pace)
            self.pacing.learn(pace, ran, np.ones(ROWS, bool), took)
            self.paces.append((pace.plan.max_depth, ran.drafted))
            tokens, seconds = tokens + (ran.accepted + 1).sum(), seconds + took
        return tokens / seconds

    def launch(self, pace):
        passes, length = pace.plan.passes(ROWS), pace.plan.max_depth
        count = min(ROUNDS, pace.rounds or ROUNDS)
        proposes = self.random.random((ROUNDS, ROWS)) < self.shares
        valid = np.array(cut(passes, length, pace.budget, proposes))[:count]
        drafted = valid[:, :, 1:].sum(2)
        passed = [
            next(
                each.total
                for each in passes
                if each.total >= ROWS + nodes.sum() and each.nodes > nodes.max(initial=0)
            )
            for nodes in drafted
        ]
        runs = self.random.random((count, ROWS, length)) < self.rates[:, None]
        accepted = np.cumprod(runs & valid[:, :, 1:], axis=2).sum(2)
        ran = types.SimpleNamespace(
            rounds=count,
            accepted=accepted,
            proposed=length * proposes,
            drafted=drafted,
            passed=np.array(passed),
        )
        took = sum(self.seconds(length, total) for total in passed)
        return ran, took * self.random.normal(1, self.noise)


@functools.partial(jax.jit, static_argnums=(0, 1))
def cut(passes, length, budget, proposes):
    def of_round(proposes):
        draft = Draft(
            tokens=jnp.zeros((ROWS, length + 1), jnp.int32),
            parents=trees.chain(length),
            valid=(jnp.arange(length + 1) == 0) | proposes[:, None],
            max_depth=length,
        )
        tree = trees.chain_tree(ROWS, length + 1)
        return budget.cut(passes, draft, tree, jnp.zeros(ROWS, bool)).valid

    return jax.vmap(of_round)(proposes)


WORLDS = {
    "easy, free nodes": ([0.9] * 8, 0.1, 0.001),
    "easy, dear nodes": ([0.9] * 8, 0.1, 0.04),
    "half, dear nodes": ([0.5] * 8, 0.2, 0.04),
    "hard, dear nodes": ([0.03] * 8, 0.2, 0.04),
    "hard, dear drafts": ([0.2] * 8, 2.0, 0.01),
    "mixed": ([0.95, 0.02] * 4, 0.1, 0.03),
    "one easy row": ([0.95] + [0.02] * 7, 0.1, 0.04),
}


@pytest.mark.parametrize(
    ("share", "draft", "node"), [(0.15, 0.2, 0.02), (0.3, 0.05, 0.02), (0.5, 0.2, 0.01)]
)
def test_rows_that_seldom_have_a_draft_count_for_little(share, draft, node):
    world = World([0.6] * ROWS, draft=draft, node=node, shares=share)
    world.run(100)
    assert world.run(300) > 0.95 * world.best


@pytest.mark.parametrize("name", WORLDS)
def test_tokens_a_second_come_near_the_best_fixed_length_or_exceed_it(name):
    rates, draft, node = WORLDS[name]
    world = World(rates, draft=draft, node=node)
    world.run(100)
    assert world.run(300) > 0.95 * world.best


def test_the_first_hundred_launches_of_a_hard_text_cost_little():
    world = World([0.03] * ROWS, draft=0.2, node=0.04)
    assert world.run(100) > 0.85 * world.best


def test_rows_whose_drafts_fail_leave_the_pass_to_the_others():
    world = World([0.95, 0.02] * 4, draft=0.1, node=0.03)
    world.run(100)
    assert world.run(300) > 1.08 * world.best
    drafted = np.concatenate([rounds for _, rounds in world.paces[100:]])
    assert drafted[:, ::2].mean() > 2 * drafted[:, 1::2].mean()


def test_a_text_that_becomes_easy_is_drafted_for_within_a_few_launches():
    world = World([0.02] * ROWS, draft=0.2, node=0.04)
    world.run(150)
    world.rates[:] = 0.95
    world.run(20)
    assert world.run(100) > 0.9 * world.best


@pytest.mark.parametrize(("before", "after"), [((0.1, 0.02), (0.1, 0.04)), ((0.5, 0.05), (0.1, 0))])
def test_costs_that_change_are_learned_anew(before, after):
    world = World([0.55] * ROWS, draft=before[0], node=before[1])
    world.run(100)
    world.draft, world.node = after
    world.run(150)
    assert world.run(200) > 0.9 * world.best


def test_a_paused_row_is_retried_less_and_less_often():
    world = World([0.0] * ROWS, draft=0.2, node=0.04)
    world.run(400)
    tried = np.concatenate([rounds[:, 0] > 0 for _, rounds in world.paces])
    first, last = tried[: len(tried) // 4].mean(), tried[-len(tried) // 4 :].mean()
    assert 0 < last < first / 2 and last < 0.05


def test_short_hard_texts_are_seldom_retried_where_drafts_are_slow():
    world = World([0.03] * ROWS, draft=2.0, node=0.04)
    world.run(100)
    goodputs = []
    for _ in range(20):  # texts of about 130 tokens
        for slot in range(ROWS):
            world.pacing.forget(slot)
        goodputs.append(world.run(16))
    assert np.mean(goodputs) > 0.95 * world.best


def test_a_new_sequence_of_a_slot_starts_afresh():
    world = World([0.95] * 7 + [0.0], draft=0.1, node=0.03)
    world.run(100)
    before = world.pacing._known.rates()[-1]
    world.pacing.forget(ROWS - 1)
    assert before < 0.3 < 0.6 < world.pacing._known.rates()[-1]


def test_a_table_of_batch_sizes_decides_alone():
    pacing = Pacing(dataclasses.replace(PLAN, batch_sizes=((3, 8, 2),)), ROWS)
    paces = [pacing.choose(np.arange(ROWS) < count) for count in (1, 3, 8)]
    assert [pace.plan.max_depth for pace in paces] == [LONGEST, 2, 2]
    assert all(pace.budget is None for pace in paces)


# ------------------------------------------------------------------------------------------ costs

KINDS = [(0, 8), (2, 8), (2, 16), (2, 24), (4, 8), (4, 24), (4, 40)]
SECONDS = np.array([1 + 0.1 * length + 0.02 * nodes for length, nodes in KINDS])


def test_costs_are_learned_from_launches_of_mixed_rounds():
    costs, random = Costs(KINDS), np.random.default_rng(0)
    for _ in range(200):
        rounds = random.multinomial(8, np.ones(len(KINDS)) / len(KINDS))
        costs.learn(rounds, rounds @ SECONDS * random.normal(1, 0.05))
    np.testing.assert_allclose(costs.seconds, SECONDS, rtol=0.06)


def test_a_kind_that_never_ran_is_judged_by_similar_ones():
    costs = Costs(KINDS)
    for kind in [0, 1, 2, 4, 6] * 10:
        costs.learn(8 * np.eye(len(KINDS))[kind], 8 * SECONDS[kind])
    np.testing.assert_allclose(costs.seconds, SECONDS, rtol=0.15)
    assert costs.doubt[5] > costs.doubt[4]


def test_a_pause_of_the_machine_moves_a_cost_little():
    costs, rounds = Costs(KINDS), 8 * np.eye(len(KINDS))[0]
    for _ in range(20):
        costs.learn(rounds, 8.0)
    before = costs.seconds[0]
    costs.learn(rounds, 800.0)
    assert costs.seconds[0] < 1.3 * before


def test_more_nodes_are_never_believed_cheaper():
    costs, random = Costs(KINDS), np.random.default_rng(1)
    for _ in range(50):
        kind = random.integers(len(KINDS))
        costs.learn(np.eye(len(KINDS))[kind], random.uniform(0.5, 2))
        assert (np.diff(costs.seconds[1:4]) >= 0).all()
        assert (np.diff(costs.seconds[4:]) >= 0).all()


# ----------------------------------------------------------------------------------------- budget


@st.composite
def drafts(draw):
    """Draw trees of some rows, whose valid nodes are closed under parents."""
    rows, nodes = draw(st.integers(1, 6)), draw(st.integers(1, 7))
    parents = np.array([-1, *(draw(st.integers(0, node - 1)) for node in range(1, nodes))])
    valid = np.array(draw(st.lists(st.booleans(), min_size=rows * nodes, max_size=rows * nodes)))
    valid = valid.reshape(rows, nodes)
    valid[:, 0] = True
    for node in range(1, nodes):
        valid[:, node] &= valid[:, parents[node]]
    rates = draw(st.lists(st.floats(0.01, 0.98), min_size=rows, max_size=rows))
    return parents.astype(np.int32), valid, np.array(rates, np.float32)


@settings(max_examples=30, deadline=None)
@given(case=drafts(), data=st.data())
def test_the_budget_leaves_the_best_set_of_nodes_with_their_parents(case, data):
    parents, valid, rates = case
    rows, nodes = valid.shape
    done = np.array(data.draw(st.lists(st.booleans(), min_size=rows, max_size=rows)))
    done[0] = False
    totals = sorted({rows, data.draw(st.integers(rows, rows * nodes)), rows * nodes})
    passes = [Pass(1 if total == rows else nodes, total, rows < total) for total in totals]
    passes[-1] = Pass(nodes, rows * nodes, False)
    seconds = np.array(data.draw(st.permutations([1.0, 1.3, 1.9])))[: len(passes)]
    depth = trees.from_parents(parents, nodes)
    tree = trees.broadcast(depth, rows)
    draft = Draft(jnp.zeros((rows, nodes), jnp.int32), parents, jnp.array(valid), max_depth=nodes)
    budget = Budget(jnp.array(rates), jnp.array(seconds, jnp.float32))
    left = np.array(budget.cut(tuple(passes), draft, tree, jnp.array(done)).valid)

    assert not (left & ~valid).any() and left[:, 0].all()
    np.testing.assert_array_equal(left[done], valid[done])  # ended rows take no part
    running = left & ~done[:, None]
    assert not any((running[:, node] & ~left[:, parents[node]]).any() for node in range(1, nodes))

    survival = np.where(valid & ~done[:, None], rates[:, None] ** np.array(depth.depth), 0)
    survival[:, 0] = 0
    goodputs = []
    for each, cost in zip(passes, seconds, strict=True):
        room = each.total if each.packed else rows * nodes
        ranked = np.sort(survival[:, : each.nodes].ravel())[::-1]
        emitted = (~done).sum() + ranked[: room - (~done).sum()].sum()
        goodputs.append(emitted / cost)
    kept = (~done).sum() + np.where(running, survival, 0).sum()
    holding = [
        kept / cost
        for each, cost in zip(passes, seconds, strict=True)
        if each.nodes > np.where(running, np.arange(nodes), 0).max() and each.total >= running.sum()
    ]
    assert max(holding) == pytest.approx(max(goodputs), rel=1e-4)


def test_the_expected_tokens_of_a_pass_are_those_of_its_likeliest_nodes():
    passes = (Pass(1, 2, False), Pass(3, 4, True), Pass(3, 6, False))
    survival = np.array([[0, 0.9, 0.8], [0, 0.1, 0.01]])
    np.testing.assert_allclose(expected(passes, survival, np.array(2)), [2, 3.7, 3.81])


def excess(rule, batch):
    """Return how far texts are from the target's distribution, relative to chance.

    Rows of different rates compete for passes of two nodes a row.
    """
    plan = Plan(PackedTarget(V), TableDrafter(3, ragged=True), rule, packed=True)
    params = Params(table(0, V, V), table(1, V, V))
    passes = plan.passes(batch)
    size = next(each.total for each in passes if each.total > 1.5 * batch)
    budget = Budget(
        jnp.linspace(0.2, 0.95, batch),
        jnp.array([1.0 if each.total == size else 9.0 for each in passes]),
    )
    passed = []

    def program(params, request, shared, state, until):
        options = jnp.int32(LENGTH), jnp.zeros(batch, bool), None, budget
        while not state.done.all():
            inputs = plan, Profile(), params, request, shared, state
            shared, state, ran = loop.launch(*inputs, *options)
            passed.extend(np.array(ran.passed[: int(ran.rounds)]).tolist())
        return shared, state

    texts, length = statistics.texts(
        plan, params, fakes.settings(batch), LENGTH, chunks=2, program=program
    )
    assert (length == LENGTH).all()
    assert max(passed) == size < 2.1 * batch  # of 4: the budget left half of the nodes out
    law = np.array(jax.nn.softmax(params.target))
    truth = statistics.joint_distribution(law, LENGTH)
    observed = statistics.counts(texts, V)
    return statistics.distance(observed, truth) / statistics.noise_floor(truth, len(texts))


@pytest.mark.parametrize("rule", ["rejection", "match", "coupled"])
def test_texts_have_the_targets_distribution_while_rows_compete_for_the_pass(rule):
    assert excess(rule, 50_000) < 1.1


def test_a_budget_that_looks_at_the_drafted_tokens_would_be_seen(monkeypatch):
    honest = Budget.cut

    def biased(budget, passes, draft, tree, done):
        likely = draft.replace(valid=draft.valid & (draft.tokens < 2).at[:, 0].set(True))
        return honest(budget, passes, likely, tree, done)

    monkeypatch.setattr(Budget, "cut", biased)
    assert excess("rejection", 40_000) > 1.5


# ----------------------------------------------------------------------------------------- engine


@pytest.mark.parametrize("lengths", [(4,), (0, 2, 4)])
def test_an_engine_that_paces_itself_keeps_the_texts_and_compiles_one_program_a_length(lengths):
    plan = Plan(tiny.TARGET, tiny.DRAFT, "coupled", packed=True, lengths=lengths)
    rows = [
        SequenceParams(prompt, max_tokens=24 + 5 * stream, temperature=0.9 * (stream % 2))
        for stream, prompt in enumerate(tiny.prompts((1, 9, 5, 3, 7, 2, 12, 4)))
    ]
    rows = [dataclasses.replace(row, stream=stream) for stream, row in enumerate(rows)]
    plain = generate_sequences(Plan(tiny.TARGET, tiny.NONE), tiny.params(), rows)
    before = loop.launch._cache_size()
    engine = Engine(plan, tiny.params(), num_slots=4, capacity=96, shared=())
    for _ in range(4):
        for answer, known in zip(engine.run(rows, rounds=2), plain, strict=True):
            np.testing.assert_array_equal(answer.tokens, known.tokens)
    assert loop.launch._cache_size() - before <= len(lengths)

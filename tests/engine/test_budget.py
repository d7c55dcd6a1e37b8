"""The verification budget: which drafted nodes it leaves, and that texts do not change by it."""

import dataclasses

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
from jspec.engine.engine import Engine
from jspec.engine.functional import SequenceParams, generate_sequences
from jspec.engine.plan import Pass, Plan
from jspec.engine.profile import Profile
from tests import fakes, tiny
from tests.fakes import TableDrafter, ToyTarget, table
from tests.verify import statistics
from tests.verify.test_joint_distribution import LENGTH, V


@dataclasses.dataclass(frozen=True)
class PackedTarget(ToyTarget):
    """A target whose logits do not depend on which nodes its pass lists."""

    packs_nodes = True

    def forward(self, params, tokens, tree, cache, capture_layers=(), packing=None):
        return super().forward(params, tokens, tree, cache, capture_layers)


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


@settings(max_examples=30)
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
    assert max(passed) == size < 2.1 * batch  # not 4: the budget left half of the nodes out
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
def test_an_engine_that_chooses_k_keeps_the_texts_and_compiles_one_program_a_length(lengths):
    plan = Plan(tiny.TARGET, tiny.DRAFT, "coupled", packed=True, lengths=lengths)
    rows = [
        SequenceParams(prompt, max_tokens=24 + 5 * stream, temperature=0.9)  # one profile
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

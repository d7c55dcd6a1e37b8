"""The choice of K and of verified rows, in simulated worlds whose costs and rates are given."""

import dataclasses
import functools
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec.core import trees
from jspec.core.types import Draft
from jspec.engine.plan import Plan
from jspec.engine.speculation import SpeculationController
from tests.fakes import ScriptedDrafter, ToyTarget

ROWS, LONGEST, ROUNDS, LAUNCHES = 8, 4, 8, 300
EVERY = np.ones(ROWS, bool)


@dataclasses.dataclass(frozen=True)
class PackedTarget(ToyTarget):
    """A target that may list the nodes of its pass; it never runs here."""

    packs_nodes = True


PLAN = Plan(PackedTarget(8), ScriptedDrafter(LONGEST, 8), packed=True, lengths=(0, 2, LONGEST))


@functools.partial(jax.jit, static_argnums=(0, 1))
def cut(passes, length, budget, proposes):
    """Return how many tokens of each row's chain the budget leaves, [R, B]."""

    def of_round(proposes):
        draft = Draft(
            tokens=jnp.zeros((ROWS, length + 1), jnp.int32),
            parents=trees.chain(length),
            valid=(jnp.arange(length + 1) == 0) | proposes[:, None],
            max_depth=length,
        )
        tree = trees.chain_tree(ROWS, length + 1)
        valid = budget.cut(passes, draft, tree, jnp.zeros(ROWS, bool)).valid
        return valid[:, 1:].sum(1)

    return jax.vmap(of_round)(proposes)


@dataclasses.dataclass
class World:
    """Launches of eight rows. ``rate`` is a number, or one of each row, or ``later`` at half time.

    Attributes:
      rate: probability that a drafted token is accepted.
      share: probability that a row has a draft in a round.
      draft: seconds that the longest draft adds to a round of one second.
      node: seconds that a node of the target's pass adds.
      noise: standard deviation of a launch's seconds, relative.
      pauses: probability that a launch seems to take 5 to 50 times as long.
      text: launches after which the sequences of all slots end, if they do.
      later: values that the fields have in the second half of the run.
    """

    rate: object
    share: float = 1.0
    draft: float = 0.2
    node: float = 0.03
    noise: float = 0.05
    pauses: float = 0.0
    text: int = 10**6
    later: dict = dataclasses.field(default_factory=dict)
    launches: int = LAUNCHES
    plans: list = dataclasses.field(default_factory=list)  # K and drafted tokens of each launch

    def run(self, pinned=None):
        """Return the tokens a second of a controller."""
        controller, random = SpeculationController(PLAN, ROWS), np.random.default_rng(0)
        controller.pinned, world, unread, tokens, seconds = pinned, self, None, 0, 0.0
        self.plans.clear()
        for index in range(self.launches):
            plan = controller.choose(EVERY)
            if unread is not None:  # The engine reads a launch after it started the next one.
                controller.learn(*unread)
            if index == self.launches // 2:
                world = dataclasses.replace(self, **self.later)
            ran, took = world.launch(plan, random)
            shown = took * (random.uniform(5, 50) if random.random() < self.pauses else 1)
            unread = plan, ran, EVERY, shown
            self.plans.append((plan.plan.max_depth, ran.drafted))
            tokens, seconds = tokens + (ran.accepted + 1).sum(), seconds + took
            if index % self.text == self.text - 1:
                for slot in range(ROWS):
                    controller.forget(slot)
        return tokens / seconds

    def launch(self, plan, random):
        """Return the results of a launch, and its seconds."""
        passes, length = plan.plan.passes(ROWS), plan.plan.max_depth
        count = min(ROUNDS, plan.rounds or ROUNDS)
        proposes = random.random((ROUNDS, ROWS)) < self.share
        drafted = length * proposes[:count]
        if length and np.ptp(plan.budget.seconds) > 0:
            drafted = np.array(cut(passes, length, plan.budget, proposes))[:count]
        most = [(ROWS + row.sum(), row.max()) for row in drafted]
        passed = [next(p.total for p in passes if p.total >= n and p.nodes > d) for n, d in most]
        rates = np.broadcast_to(self.rate, ROWS)[:, None]
        hits = random.random((count, ROWS, length)) < rates
        accepted = np.cumprod(hits & (np.arange(length) < drafted[..., None]), 2).sum(2)
        ran = types.SimpleNamespace(
            rounds=count,
            accepted=accepted,
            proposed=length * proposes,
            drafted=drafted,
            passed=np.array(passed),
        )
        took = sum(1 + self.draft * length / LONGEST + self.node * total for total in passed)
        return ran, took * random.normal(1, self.noise)

    def best_fixed(self):
        """Return the tokens a second of the best K that is the same in all launches."""
        return max(self.run(pinned=length) for length in PLAN.lengths)


WORLDS = {
    "easy, free nodes": World(0.9, node=0.001),
    "easy, dear nodes": World(0.9, node=0.04),
    "half": World(0.5, node=0.04),
    "drafting never pays": World(0.03, node=0.04),
    "drafting never pays in short texts": World(0.03, draft=0.05, node=0.04, text=16),
    "drafting never pays, drafts are slow": World(0.1, draft=0.8, node=0.02),
    "acceptance falls at half time": World(0.85, node=0.04, later={"rate": 0.05}),
    "acceptance rises at half time": World(0.05, node=0.04, later={"rate": 0.85}),
    "good and bad rows": World([0.95, 0.02] * 4),
    "one good row": World([0.95] + [0.02] * 7, node=0.04),
    "few lookups": World(0.1, share=0.2, draft=0.02, node=0.02),
    "some lookups": World(0.6, share=0.3, draft=0.05, node=0.02),
    "nodes become slow": World(0.6, node=0.005, later={"node": 0.05}),
    "drafts become fast": World(0.6, draft=1.2, node=0.01, later={"draft": 0.1}),
    "pauses, easy": World(0.85, node=0.02, noise=0.15, pauses=0.03),
    "pauses, hard": World(0.1, noise=0.15, pauses=0.03),
}


@pytest.mark.parametrize("name", WORLDS)
def test_tokens_a_second_are_those_of_the_best_fixed_k_or_more(name):
    world = WORLDS[name]
    best = world.best_fixed()
    assert world.run() > 0.95 * best


def test_rows_whose_drafts_fail_leave_the_pass_to_the_others():
    world = World([0.95, 0.02] * 4)
    best = world.best_fixed()
    assert world.run() > 1.08 * best
    drafted = np.concatenate([rounds for _, rounds in world.plans[100:]])
    assert drafted[:, ::2].mean() > 10 * drafted[:, 1::2].mean()


def test_a_row_in_vain_is_tried_less_and_less_often_but_never_given_up():
    world = World(0.0, node=0.04)
    world.run()
    tried = np.concatenate([rounds[:, 0] > 0 for _, rounds in world.plans])
    first, last = tried[: len(tried) // 4].mean(), tried[-len(tried) // 4 :].mean()
    assert 0 < last < first / 2 and last < 0.05


def test_a_text_that_becomes_easy_is_soon_drafted_for():
    world = World(0.02, node=0.04, later={"rate": 0.95})
    world.run()
    lengths = [length for length, _ in world.plans[LAUNCHES // 2 :]]
    assert lengths.count(0) <= 256 / ROUNDS and lengths.count(LONGEST) > 0.8 * len(lengths)


def choices(slow=(), untimed=()):
    """Return the K's of 100 launches, some of which were ``slow`` or not timed alone."""
    world, random = World(0.05, noise=0), np.random.default_rng(0)
    controller, lengths = SpeculationController(PLAN, ROWS), []
    for index in range(100):
        plan = controller.choose(EVERY)
        ran, took = world.launch(plan, random)
        lengths.append(plan.plan.max_depth)
        took *= 100 if index in slow else 1
        controller.learn(plan, ran, EVERY, None if index in untimed else took)
    return lengths


def test_the_launch_that_compiled_a_k_teaches_no_cost():
    usual = choices()
    assert choices(slow=[usual.index(length) for length in PLAN.lengths]) == usual


def test_launches_that_were_not_timed_alone_teach_no_cost():
    assert set(choices(untimed=range(100))) == {LONGEST}
    assert choices(untimed=range(0, 100, 3))[50:].count(0) > 40


def test_a_pause_of_the_machine_changes_no_choice():
    assert choices(slow=[50]) == choices()


def test_a_new_sequence_of_a_slot_begins_with_the_rate_of_all_rows():
    world, random = World([0.95] * 3 + [0.0] * 5, node=0.05), np.random.default_rng(0)
    controller = SpeculationController(PLAN, ROWS)
    for _ in range(100):
        plan = controller.choose(EVERY)
        ran, took = world.launch(plan, random)
        controller.learn(plan, ran, EVERY, took)
    before = ran.drafted
    controller.forget(ROWS - 1)
    after = world.launch(controller.choose(EVERY), random)[0].drafted
    assert before[0, 0] and after[0, 0] and not before[:, -1].any() and after[0, -1]


def test_a_table_of_batch_sizes_decides_alone():
    plan = dataclasses.replace(PLAN, batch_sizes=((3, 8, 2),))
    controller = SpeculationController(plan, ROWS)
    plans = [controller.choose(np.arange(ROWS) < count) for count in (1, 3, 8)]
    assert [each.plan.max_depth for each in plans] == [LONGEST, 2, 2]
    assert all(each.budget is None for each in plans)


def test_a_pinned_k_is_that_of_all_launches():
    controller = SpeculationController(PLAN, ROWS)
    for length in PLAN.lengths:
        controller.pinned = length
        assert controller.choose(EVERY).plan == PLAN.at_length(length)

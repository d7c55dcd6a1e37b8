"""Replicas: engines that share the requests, here all on JAX's first device."""

import functools

import jax
import pytest

from jspec.core.types import Params
from jspec.engine import replicas as replicas_module
from jspec.engine.functional import SequenceParams, generate_sequences
from jspec.engine.pages import Pool
from jspec.engine.plan import Plan
from jspec.engine.profile import Profile
from jspec.engine.replicas import Replicas
from tests import tiny

PLAN, PARAMS = Plan(tiny.TARGET, tiny.NONE), Params(tiny.params().target, None)
ROWS = [
    SequenceParams(prompt, max_tokens=12, temperature=0.7 * (stream % 2), stream=stream)
    for stream, prompt in enumerate(tiny.prompts((3, 17, 9, 5)))
]
FAILURE = jax.errors.JaxRuntimeError("INTERNAL: the device went away")


def made(count=2):
    """Return engines with two slots and launches of four rounds."""
    return Replicas(
        PLAN,
        PARAMS,
        meshes=[None] * count,
        make_pool=functools.partial(Pool, PLAN, num_pages=40, page_size=8),
        num_slots=2,
        capacity=64,
        profile=Profile(rounds=4),
    )


def submit(replicas, rows):
    every = [(row, "") for row in rows]
    return replicas.submit(every, rounds=None, scoring=None, priority=0)


def finished(replicas, tickets):
    """Run to the end, check that no page is held, and return the texts."""
    for _ in range(10_000):
        if all(ticket.finished for ticket in tickets):
            break
        replicas.step()
    replicas.abort([])
    assert replicas.is_idle and not any(pool.blocks.num_used for pool in replicas.pools)
    return [ticket.answer.tokens.tolist() for ticket in tickets]


@pytest.fixture(scope="module")
def alone():
    """The texts of each sequence alone."""
    return [generate_sequences(PLAN, PARAMS, [row])[0].tokens.tolist() for row in ROWS]


def watched(replicas):
    """Return a list to which the engines add their index at every dispatch and every reading."""
    events = []

    def note(kind, index, call, *args):
        events.append((kind, index))
        return call(*args)

    for index, engine in enumerate(replicas.engines):
        runner = engine.runner
        runner.launch = functools.partial(note, "launch", index, runner.launch)
        runner.bring = functools.partial(note, "read", index, runner.bring)
    return events


@pytest.mark.parametrize("count", [1, 3])
def test_texts_do_not_depend_on_the_number_of_engines(alone, count):
    replicas = made(count)
    assert finished(replicas, submit(replicas, ROWS)) == alone


def test_a_sequence_goes_to_the_engine_that_has_the_fewest():
    replicas = made()
    tickets = submit(replicas, ROWS[:3])
    assert [engine.num_waiting for engine in replicas.engines] == [2, 1]
    tickets += submit(replicas, ROWS[3:])
    assert [engine.num_waiting for engine in replicas.engines] == [2, 2]
    assert replicas.num_waiting == 4
    finished(replicas, tickets)


def test_among_idle_engines_a_prompt_goes_to_the_one_that_has_its_prefix():
    replicas = made()
    finished(replicas, submit(replicas, ROWS[:2]))
    finished(replicas, submit(replicas, ROWS[1:2]))
    assert [pool.blocks.hits for pool in replicas.pools] == [0, 8]


def test_every_engine_has_two_launches_before_any_is_read(alone):
    replicas = made()
    events = watched(replicas)
    assert finished(replicas, submit(replicas, ROWS)) == alone
    assert events[:4] == [("launch", 0), ("launch", 1)] * 2
    for at, (kind, index) in enumerate(events):
        if kind == "read":
            ahead = [events[:at].count((each, index)) for each in ("launch", "read")]
            assert 1 <= ahead[0] - ahead[1] <= 2


def test_an_engine_runs_on_while_the_launch_of_another_one_takes_long(monkeypatch, alone):
    replicas = made()
    events, slow = watched(replicas), replicas.engines[0]
    tickets = submit(replicas, ROWS[:2])
    is_done = replicas_module.EngineReplica.is_done.fget
    with monkeypatch.context() as patch:
        done = property(lambda each: each.engine is not slow and is_done(each))
        patch.setattr(replicas_module.EngineReplica, "is_done", done)
        while not tickets[1].finished:
            replicas.step()
    assert ("read", 0) not in events and events.count(("read", 1)) >= 3
    assert finished(replicas, tickets) == alone[:2]


def test_a_fault_in_one_engine_leaves_the_sequences_of_the_others_alone(alone):
    replicas = made()
    faulty = replicas.engines[0].runner

    def fail(*args):
        raise FAILURE

    faulty.launch, launch = fail, faulty.launch
    tickets = submit(replicas, ROWS)
    texts = finished(replicas, tickets)
    assert texts == [[], alone[1], [], alone[3]]
    assert ["the device went away" in str(ticket.error) for ticket in tickets[::2]] == [True] * 2
    faulty.launch = launch
    assert finished(replicas, submit(replicas, ROWS)) == alone


def test_a_step_that_fails_for_no_sequence_of_its_engine_ends_those_that_wait_there(alone):
    replicas = made()

    def fail():
        raise FAILURE

    replicas.engines[1].admission.admit = fail
    tickets = submit(replicas, ROWS)
    assert finished(replicas, tickets) == [alone[0], [], alone[2], []]
    assert [ticket.error is None for ticket in tickets] == [True, False] * 2


def test_sequences_of_every_engine_are_aborted(alone):
    replicas = made()
    tickets = submit(replicas, ROWS)
    replicas.step()
    replicas.abort(tickets[:2])
    assert [ticket.finished for ticket in tickets] == [True, True, False, False]
    assert finished(replicas, tickets)[2:] == alone[2:]


def test_no_sequence_stays_if_one_of_a_batch_is_refused():
    replicas = made()
    long = SequenceParams((1, 2, 3), max_tokens=1000)
    with pytest.raises(ValueError, match="max_tokens"):
        submit(replicas, [*ROWS[:2], long])
    assert replicas.is_idle

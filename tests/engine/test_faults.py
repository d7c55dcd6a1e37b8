"""Faults: one request ends with an error, the others have their texts, and nothing leaks."""

import dataclasses
import queue

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec.api.sampling_params import SamplingParams
from jspec.core.types import Params
from jspec.drafters import Suffix
from jspec.engine import batch_request, loop, profile, worker
from jspec.engine.engine import Engine
from jspec.engine.functional import SequenceParams
from jspec.engine.pages import Pool
from jspec.engine.plan import Plan
from jspec.grammar.followed import FollowedGrammar
from tests import llm_fixtures, tiny

DRAFTERS = {
    "none": (tiny.NONE, None),
    "draft_model": (tiny.DRAFT, tiny.params().drafter),
    "suffix": (Suffix(3, suffix_decoding_max_cached_tokens=256), None),
}
ROWS = [
    SequenceParams(prompt, max_tokens=8 + 3 * stream, temperature=0.7 * (stream % 2), stream=stream)
    for stream, prompt in enumerate(tiny.prompts((3, 17, 9, 5, 12)))
]
FAILURE = jax.errors.JaxRuntimeError("INTERNAL: the device went away\nand more")


def made(name="none", num_slots=2, num_pages=40, **options):
    drafter, weights = DRAFTERS[name]
    plan, params = Plan(tiny.TARGET, drafter, "coupled"), Params(tiny.params().target, weights)
    pool = Pool(plan, params, num_pages=num_pages, page_size=8)
    return Engine(plan, params, num_slots=num_slots, capacity=64, pool=pool, **options)


def finished(served, tickets):
    """Run to the end, check that no page is held, and return the texts."""
    for _ in range(400):
        if all(ticket.finished for ticket in tickets):
            break
        served.step()
    served.settle()
    assert served.is_idle and served.pool.blocks.num_used == 0
    return [ticket.answer.tokens.tolist() for ticket in tickets]


def texts(name="none", rows=ROWS):
    served = made(name)
    return finished(served, [served.submit(row) for row in rows])


def failing(original, when):
    """Return ``original`` which raises in the calls whose numbers ``when`` accepts."""
    calls = iter(range(10_000))

    def run(*args, **kwargs):
        if when(next(calls)):
            raise FAILURE
        return original(*args, **kwargs)

    return run


def forbid_five(logits, tokens, length):
    return logits.at[5].set(-jnp.inf)


def raises_when_traced(logits, tokens, length):
    raise ZeroDivisionError("of a user")


def raises_in_a_batch(logits, tokens, length):
    """Raise when a launch is traced, and not when the function is checked alone."""
    if "Batch" in type(logits).__name__:
        raise ZeroDivisionError("of a user")
    return logits


def raises_at_twelve(logits, tokens, length):
    """Raise on the host, inside a running program, once the text has twelve tokens."""

    def check(logits, length):
        if (length >= 12).any():
            raise ZeroDivisionError("of a user")
        return logits

    like = jax.ShapeDtypeStruct(logits.shape, logits.dtype)
    return jax.pure_callback(check, like, logits, length, vmap_method="expand_dims")


# ------------------------------------------------------------------------------------- bad requests


def test_more_sequences_than_may_wait_are_refused_and_those_that_wait_run():
    served = made(max_num_queued=2)
    tickets = [served.submit(row) for row in ROWS[:2]]
    with pytest.raises(queue.Full, match="max_num_queued=2 sequences wait already; submit"):
        served.submit(ROWS[2])
    served.step()  # both run now
    tickets += [served.submit(row) for row in ROWS[2:4]]
    served.abort(tickets.pop())  # gives its place back at once
    tickets.append(served.submit(ROWS[3]))
    assert finished(served, tickets) == texts(rows=ROWS[:4])
    with pytest.raises(ValueError, match="max_num_queued=0 must be whole and at least 1"):
        made(max_num_queued=0)


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (raises_when_traced, "raised ZeroDivisionError: of a user; it must be a pure function"),
        (lambda logits, *_: logits[:3], r"returned .* for logits \[64\]; return"),
        (lambda *_: None, r"returned None for logits \[64\]; return"),
        (lambda logits, *_: logits > 0, r"returned .* for logits \[64\]; return"),
        (lambda logits: logits, "raised TypeError"),
    ],
)
def test_a_logits_processor_that_cannot_be_traced_is_refused_before_it_runs(function, message):
    served = made()
    ticket = served.submit(ROWS[0])
    with pytest.raises(ValueError, match=message):
        served.submit(dataclasses.replace(ROWS[1], logits_processors=(function,)))
    assert finished(served, [ticket]) == texts(rows=ROWS[:1])


def test_a_call_with_a_broken_logits_processor_runs_nothing(tmp_path):
    llm = llm_fixtures.llm(tmp_path, "none")
    params = SamplingParams(max_tokens=4, ignore_eos=True)
    broken = SamplingParams(max_tokens=4, logits_processors=[raises_when_traced])
    with pytest.raises(ValueError, match=r"logits_processors of prompt 1: .* ZeroDivisionError"):
        llm.generate([[1, 2], [3, 4]], [params, broken])
    [output] = llm.generate([[1, 2]], params)
    assert len(output.outputs[0].token_ids) == 4


def test_functions_of_requests_that_ended_are_not_compiled_into_later_programs():
    served = made()
    row = dataclasses.replace(ROWS[0], logits_processors=(forbid_five,))
    finished(served, [served.submit(row)])
    ticket = served.submit(ROWS[1])
    served.step()
    assert not served.profile.wide
    assert finished(served, [ticket]) == texts(rows=ROWS[1:2])


# ------------------------------------------------------------------------------------ NaN in a page


BAD = max(set(range(tiny.VOCAB)).difference(*(row.prompt for row in ROWS)))  # in no prompt


def with_a_token_of_nan(params):
    embedding = params.target.embedding.at[BAD].set(jnp.nan)
    return params._replace(target=params.target.replace(embedding=embedding))


def without_it(row):
    """Return a sequence that never generates the token."""
    return dataclasses.replace(row, logit_bias=((BAD, -1e9),))


@pytest.mark.parametrize("name", ["none", "draft_model"])
def test_pages_of_a_sequence_with_nan_spoil_no_later_one(name):
    rows = [without_it(row) for row in ROWS]
    faulty = without_it(SequenceParams((1, 2, BAD, *range(4, 24)), max_tokens=8))
    expected = texts(name, rows)
    served = made(name, num_pages=9)  # so few that all are taken again
    served.runner.worker.params = with_a_token_of_nan(served.params)
    tickets = [served.submit(row) for row in (rows[0], faulty, *rows[1:], faulty)]
    first, nan, *rest, again = finished(served, tickets)
    assert [first, *rest] == expected and nan == again == []
    reasons = [ticket.answer.finish_reason for ticket in tickets]
    assert reasons == ["length", "error", *["length"] * 4, "error"]
    assert [ticket.error for ticket in tickets] == [None] * 7


def test_pages_of_a_sequence_with_nan_leave_the_prefix_cache():
    served, prompt = made(), (1, 2, BAD, *range(4, 24))
    served.runner.worker.params, sound = with_a_token_of_nan(served.params), served.params
    finished(served, [served.submit(SequenceParams(prompt, max_tokens=4))])
    served.runner.worker.params = sound  # as if a device had erred once
    ticket = served.submit(SequenceParams(prompt, max_tokens=4))
    finished(served, [ticket])
    assert served.pool.blocks.hits == 0 and ticket.answer.finish_reason == "length"
    finished(served, [served.submit(SequenceParams(prompt, max_tokens=4))])
    assert served.pool.blocks.hits == 16


def test_pages_of_a_prompt_that_was_aborted_are_cleared_before_they_are_taken_again():
    served = made(num_slots=1, num_pages=5)
    served.runner.worker.params = with_a_token_of_nan(served.params)
    ticket = served.submit(SequenceParams((1, BAD, *range(4, 24)), max_tokens=8))
    served.step()  # its prompt is read, and its launch is not
    assert not ticket.finished
    served.abort(ticket)
    rows = [without_it(row) for row in ROWS]
    assert finished(served, [served.submit(row) for row in rows]) == texts(rows=rows)


# --------------------------------------------------------------------------------- failing launches


@pytest.mark.parametrize("name", DRAFTERS)
@pytest.mark.parametrize("call", [0, 2])
def test_sequences_have_their_texts_after_a_launch_that_failed_once(monkeypatch, name, call):
    expected = texts(name)
    monkeypatch.setattr(worker, "launch", failing(loop.launch, lambda number: number == call))
    served = made(name)
    tickets = [served.submit(row, rounds=2) for row in ROWS]
    assert finished(served, tickets) == expected
    assert not any(ticket.error for ticket in tickets)


def test_a_prefill_that_fails_once_is_repeated(monkeypatch):
    expected = texts()
    once = failing(loop.prefill, lambda number: number == 1)
    monkeypatch.setattr(worker, "prefill", once)
    served = made()
    assert finished(served, [served.submit(row) for row in ROWS]) == expected


def test_results_that_cannot_be_read_are_computed_anew(monkeypatch):
    expected, served = texts("draft_model"), made("draft_model")
    tickets = [served.submit(row, rounds=2) for row in ROWS]
    served.step()
    with monkeypatch.context() as patch:
        patch.setattr(jax, "device_get", failing(jax.device_get, lambda number: number == 0))
        served.step()
    assert finished(served, tickets) == expected


def test_sequences_that_fail_alone_end_with_the_error_and_the_engine_stays_usable(monkeypatch):
    expected, served = texts(), made()
    tickets = [served.submit(row) for row in ROWS[:3]]
    with monkeypatch.context() as patch:
        patch.setattr(worker, "launch", failing(loop.launch, lambda _: True))
        finished(served, tickets)
    for ticket in tickets:
        assert ticket.answer.finish_reason == "error"
        assert str(ticket.error) == (
            "a launch failed while this sequence ran alone: INTERNAL: the device went away; its "
            "logits processors or the device may be at fault."
        )
    assert finished(served, [served.submit(row) for row in ROWS]) == expected


def test_a_function_that_raises_in_a_running_program_ends_its_own_request_alone():
    served, guilty = made(num_slots=3), dataclasses.replace(ROWS[2], max_tokens=20)
    guilty = dataclasses.replace(guilty, logits_processors=(raises_at_twelve,))
    innocent = [dataclasses.replace(row, logits_processors=(forbid_five,)) for row in ROWS[:2]]
    alone = texts(rows=innocent)
    tickets = [served.submit(row, rounds=2) for row in (innocent[0], guilty, innocent[1])]
    first, wrong, last = finished(served, tickets)
    assert [first, last] == alone
    assert tickets[1].answer.finish_reason == "error" and len(wrong) < 20
    assert "of a user" in str(tickets[1].error) or "callback" in str(tickets[1].error).lower()


def test_a_sequence_that_cannot_be_seated_ends_alone_while_the_others_run_on(
    monkeypatch,
):
    def written(rows, *args):
        if any(row is not None and row.stream == 3 for row in rows):
            raise OverflowError("too large for int32")
        return profile.request_of(rows, *args)

    expected = texts()
    monkeypatch.setattr(batch_request, "request_of", written)
    served = made()
    tickets = [served.submit(row) for row in ROWS]
    answers = finished(served, tickets)
    assert "OverflowError: too large for int32; what it asks" in str(tickets[3].error)
    del answers[3], expected[3]
    assert answers == expected and not any(ticket.is_suspect for ticket in tickets)


def test_an_interruption_while_a_state_is_allocated_loses_no_sequence(monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt

    expected = texts()
    served = made()
    tickets = [served.submit(row) for row in ROWS]
    with monkeypatch.context() as once:
        once.setattr(batch_request, "request_of", interrupted)
        with pytest.raises(KeyboardInterrupt):
            served.step()
    assert finished(served, tickets) == expected
    assert not any(ticket.is_suspect or ticket.error for ticket in tickets)


class Panic(BaseException):
    """An error as Rust's libraries raise it."""


class BrokenMatcher:
    """The matcher of a grammar that fails when it is to compute a mask."""

    def __init__(self, error):
        self.error = error

    def deep_copy(self):
        return self

    def is_stopped(self):
        raise self.error


@pytest.mark.parametrize("error", [KeyError("lost"), Panic("lost")], ids=["error", "panic"])
def test_a_grammar_that_fails_while_it_is_followed_ends_its_own_request(error):
    grammar = FollowedGrammar(BrokenMatcher(error), frozenset({0}), tiny.VOCAB)
    served, guilty = made(), dataclasses.replace(ROWS[2], followed_grammar=grammar)
    tickets = [served.submit(row) for row in (*ROWS[:2], guilty, ROWS[3])]
    answers = finished(served, tickets)
    assert answers == [*texts(rows=ROWS[:2]), [], *texts(rows=ROWS[3:4])]
    assert f"{type(error).__name__}: " in str(tickets[2].error)
    assert [ticket.error for index, ticket in enumerate(tickets) if index != 2] == [None] * 3


def test_an_error_of_the_host_costs_others_neither_pages_nor_the_texts_of_the_past(monkeypatch):
    served = made("suffix")
    finished(served, [served.submit(ROWS[1])])
    pages, drafted = dict(served.pool.blocks.kinds[0]._cached), served.shared
    guilty = dataclasses.replace(ROWS[0], logits_processors=(raises_in_a_batch,))
    ticket = served.submit(guilty)
    finished(served, [ticket])
    assert "ZeroDivisionError: of a user" in str(ticket.error)
    assert pages.items() <= served.pool.blocks.kinds[0]._cached.items()
    jax.tree.map(np.testing.assert_array_equal, served.shared, drafted)


def test_an_interruption_loses_no_token_of_those_who_go_on(monkeypatch):
    expected, served = texts("draft_model"), made("draft_model")
    tickets = [served.submit(row, rounds=2) for row in ROWS]
    served.step()

    def interrupted(_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(jax, "device_get", interrupted)
        served.step()

    def interrupted_late(*args):
        loop.launch(*args)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(worker, "launch", interrupted_late)  # its inputs are consumed
        served.step()
    assert finished(served, tickets) == expected

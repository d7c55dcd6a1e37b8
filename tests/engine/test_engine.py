"""The engine: sequences that join and leave have the texts that they have alone."""

import re

import jax
import numpy as np
import pytest

from jspec.core.logprobs import Scoring
from jspec.core.types import Params
from jspec.engine import admission
from jspec.engine import engine as engine_module
from jspec.engine import functional as host
from jspec.engine.engine import Engine
from jspec.engine.plan import Plan
from jspec.engine.profile import Profile
from jspec.grammar import automata
from tests import tiny
from tests.plain_processors import Spelling

TOKENIZER, END = Spelling(("", "a", "b", "ab", "ba", "aa", "1", "2", "12", ":", "x")), 0
DRAFTERS = {"none": tiny.NONE, "ngram": tiny.NGRAM, "draft_model": tiny.DRAFT}
LENGTHS = [1, 17, 5, 40, 9, 2, 23, 70, 12]


def mixed(**settings):
    """Return sequences of unlike prompts, lengths and temperatures."""
    return [
        host.SequenceParams(
            prompt,
            max_tokens=4 + 7 * (index % 4),
            temperature=0.4 * (index % 3),
            stream=index,
            **settings,
        )
        for index, prompt in enumerate(tiny.prompts(LENGTHS))
    ]


def engine_of(plan, num_slots=2, **options):
    return Engine(plan, tiny.params(), num_slots=num_slots, capacity=128, **options)


def alone(plan, sequences, **options):
    """Return the answer of each sequence in a batch of its own, without an engine."""
    batches = (host.start(plan, tiny.params(), [each], **options) for each in sequences)
    return [host.advance(plan, tiny.params(), batch).answers[0] for batch in batches]


def texts(answers):
    return [answer.tokens.tolist() for answer in answers]


@pytest.mark.parametrize("name", DRAFTERS)
def test_sequences_that_share_two_slots_have_the_texts_that_they_have_alone(name):
    plan, sequences = Plan(tiny.TARGET, DRAFTERS[name], "coupled"), mixed()
    engine = engine_of(plan)
    answers, expected = engine.run(sequences), alone(plan, sequences)
    assert texts(answers) == texts(expected)
    for answer, other in zip(answers, expected, strict=True):
        assert answer.finish_reason == other.finish_reason == "length"
        np.testing.assert_array_equal(answer.steps, other.steps)
    assert engine.is_idle


def test_sequences_may_be_submitted_while_others_run():
    plan, sequences = Plan(tiny.TARGET, tiny.DRAFT), mixed()
    engine, tickets = engine_of(plan, num_slots=4), []
    for sequence in sequences:
        tickets.append(engine.submit(sequence, rounds=2))
        engine.step()
    while not engine.is_idle:
        engine.step()
    assert texts(ticket.answer for ticket in tickets) == texts(alone(plan, sequences))


def test_a_long_prompt_does_not_hold_up_those_who_run():
    plan = Plan(tiny.TARGET, tiny.NONE)
    short = host.SequenceParams((1, 2, 3), max_tokens=60)
    long = host.SequenceParams(tiny.prompts((100,))[0], max_tokens=8)
    engine = engine_of(plan)
    first = engine.submit(short, rounds=1)
    for _ in range(4):
        engine.step()
    second = engine.submit(long, scoring=Scoring(1, prompt=True))  # chunks of 32 tokens
    seen = []
    while not second.answer.rounds:
        engine.step()
        seen.append(first.answer.rounds)
    assert len(seen) > 3 and all(np.diff(seen) > 0)
    assert texts([engine.run([short])[0]]) == texts(alone(plan, [short]))


@pytest.mark.parametrize("padding", [0, 10_000])
def test_slots_of_an_idle_engine_are_filled_before_the_first_round(padding, monkeypatch):
    monkeypatch.setattr(engine_module, "_PADDING", padding)  # one by one, and together
    lengths = (100, 3, 100, 3)
    plan = Plan(tiny.TARGET, tiny.NONE)
    sequences = [host.SequenceParams(prompt, max_tokens=12) for prompt in tiny.prompts(lengths)]
    launches = []
    engine = engine_of(plan, num_slots=4, on_launch=launches.append)
    assert texts(engine.run(sequences)) == texts(alone(plan, sequences))
    assert sum(int(launch.rounds) for launch in launches) == 12


def test_prompts_are_read_together_unless_padding_takes_longer():
    cost = admission.prefill_cost
    assert cost(65, rows=8) < 8 * cost(65)
    assert cost(700, rows=8) > 2 * cost(700) + 6 * cost(50)


def test_jobs_start_by_priority_and_then_by_arrival():
    engine = engine_of(Plan(tiny.TARGET, tiny.NONE), num_slots=1)
    ended = []
    for name, priority in (("a", 0), ("b", 0), ("urgent", -1), ("late", 3)):
        sequence = host.SequenceParams((5, 6), max_tokens=3)
        note = lambda answer, name=name: len(answer.tokens) == 3 and ended.append(name)
        engine.submit(sequence, listener=note, priority=priority)
    while not engine.is_idle:
        engine.step()
    assert ended == ["urgent", "a", "b", "late"]


def test_a_listener_ends_a_text_and_its_slot_is_taken_again():
    plan, sequences = Plan(tiny.TARGET, tiny.DRAFT), mixed()
    whole = texts(alone(plan, sequences))
    engine = engine_of(plan)
    stop = lambda answer: len(answer.tokens) >= 5
    tickets = [
        engine.submit(sequence, rounds=1, listener=stop if index % 2 else None)
        for index, sequence in enumerate(sequences)
    ]
    while not engine.is_idle:
        engine.step()
    for index, (ticket, text) in enumerate(zip(tickets, whole, strict=True)):
        count = len(ticket.answer.tokens)
        assert ticket.answer.tokens.tolist() == text[:count]
        assert count == len(text) or (index % 2 and 5 <= count < 10)


@pytest.mark.parametrize("steps", [0, 1, 2, 4])
def test_an_aborted_job_leaves_the_others_as_they_were(steps):
    plan, sequences = Plan(tiny.TARGET, tiny.NGRAM), mixed()
    engine = engine_of(plan)
    tickets = [engine.submit(sequence, rounds=1) for sequence in sequences]
    for _ in range(steps):
        engine.step()
    ended = [ticket for ticket in tickets if ticket.finished]
    for ticket in (tickets[0], tickets[3], tickets[8]):
        engine.abort(ticket)
    while not engine.is_idle:
        engine.step()
    for ticket, expected in zip(tickets, alone(plan, sequences), strict=True):
        if ticket in (tickets[0], tickets[3], tickets[8]) and ticket not in ended:
            assert ticket.answer.finish_reason == "abort"
            count = len(ticket.answer.tokens)
            assert ticket.answer.tokens.tolist() == expected.tokens[:count].tolist()
        else:
            assert ticket.answer.tokens.tolist() == expected.tokens.tolist()


def test_settings_that_come_later_do_not_change_the_texts_before_them():
    plan, params = Plan(tiny.TARGET, tiny.DRAFT), tiny.params()
    plain = mixed()
    special = [
        host.SequenceParams((4, 5), 12, temperature=0.9, top_p=0.7, top_k=9, stream=20),
        host.SequenceParams((4, 5), 12, bad_words=((3, 4), (9,)), logit_bias=((7, 2.0),)),
        host.SequenceParams((4, 5), 12, presence_penalty=1.5, stop_token_ids=(1, 2, 3, 4, 5)),
        host.SequenceParams((6,), 9, temperature=0.5, min_tokens=4, stop_token_ids=(8,), seed=2),
    ]
    inputs = [part for pair in zip(plain, special * 3, strict=False) for part in pair]
    engine, tickets = Engine(plan, params, num_slots=3, capacity=128), []
    for sequence in inputs:
        tickets.append(engine.submit(sequence, rounds=2))
        engine.step()
    while not engine.is_idle:
        engine.step()
    assert texts(ticket.answer for ticket in tickets) == texts(alone(plan, inputs))


@pytest.mark.parametrize(
    ("num_slots", "patterns"),
    [
        (2, [None, r"[12](:x){7}(ab|ba)", None, "(ab){9}", r"[12](:x){7}(ab|ba)", "b{12}"]),
        (3, [None, None, "(ab){9}", None]),  # the first one comes while another prompt is read
    ],
)
def test_grammars_join_a_running_batch(num_slots, patterns):
    plan = Plan(tiny.TARGET, tiny.NGRAM)
    inputs = [
        host.SequenceParams(
            (3 + index, 9),
            max_tokens=20,
            temperature=0.5 * (index % 2),
            stream=index,
            stop_token_ids=(END,),
            grammar=pattern and automata.compiled(pattern, TOKENIZER, frozenset({END}), 64),
        )
        for index, pattern in enumerate(patterns)
    ]
    engine, tickets = engine_of(plan, num_slots), []
    for sequence in inputs:
        tickets.append(engine.submit(sequence, rounds=2))
        engine.step()
    while not engine.is_idle:
        engine.step()
    assert texts(ticket.answer for ticket in tickets) == texts(alone(plan, inputs))


def test_scores_are_those_that_a_sequence_has_alone():
    plan, sequences, scoring = Plan(tiny.TARGET, tiny.DRAFT), mixed(), Scoring(2, prompt=True)
    engine = engine_of(plan)
    tickets = [
        engine.submit(sequence, scoring=scoring if index % 2 else None)
        for index, sequence in enumerate(sequences)
    ]
    while not engine.is_idle:
        engine.step()
    expected = alone(plan, sequences, profile=Profile(scoring=scoring))
    for index, (ticket, other) in enumerate(zip(tickets, expected, strict=True)):
        for name in ("logprobs", "prompt_logprobs"):
            scores = getattr(ticket.answer, name)
            if index % 2 == 0:
                assert scores is None
            else:
                np.testing.assert_array_equal(scores.top_ids, getattr(other, name).top_ids)
                np.testing.assert_allclose(scores.chosen, getattr(other, name).chosen, atol=1e-5)


def test_a_request_that_never_fits_is_refused_and_the_others_go_on():
    plan, sequences = Plan(tiny.TARGET, tiny.NONE), mixed()[:3]
    engine = engine_of(plan)
    tickets = [engine.submit(sequence) for sequence in sequences]
    with pytest.raises(ValueError, match="130 tokens together, more than"):
        engine.submit(host.SequenceParams((1,) * 30, max_tokens=100))
    with pytest.raises(ValueError, match="outside the vocabulary of 64"):
        engine.submit(host.SequenceParams((64,)))
    while not engine.is_idle:
        engine.step()
    assert texts(ticket.answer for ticket in tickets) == texts(alone(plan, sequences))


def test_a_sequence_without_any_possible_token_ends_with_an_error_and_the_others_go_on():
    broken = jax.tree.map(lambda x: x, tiny.params().target)
    broken = broken.replace(embedding=broken.embedding.at[63].set(np.nan))
    plan, params = Plan(tiny.TARGET, tiny.NONE), Params(broken)
    inputs = [
        host.SequenceParams((1, 2), max_tokens=4, allowed_token_ids=(5, 6)),
        host.SequenceParams((1, 63), max_tokens=4, allowed_token_ids=(5, 6)),
        host.SequenceParams((3, 4), max_tokens=4, allowed_token_ids=(5, 6)),
    ]
    answers = Engine(plan, params, num_slots=2, capacity=32).run(inputs)
    assert [answer.finish_reason for answer in answers] == ["length", "error", "length"]


def test_a_sequence_that_joins_compiles_nothing(caplog):
    plan, sequences = Plan(tiny.TARGET, tiny.NGRAM), mixed()
    engine = engine_of(plan)
    for inputs in (sequences, sequences[::-1]):  # groups of short and of long prompts
        engine.run(inputs)
    with jax.log_compiles():
        engine.run([*sequences[4:], *sequences[:4]])
        engine.run(sequences[:1])
    assert not re.findall(r"Compiling jit\((\w+)\)", caplog.text)

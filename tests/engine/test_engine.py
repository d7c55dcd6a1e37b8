"""The engine: sequences that join and leave have the texts that they have alone."""

import dataclasses
import re

import jax
import numpy as np
import pytest

from jspec.core.logprobs import Scoring
from jspec.core.types import Params
from jspec.engine import chunks
from jspec.engine import functional as host
from jspec.engine.chunks import Chunk
from jspec.engine.engine import Engine
from jspec.engine.pages import Pool
from jspec.engine.plan import Plan
from jspec.engine.profile import Profile
from jspec.grammar import automata
from jspec.models import decoder
from tests import tiny
from tests.plain_processors import Spelling

LONG = decoder.Decoder(dataclasses.replace(tiny.TARGET.config, max_positions=2048))
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


def joining(engine, sequences):
    """Return the texts of sequences of which each is submitted a step after the one before."""
    tickets = []
    for sequence in sequences:
        tickets.append(engine.submit(sequence, rounds=2))
        engine.step()
    while not engine.is_idle:
        engine.step()
    return texts(ticket.answer for ticket in tickets)


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
    assert joining(engine_of(plan, num_slots=4), sequences) == texts(alone(plan, sequences))


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


def test_a_row_waits_for_128_tokens_at_most_while_a_prompt_of_2000_joins():
    plan = Plan(LONG, tiny.NONE)
    engine = Engine(plan, tiny.params(), num_slots=4, capacity=2048)
    first = engine.submit(host.SequenceParams((1, 2, 3), max_tokens=120), rounds=1)
    for _ in range(4):
        engine.step()
    assert not engine.is_idle and engine.num_prefilled == 2
    second = engine.submit(host.SequenceParams(tiny.prompts((2000,))[0], max_tokens=2))
    rounds, read = [], []
    while not second.answer.rounds:
        before = engine.runner.prefills.copy()
        engine.step()
        rounds.append(first.answer.rounds)
        new = engine.runner.prefills - before
        read.append(sum(size.total * count for size, count in new.items()))
    assert sorted(set(read)) == [0, 128] and sum(read) == 16 * 128
    assert (np.diff(rounds) > 0).all()  # the row ran between any two of them
    assert not first.finished


def test_an_idle_engine_reads_a_long_prompt_in_chunks_of_512():
    engine = Engine(Plan(LONG, tiny.NONE), tiny.params(), num_slots=1, capacity=2048)
    engine.run([host.SequenceParams(tiny.prompts((2000,))[0], max_tokens=2)])
    assert engine.runner.prefills == {Chunk(1, 512): 4}


def test_slots_of_an_idle_engine_are_filled_before_the_first_round():
    plan, launches = Plan(tiny.TARGET, tiny.NONE), []
    sequences = [
        host.SequenceParams(prompt, max_tokens=12) for prompt in tiny.prompts((100, 3, 100, 3))
    ]
    engine = engine_of(plan, num_slots=4, on_launch=launches.append)
    assert texts(engine.run(sequences)) == texts(alone(plan, sequences))
    assert sum(int(launch.rounds) for launch in launches) == 12


def test_a_reader_has_its_first_text_before_all_prompts_are_read():
    plan = Plan(tiny.TARGET, tiny.NONE)
    sequences = [host.SequenceParams(prompt, max_tokens=4) for prompt in tiny.prompts((120,) * 3)]
    engine = engine_of(plan, num_slots=4)
    tickets = [engine.submit(sequence, rounds=1) for sequence in sequences]
    while not tickets[0].answer.rounds:
        engine.step()
    assert engine.num_prefilled < 3 * 119
    while not engine.is_idle:
        engine.step()
    assert texts(ticket.answer for ticket in tickets) == texts(alone(plan, sequences))


def test_short_prompts_that_wait_together_share_passes():
    plan = Plan(tiny.TARGET, tiny.NONE)
    sequences = [host.SequenceParams(prompt, max_tokens=4) for prompt in tiny.prompts((65,) * 8)]
    engine = engine_of(plan, num_slots=8)
    assert texts(engine.run(sequences)) == texts(alone(plan, sequences))
    assert engine.runner.prefills == {Chunk(8, 64): 1} and engine.num_prefilled == 8 * 64


@pytest.mark.parametrize(
    ("left", "passes"),
    [
        ([1], [(1, 16)]),
        ([64], [(1, 128)]),
        ([129], [(1, 128), (1, 16)]),
        ([300], [(1, 128)] * 3),
        ([500], [(1, 512)]),
        ([1400], [(1, 512)] * 2 + [(1, 128)] * 3),
        ([12] * 8, [(8, 16)]),
        ([64] * 8, [(8, 64)]),
        ([500] * 2, [(1, 512)] * 2),
        ([400, 20, 20, 20], [(1, 512), (8, 16), (8, 16)]),
    ],
)
def test_passes_compute_few_tokens_that_are_padding(left, passes):
    seen, left = [], list(left)
    while left:
        size = chunks.choose(left, chunks.sizes(8))
        seen.append(tuple(size))
        left = [max(tokens - size.width, 0) for tokens in left[: size.rows]] + left[size.rows :]
        left = [tokens for tokens in left if tokens]
    assert seen == passes


@pytest.mark.parametrize("has_pages", [False, True])
def test_a_batch_that_is_not_pinned_has_as_many_rows_as_run(has_pages):
    plan, widths = Plan(tiny.TARGET, tiny.DRAFT, "coupled"), []
    pool = Pool(plan, tiny.params(), num_pages=60, page_size=8) if has_pages else None
    see = lambda launch: widths.append(len(launch.done))
    engine = engine_of(plan, num_slots=6, pool=pool, on_launch=see, is_pinned=False)
    rows = mixed()[:7]
    expected = texts(alone(plan, rows))
    assert texts(engine.run(rows[1:2])) == expected[1:2]
    assert set(widths) == {1}
    widths.clear()
    tickets = []
    for index, row in enumerate(rows):
        tickets.append(engine.submit(dataclasses.replace(row, max_tokens=28), rounds=1))
        if index != 1:
            engine.step()
    while not engine.is_idle:
        engine.step()
    assert [1, 4, 6] == sorted(set(widths)) == list(dict.fromkeys(widths))
    for ticket, row, text in zip(tickets, rows, expected, strict=True):
        assert ticket.answer.tokens.tolist()[: row.max_tokens] == text
    engine.step()  # reads the last launch
    widths.clear()
    assert texts(engine.run(rows[3:4])) == expected[3:4] and set(widths) == {1}  # it has shrunk


def test_rows_without_pages_are_as_long_as_the_texts_of_a_batch_that_is_not_pinned():
    plan = Plan(tiny.TARGET, tiny.NONE)
    engine = engine_of(plan, num_slots=2, is_pinned=False)
    short, long = (host.SequenceParams(each, max_tokens=40) for each in tiny.prompts((5, 80)))
    first = engine.submit(short, rounds=1)
    engine.step()
    size, second = engine.runner.buffer_size, engine.submit(long)
    while not first.finished:
        engine.step()
        assert engine.runner.buffer_size == size  # the longer text waits for an idle engine
    while not second.finished:
        engine.step()
    assert engine.runner.buffer_size > size
    assert texts([first.answer, second.answer]) == texts(alone(plan, [short, long]))


def test_a_launch_costs_the_host_nothing_that_grows_with_the_prompt():
    engine = engine_of(Plan(tiny.TARGET, tiny.NONE), num_slots=1)
    sequence = engine.submit(host.SequenceParams(tiny.prompts((60,))[0], max_tokens=60), rounds=1)
    buffers = []
    while not sequence.finished:
        engine.step()
        if not (buffers and np.shares_memory(buffers[-1], sequence.text)):
            buffers.append(sequence.text)
    assert len(buffers) <= 2  # it doubled once at most
    assert sequence.text[60:].tolist() == sequence.answer.tokens.tolist()


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
    assert joining(Engine(plan, params, num_slots=3, capacity=128), inputs) == texts(
        alone(plan, inputs)
    )


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
    assert joining(engine_of(plan, num_slots), inputs) == texts(alone(plan, inputs))


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
    # Groups of short and of long prompts, and a greedy sequence alone, which has a program.
    for inputs in (sequences, sequences[::-1], sequences[:1]):
        engine.run(inputs)
    with jax.log_compiles():
        engine.run([*sequences[4:], *sequences[:4]])
        engine.run(sequences[:1])
    assert not re.findall(r"Compiling jit\((\w+)\)", caplog.text)

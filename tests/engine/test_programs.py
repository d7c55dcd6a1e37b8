"""Programs that are compiled ahead of their first use are those that run."""

import dataclasses
import re

import jax
import pytest

from jspec.core.logprobs import Scoring
from jspec.drafters import TokenRecycling
from jspec.engine import functional as host
from jspec.engine import program_memory
from jspec.engine.engine import Engine
from jspec.engine.pages import Pool
from jspec.engine.plan import Plan
from jspec.engine.profile import Profile
from jspec.engine.programs import Programs
from jspec.engine.speculation import launch_plans
from jspec.grammar import automata, followed
from tests import tiny
from tests.plain_processors import Spelling

TOKENIZER, END = Spelling(("", "a", "b", "ab", "ba", "aa", "1", "2", "12", ":", "x")), 0
DRAFTERS = {
    "none": tiny.NONE,
    "draft_model": tiny.DRAFT,
    "a choice of lengths": tiny.NGRAM,
    "shared state": TokenRecycling(tiny.VOCAB, 3, tree_size=8),
}


@pytest.fixture
def compiled(caplog):
    """Return what lists the large programs that were compiled since it was asked last."""

    def names():
        found = re.findall(
            r"Compiling jit\((launch|prefill|draft_alone|verify_alone)\)", caplog.text
        )
        caplog.clear()
        return found

    with jax.log_compiles():
        yield names


def engine_of(name, has_pages):
    lengths = (0, 2, 4) if name == "a choice of lengths" else ()
    plan = Plan(tiny.TARGET, DRAFTERS[name], packed=True, lengths=lengths)
    pool = Pool(plan, tiny.params(), num_pages=40, page_size=16) if has_pages else None
    size = dict(num_slots=3, capacity=100, profile=Profile(rounds=3))
    return Engine(plan, tiny.params(), pool=pool, **size)


def sequences(lengths=(1, 20, 60, 90), **settings):
    return [host.SequenceParams(each, max_tokens=9, **settings) for each in tiny.prompts(lengths)]


def test_a_first_launch_is_compiled_once_in_a_thread_beside_the_prefill(caplog):
    plan = Plan(tiny.TARGET, tiny.NGRAM, packed=True)
    pool = Pool(plan, tiny.params(), num_pages=43, page_size=16)  # no other test has its programs
    engine = Engine(plan, tiny.params(), pool=pool, num_slots=3, capacity=100)
    jax.config.update("jax_log_compiles", True)  # in all threads
    try:
        engine.run(sequences())
    finally:
        jax.config.update("jax_log_compiles", False)
    ends = [each for each in caplog.records if "XLA compilation of jit(launch)" in each.message]
    assert [each.threadName for each in ends] == ["jspec-compiler"]


@pytest.mark.parametrize("name", DRAFTERS)
@pytest.mark.parametrize("has_pages", [False, True])
def test_what_is_compiled_ahead_serves_prompts_of_all_lengths(name, has_pages, compiled):
    engine, progress = engine_of(name, has_pages), []
    rows = sequences(temperature=0.7, top_p=0.9, presence_penalty=0.2)
    programs = Programs(engine)
    programs.compile_basic(lambda *each: progress.append(each))
    num_launches = 2 * len(launch_plans(engine.plan, engine.num_slots))  # greedy and numeric
    assert compiled() == ["launch"] * num_launches + ["prefill"] * 3
    assert progress[-1] == (num_launches + 3 + 6,) * 2  # and writes of requests
    programs.compile(rows[1:2])
    engine.warm_up(rows[:1])
    answers = engine.run(rows)
    assert engine.run(sequences())
    assert not compiled()
    assert [len(answer.tokens) for answer in answers] == [9] * 4


def test_programs_that_were_released_are_compiled_ahead_again(compiled, monkeypatch):
    engine, [row] = engine_of("none", has_pages=True), sequences((20,))
    programs = Programs(engine)
    programs.compile([row])
    assert not programs.may_lack([row])
    engine.run([row])
    monkeypatch.setattr(program_memory, "MOST_BYTES", 0)
    engine_of("none", has_pages=True)  # many engines have many programs
    compiled()
    assert programs.may_lack([row])
    programs.compile([row])
    assert sorted(set(compiled())) == ["launch", "prefill"] and not programs.may_lack([row])
    engine.run([row])
    assert not compiled()


@pytest.mark.parametrize("name", ["none", "draft_model"])
def test_what_a_grammar_needs_is_compiled_while_others_run(name, compiled):
    engine = engine_of(name, has_pages=True)
    programs = Programs(engine)
    others = sequences()[1:3]
    programs.compile(others[:1])
    patterns = r"[12](:x){7}(ab|ba)", "(ab){9}b{12}"
    for pattern in patterns:
        grammar = automata.compiled(pattern, TOKENIZER, frozenset({END}), tiny.VOCAB)
        row = dataclasses.replace(others[0], grammar=grammar, stop_token_ids=(END,))
        tickets = [engine.submit(other, rounds=1) for other in others]
        engine.step()
        programs.compile([row])
        compiled()
        tickets.append(engine.submit(row))
        while not engine.is_idle:
            engine.step()
        assert all(len(ticket.answer.tokens) == 9 for ticket in tickets)
        assert not compiled()


class Encoding(Spelling):
    """A tokenizer that also encodes, as llguidance needs it."""

    def encode(self, text, **_):
        return [self.texts.index(char) for char in text if char in self.texts]


@pytest.mark.parametrize("name", ["none", "draft_model"])
def test_what_a_grammar_of_the_host_needs_is_compiled_while_others_run(name, compiled):
    engine = engine_of(name, has_pages=True)
    programs = Programs(engine)
    others = sequences()[1:3]
    programs.compile(others[:1])
    known = Encoding(TOKENIZER.texts), frozenset({END}), tiny.VOCAB
    of_host = {"followed_grammar": followed.followed({"regex": "[12](:x){7}(ab|ba)"}, *known)}
    on_device = {"grammar": automata.compiled("(ab){9}b{12}", *known)}
    for given in (of_host, of_host | on_device, {}):
        grammars = [{key: each} for key, each in given.items()] or [{}]
        rows = [dataclasses.replace(others[0], **each, stop_token_ids=(END,)) for each in grammars]
        tickets = [engine.submit(other, rounds=1) for other in others]
        engine.step()
        programs.compile(rows)
        compiled()
        tickets += [engine.submit(row) for row in rows]
        while not engine.is_idle:
            engine.step()
        assert all(len(ticket.answer.tokens) == 9 for ticket in tickets)
        assert not compiled()


@pytest.mark.parametrize("has_prompt", [False, True])
def test_what_scores_need_is_compiled_ahead(has_prompt, compiled):
    engine, scoring = engine_of("none", has_pages=True), Scoring(2, prompt=has_prompt)
    programs = Programs(engine)
    programs.compile(sequences()[:1])
    programs.compile(sequences()[:1], scoring)
    compiled()
    tickets = [engine.submit(row, scoring=scoring) for row in sequences()]
    tickets += [engine.submit(row) for row in sequences()]
    while not engine.is_idle:
        engine.step()
    assert not compiled()
    assert all(ticket.answer.logprobs is not None for ticket in tickets[:4])


def settled(engine, rows, **options):
    """Run rows; return their texts, and the profile of the last launch."""
    texts = [answer.tokens.tolist() for answer in engine.run(rows, **options)]
    return texts, engine.profile


LONG = {
    "stop tokens": {"stop_token_ids": tuple(range(10_000, 11_000))},
    "bad words": {"bad_words": tuple((token,) for token in range(10)) * 60},
    "biases": {"logit_bias": tuple((token % tiny.VOCAB, 0.1) for token in range(300))},
    "allowed tokens": {"allowed_token_ids": (1, 2, 3)},
    "a function": {"logits_processors": (lambda logits, *_: logits,)},
    "a grammar": {"stop_token_ids": (END,)},
    "scores": {},
}


@pytest.mark.parametrize("kind", LONG)
def test_a_wide_request_leaves_programs_as_narrow_as_before(kind, compiled):
    engine, [row] = engine_of("none", has_pages=True), sequences((20,))
    texts, before = settled(engine, [row])
    wide, options = dataclasses.replace(row, **LONG[kind]), {}
    if kind == "a grammar":
        grammar = automata.compiled("(ab){9}b{12}", TOKENIZER, frozenset({END}), tiny.VOCAB)
        wide = dataclasses.replace(wide, grammar=grammar)
    if kind == "scores":
        options["scoring"] = Scoring(2)
    assert not before.wide and settled(engine, [wide], **options)[1].wide
    compiled()
    assert settled(engine, [row]) == (texts, before)
    assert not compiled()


@pytest.mark.parametrize("kind", ["stop tokens", "a grammar"])
def test_a_sequence_that_stays_runs_in_narrow_programs_when_a_wide_one_has_left(kind):
    engine = engine_of("none", has_pages=True)
    [row] = sequences((20,))
    text = engine.run([dataclasses.replace(row, max_tokens=40)])[0].tokens.tolist()
    other = dataclasses.replace(row, max_tokens=4, **LONG[kind])
    if kind == "a grammar":
        grammar = automata.compiled("(ab){9}b{12}", TOKENIZER, frozenset({END}), tiny.VOCAB)
        other = dataclasses.replace(other, grammar=grammar)
    ticket, profiles = engine.submit(dataclasses.replace(row, max_tokens=40), rounds=1), []
    engine.step()
    engine.submit(other, rounds=1)
    while not engine.is_idle:
        engine.step()
        profiles.append(engine.profile)
    assert ticket.answer.tokens.tolist() == text
    assert any(profile.wide for profile in profiles) and not profiles[-1].wide


def test_grammars_that_left_are_not_on_the_device_and_the_others_go_on():
    engine = engine_of("none", has_pages=True)
    [row] = sequences((20,))
    make = lambda text: automata.compiled(text, TOKENIZER, frozenset({END}), tiny.VOCAB)
    first, second = make("(ab){9}b{12}"), make("(a|b){8}x{30}")
    asked = lambda grammar, count: dataclasses.replace(
        row, grammar=grammar, max_tokens=count, stop_token_ids=(END,)
    )
    alone = [engine.run([asked(second, 30)])[0].tokens.tolist() for _ in range(1)]
    engine.submit(asked(first, 3), rounds=1)
    ticket = engine.submit(asked(second, 30), rounds=1)
    while not engine.is_idle:
        engine.step()
        third = engine.num_running == 1 and len(ticket.answer.tokens) == 10
        if third:
            engine.submit(asked(first, 3), rounds=1)
    assert [ticket.answer.tokens.tolist()] == alone


def test_numbers_and_short_lists_share_two_programs(compiled):
    engine, rows = engine_of("none", has_pages=True), []
    Programs(engine).compile_basic()
    for index, settings in enumerate(
        (
            {},
            {"temperature": 0.5},
            {"top_k": 3, "temperature": 1.0},
            {"repetition_penalty": 1.5},
            {"min_tokens": 3, "stop_token_ids": (1, 2)},
            {"logit_bias": ((1, 2.0),), "bad_words": ((1, 2),)},
        )
    ):
        rows += sequences((20,), seed=index, **settings)
    compiled()
    together = [answer.tokens.tolist() for answer in engine.run(rows)]
    alone = [engine.run([row])[0].tokens.tolist() for row in rows]
    assert together == alone and not compiled()

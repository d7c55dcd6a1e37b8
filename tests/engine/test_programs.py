"""Programs that are compiled ahead of their first use are those that run."""

import dataclasses
import re

import jax
import pytest

from jspec.core.logprobs import Scoring
from jspec.drafters import TokenRecycling
from jspec.drafters.base.adaptive import Adaptive
from jspec.engine import functional as host
from jspec.engine import program_memory
from jspec.engine.engine import Engine
from jspec.engine.pages import Pool
from jspec.engine.plan import Plan
from jspec.engine.profile import Profile
from jspec.engine.programs import Programs
from jspec.grammar import automata, followed
from tests import tiny
from tests.plain_processors import Spelling

TOKENIZER, END = Spelling(("", "a", "b", "ab", "ba", "aa", "1", "2", "12", ":", "x")), 0
DRAFTERS = {
    "none": tiny.NONE,
    "draft_model": tiny.DRAFT,
    "a choice of lengths": Adaptive(tiny.NGRAM, (0, 2, 4)),
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
    plan = Plan(tiny.TARGET, DRAFTERS[name], packed=True)
    pool = Pool(plan, tiny.params(), num_pages=40, page_size=16) if has_pages else None
    size = dict(num_slots=3, capacity=100, profile=Profile(rounds=3))
    return Engine(plan, tiny.params(), pool=pool, **size)


def sequences(lengths=(1, 20, 60, 90), **settings):
    return [host.SequenceParams(each, max_tokens=9, **settings) for each in tiny.prompts(lengths)]


@pytest.mark.parametrize("name", DRAFTERS)
@pytest.mark.parametrize("has_pages", [False, True])
def test_what_is_compiled_ahead_serves_prompts_of_all_lengths(name, has_pages, compiled):
    engine, progress = engine_of(name, has_pages), []
    rows = sequences(temperature=0.7, top_p=0.9, presence_penalty=0.2)
    programs = Programs(engine)
    programs.compile(rows[:1], on_progress=lambda *each: progress.append(each))
    num_launches = len(engine.paces)
    assert compiled() == ["launch"] * num_launches + ["prefill"] * 3
    assert progress == [(done, num_launches + 3) for done in range(num_launches + 4)]
    programs.compile(rows[1:2])
    engine.warm_up(rows[:1])
    answers = engine.run(rows)
    assert not compiled()
    assert [len(answer.tokens) for answer in answers] == [9] * 4


def test_programs_that_were_released_are_compiled_ahead_again(compiled, monkeypatch):
    engine, [row] = engine_of("none", has_pages=True), sequences((20,))
    programs = Programs(engine)
    programs.compile([row])
    assert not programs.may_lack([row]) and compiled()
    engine.run([row])
    monkeypatch.setattr(program_memory, "MOST_BYTES", 0)
    engine_of("none", has_pages=True)  # many engines have many programs
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
        for row in rows:
            programs.compile([row])
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

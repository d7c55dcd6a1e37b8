"""Limits that meet: a grammar beside other settings that forbid tokens."""

import dataclasses
import re

import numpy as np
import pytest
import regex

from jspec import SamplingParams
from jspec.core.types import Params
from jspec.engine import functional as host
from jspec.engine.plan import Plan
from jspec.engine.sequences import SequenceParams
from jspec.grammar import automata
from tests import fakes, llm_fixtures, tiny
from tests.drafters.several import DRAFTERS
from tests.plain_processors import Spelling, plainly

END = 0
SPELLED = ("", "a", "b", "ab", "ba", "aa", '"', "1", "2", "12", "{", "}", ":", "x", " ", "c")
A, B, AB, BA, AA, X = 1, 2, 3, 4, 5, 13
LIMITS = [
    ("[ab]{2,30}x", dict(bad_words=((A, A), (AA,), (B, A, B)))),
    ("[abc]*", dict(min_tokens=9, allowed_token_ids=(END, A, B, AB, 15))),
    ("(ab|ba)*1?x", dict(bad_words=((AB, AB), (BA, A)), min_tokens=4)),
    (None, dict(bad_words=((A,),), min_tokens=3)),
    ("[ab]{1,12}x", dict(allowed_token_ids=(A, BA, X), bad_words=((X,), (A, A), (BA, BA)))),
    ("abab", dict(bad_words=((AB, AB), (AB, A), (A, B)))),  # no token is left after one or two
    ("(a|b)c", dict(allowed_token_ids=(A, B, END))),
    ("a?", dict(min_tokens=3)),
]


def requests(temperature=0.0, vocab_size=tiny.VOCAB):
    compile = lambda pattern: automata.compiled(
        pattern, Spelling(SPELLED), frozenset({END}), vocab_size
    )
    given = dict(max_tokens=20, temperature=temperature, stop_token_ids=(END,))
    return [
        SequenceParams(
            (index + 1,), stream=index, grammar=pattern and compile(pattern), **given, **limits
        )
        for index, (pattern, limits) in enumerate(LIMITS)
    ]


def allowed_by(pattern, text):
    """Return 0 for tokens that continue some match, or end one, and else -inf."""
    spelled = "".join(SPELLED[token] for token in text)
    continues = lambda token: regex.fullmatch(pattern, spelled + token, partial=True)
    fits = [bool(token) and bool(continues(token)) for token in SPELLED]
    fits[END] = re.fullmatch(pattern, spelled) is not None
    return np.where(fits, 0, -np.inf)


def by_hand(row, pattern, table):
    """Continue a row greedily in plain NumPy; return the tokens and the reason of the end."""
    answer = []
    while len(answer) < row.max_tokens:
        text = [*row.prompt, *answer]
        logits = plainly(row, table[text[-1]], text)
        logits += 0 if pattern is None else allowed_by(pattern, answer)
        if logits.max() == -np.inf:
            return answer, "error"
        answer.append(int(logits.argmax()))
        if answer[-1] == END:
            return answer, "stop"
    return answer, "length"


@pytest.mark.parametrize("drafter", [tiny.NONE, tiny.NGRAM], ids=["none", "ngram"])
def test_a_grammar_and_other_limits_hold_together_as_by_hand(drafter):
    size = len(SPELLED)
    rows, reasons = requests(vocab_size=size), set()
    for seed in range(4):
        table = np.random.default_rng(seed).normal(0, 2, (size, size)).astype(np.float32)
        plan = Plan(fakes.ToyTarget(size), drafter)
        answers = host.generate_sequences(plan, Params(table), rows)
        for row, (pattern, _), answer in zip(rows, LIMITS, answers, strict=True):
            assert (answer.tokens.tolist(), answer.finish_reason) == by_hand(row, pattern, table)
            reasons.add(answer.finish_reason)
    assert reasons == {"stop", "length", "error"}


@pytest.fixture(scope="module")
def plain():
    plan = Plan(tiny.TARGET, tiny.NONE)
    return {t: host.generate_sequences(plan, tiny.params(), requests(t)) for t in (0.0, 0.9)}


@pytest.mark.parametrize(
    "name",
    [
        name if name == "draft_model" else pytest.param(name, marks=pytest.mark.slow)
        for name in DRAFTERS
    ],
)
@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_speculation_changes_no_text_under_limits_that_meet(name, temperature, plain):
    drafter, weights = DRAFTERS[name]
    plan = Plan(tiny.TARGET, drafter, "coupled")
    params = Params(tiny.params().target, weights)
    answers = host.generate_sequences(plan, params, requests(temperature))
    ended = [(answer.tokens.tolist(), answer.finish_reason) for answer in answers]
    expected = plain[temperature]
    assert ended == [(answer.tokens.tolist(), answer.finish_reason) for answer in expected]


def test_drawn_texts_obey_every_limit_and_those_without_a_token_harm_no_other(plain):
    answers = plain[0.9]
    for answer, (pattern, limits) in zip(answers, LIMITS, strict=True):
        tokens = answer.tokens.tolist()
        spelled = "".join(SPELLED[token] for token in tokens if token < len(SPELLED))
        assert pattern is None or regex.fullmatch(pattern, spelled, partial=True)
        for phrase in limits.get("bad_words", ()):
            pieces = (tuple(tokens[at : at + len(phrase)]) for at in range(len(tokens)))
            assert phrase not in pieces
        if answer.finish_reason == "stop":
            assert len(tokens) > limits.get("min_tokens", 0)
    assert [answer.finish_reason for answer in answers[5:]] == ["error"] * 3
    alone = [row for row, answer in zip(requests(0.9), answers, strict=True)][:5]
    again = host.generate_sequences(Plan(tiny.TARGET, tiny.NONE), tiny.params(), alone)
    for one, other in zip(again, answers, strict=False):
        assert one.tokens.tolist() == other.tokens.tolist()


@pytest.mark.parametrize(
    "asked",
    [
        {"choice": ["a", "b"]},
        pytest.param({"grammar": 'root ::= "a" | "b"'}, marks=pytest.mark.slow),
    ],
)
def test_a_request_may_have_bad_words_beside_a_grammar(root, asked):
    llm = llm_fixtures.llm(root, "none")
    given = SamplingParams(
        temperature=1.0, seed=1, max_tokens=8, structured_outputs=asked, bad_words=["foo"]
    )
    settings = [
        given,
        dataclasses.replace(given, bad_words=["a"], temperature=0.0),
        dataclasses.replace(given, bad_words=["a", "b"]),
        dataclasses.replace(given, min_tokens=3),
    ]
    outputs = [each.outputs[0] for each in llm.generate(["the", "def", "x", "a"], settings)]
    free, only, none, early = outputs
    assert free.text in ("a", "b") and only.text == "b"
    assert {free.finish_reason, only.finish_reason} == {"stop"}
    assert (none.text, none.finish_reason) == ("", "error")
    assert none.stop_reason == (
        "after 0 tokens every token has probability 0: structured_outputs and bad_words forbid "
        "them all, or the model's logits are NaN; allow more."
    )
    assert early.finish_reason == "error" and early.text in ("a", "b")
    assert "structured_outputs and bad_words and min_tokens forbid" in early.stop_reason

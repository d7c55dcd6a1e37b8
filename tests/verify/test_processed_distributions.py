"""The compiled loop with logits processors has the distribution of plain sampling."""

import itertools
import re

import numpy as np
import pytest
import scipy.special

from jspec.core.types import Params
from jspec.engine.profile import Profile, request_of
from jspec.engine.sequences import SequenceParams
from jspec.grammar import automata
from tests.fakes import TableDrafter, ToyTarget, table, whole
from tests.plain_processors import Spelling, plainly
from tests.verify import statistics

V, LENGTH, ROWS = 4, 4, 8192
WEIGHTS, GUESSES = np.array(table(3, V, V, scale=1.5)), table(4, V, V, scale=1.5)
LETTERS = ("", "a", "b", "c")  # what the tokens write; 0 ends a text
TOKENIZER = Spelling(LETTERS)
PATTERN = "a(b|ca)*b?c{0,2}"
SETTINGS = {
    "penalties": dict(presence_penalty=0.4, frequency_penalty=0.7, repetition_penalty=1.5),
    "phrases": dict(bad_words=((1, 2), (3,), (2, 2)), logit_bias=((2, 0.7), (0, -0.5))),
    "a grammar": dict(grammar=automata.compiled(PATTERN, TOKENIZER, frozenset({0}), V)),
}


def distribution(row):
    """Return the distribution of ``LENGTH`` tokens after token 0, token by token: [V**n]."""
    probs = np.ones(V**LENGTH)
    for number, text in enumerate(itertools.product(range(V), repeat=LENGTH)):
        for index, token in enumerate(text):
            before = (0, *text[:index])
            logits = plainly(row, WEIGHTS[before[-1]], before)
            if row.grammar is not None:
                logits = np.where(
                    [may_follow(text[:index], each) for each in range(V)], logits, -np.inf
                )
            if np.isneginf(logits).all():  # after an impossible text
                probs[number] = 0
                break
            probs[number] *= scipy.special.softmax(logits)[token]
    return probs


def may_follow(text_ids, token):
    """Return whether ``token`` may follow, by trying all texts; after 0 nothing but 0 follows."""
    text = "".join(LETTERS[each] for each in text_ids)
    if token == 0:
        return re.fullmatch(PATTERN, text) is not None
    endings = ("".join(end) for n in range(4) for end in itertools.product("abc", repeat=n))
    ended = 0 in text_ids and text_ids[-1] == 0
    return not ended and any(re.fullmatch(PATTERN, text + LETTERS[token] + end) for end in endings)


@pytest.mark.parametrize("rule", ["rejection", pytest.param("block", marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", SETTINGS)
def test_speculation_keeps_the_distribution_of_processed_logits(name, rule):
    row = SequenceParams((0,), temperature=1.0, **SETTINGS[name])
    request, _ = request_of([row] * ROWS, Profile().grown([row]), V)
    plan = whole(ToyTarget(V), TableDrafter(3), rule)
    params = Params(WEIGHTS, GUESSES)
    tokens, _ = statistics.texts(plan, params, request.sampling, LENGTH)
    assert statistics.excess(statistics.counts(tokens, V), distribution(row)) < 1

"""Logits processors: against plain Python, along branches, and in whole texts."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec.core import logits_processors, trees
from jspec.core.branches import Branches
from jspec.core.types import Draft, History, Params
from jspec.engine import functional as host
from jspec.engine import loop
from jspec.engine.plan import Plan
from jspec.engine.profile import Profile, request_of
from jspec.engine.sequences import SequenceParams
from tests import tiny
from tests.drafters.several import DRAFTERS
from tests.plain_processors import plainly

V = 12


def less_of_the_last(logits, tokens, length):
    """Forbid the last token."""
    return logits.at[tokens[length - 1]].add(-jnp.inf)


def more_of_the_first(logits, tokens, length):
    return logits.at[tokens[0]].add(length / 8)


# The same two in NumPy: (text, token) -> number to add.
PROCESSORS = {
    less_of_the_last: lambda text, token: -np.inf if token == text[-1] else 0,
    more_of_the_first: lambda text, token: len(text) / 8 if token == text[0] else 0,
}
SEQUENCES = [
    SequenceParams((3, 3, 5), presence_penalty=0.5, frequency_penalty=-0.3, repetition_penalty=1.7),
    SequenceParams((1, 2), bad_words=((4,), (2, 6), (1, 2, 7)), logit_bias=((3, 2.5), (9, -4.0))),
    SequenceParams(
        (7,),
        min_tokens=3,
        stop_token_ids=(2,),
        late_token_ids=(5,),
        allowed_token_ids=(0, 2, 5, 6, 7, 8, 11),
    ),
    SequenceParams((9, 8), logits_processors=(less_of_the_last, more_of_the_first)),
    SequenceParams(
        (4, 4),
        repetition_penalty=0.6,
        logits_processors=(more_of_the_first,),
        min_tokens=1,
        stop_token_ids=(0,),
    ),
]


def committed(answers):
    """A history of prompts and answers."""
    tokens, lengths = np.full((len(SEQUENCES), 16), 1), []  # past a text lies garbage
    for index, (row, answer) in enumerate(zip(SEQUENCES, answers, strict=True)):
        text = [*row.prompt, *answer]
        tokens[index, : len(text)] = text
        lengths.append(len(text))
    return History(jnp.asarray(tokens, jnp.int32), jnp.asarray(lengths, jnp.int32))


ANSWERS = [(5, 3, 0), (2, 6, 1, 2), (7, 7), (9,), ()]


def test_every_node_of_a_tree_has_the_logits_of_the_text_that_leads_to_it():
    rng = np.random.default_rng(0)
    parents = np.array([-1, 0, 0, 1, 1, 2, 3, 6], np.int32)
    nodes = rng.integers(0, V, (len(SEQUENCES), parents.size))
    nodes[1, [1, 3, 6]] = (1, 2, 6)  # phrases that end on a branch
    logits = rng.normal(0, 3, (len(SEQUENCES), parents.size, V)).astype(np.float32)
    history = committed(ANSWERS)
    for index, row in enumerate(SEQUENCES):
        nodes[index, 0] = (*row.prompt, *ANSWERS[index])[-1]
    draft = Draft(jnp.asarray(nodes, jnp.int32), parents, jnp.ones(nodes.shape, bool), max_depth=4)
    tree = trees.broadcast(trees.from_parents(parents, 4), len(SEQUENCES))
    request, _ = request_of(SEQUENCES, Profile().grown(SEQUENCES), V)
    apply = jax.jit(
        lambda *inputs: logits_processors.apply(*inputs, Branches.of_draft(history, draft, tree))
    )
    processed = np.asarray(apply(logits, request.sampling.processors))
    for index, row in enumerate(SEQUENCES):
        for node in range(parents.size):
            path, above = [], node
            while above > 0:
                path, above = [nodes[index, above], *path], parents[above]
            text = [*row.prompt, *ANSWERS[index], *path]
            np.testing.assert_allclose(
                processed[index, node],
                plainly(row, logits[index, node], text, PROCESSORS),
                rtol=1e-5,
            )


LINES = [
    dict(presence_penalty=1.0, frequency_penalty=0.5, repetition_penalty=1.3),
    dict(bad_words=((17,), (3, 9), (40, 41)), logit_bias=((5, 4.0), (6, -4.0))),
    dict(min_tokens=9, stop_token_ids=tuple(range(0, 64, 3)), allowed_token_ids=tuple(range(50))),
    dict(logits_processors=(less_of_the_last,), frequency_penalty=-0.4),
]


def requests(temperature):
    return [
        SequenceParams(prompt, max_tokens=20, temperature=temperature, stream=index, **settings)
        for index, (prompt, settings) in enumerate(
            zip(tiny.prompts((1, 9, 5, 3)), LINES, strict=True)
        )
    ]


@pytest.fixture(scope="module")
def plain():
    plan = Plan(tiny.TARGET, tiny.NONE)
    return {t: host.generate_sequences(plan, tiny.params(), requests(t)) for t in (0.0, 0.9)}


FAST = ("draft_model", 0.0), ("eagle2", 0.9)  # the others are slow


@pytest.mark.parametrize(
    ("name", "temperature"),
    [
        case if case in FAST else pytest.param(*case, marks=pytest.mark.slow)
        for case in itertools.product(DRAFTERS, (0.0, 0.9))
    ],
)
def test_speculation_changes_no_text_with_logits_processors(name, temperature, plain):
    drafter, weights = DRAFTERS[name]
    plan = Plan(tiny.TARGET, drafter, "coupled")
    params = Params(tiny.params().target, weights)
    answers = host.generate_sequences(plan, params, requests(temperature))
    for answer, expected in zip(answers, plain[temperature], strict=True):
        assert answer.tokens.tolist() == expected.tokens.tolist()


def test_texts_obey_their_logits_processors(plain):
    for answers in plain.values():
        _, phrased, ended, processed = (answer.tokens.tolist() for answer in answers)
        assert 17 not in phrased
        assert not {(3, 9), (40, 41)} & set(itertools.pairwise(phrased))
        assert max(ended) < 50 and len(ended) >= 9 and all(token % 3 for token in ended[:8])
        assert all(a != b for a, b in itertools.pairwise(processed))
    free = host.generate_sequences(
        Plan(tiny.TARGET, tiny.NONE),
        tiny.params(),
        [SequenceParams(row.prompt, max_tokens=20) for row in requests(0.0)],
    )
    assert len(set(plain[0.0][0].tokens.tolist())) > len(set(free[0].tokens.tolist()))


def test_a_draft_model_that_is_the_target_is_always_accepted_under_logits_processors():
    drafter = dataclasses.replace(tiny.DRAFT, config=tiny.TARGET.config)
    params = Params(tiny.params().target, tiny.params().target)
    rows = [
        dataclasses.replace(row, max_tokens=16, stop_token_ids=(), min_tokens=0)
        for row in requests(0.9)
    ]
    answers = host.generate_sequences(Plan(tiny.TARGET, drafter, "rejection"), params, rows)
    assert all(answer.accepted[-1] >= 3 and answer.accepted[:3].sum() == 0 for answer in answers)


def test_other_values_compile_nothing():
    rows = requests(0.9)
    changed = [
        dataclasses.replace(row, seed=3, frequency_penalty=0.1, presence_penalty=-1.0)
        for row in rows
    ]
    plan = Plan(tiny.TARGET, tiny.NONE)
    host.generate_sequences(plan, tiny.params(), rows)  # compiles it, if not compiled yet
    before = loop.launch._cache_size()
    host.generate_sequences(plan, tiny.params(), changed)
    assert loop.launch._cache_size() == before


def test_a_drafter_without_any_allowed_token_keeps_its_logits():
    logits = jnp.asarray(np.random.default_rng(1).normal(size=(1, 1, 3)), jnp.float32)
    row = SequenceParams((1,), allowed_token_ids=(5, 6))
    request, _ = request_of([row], Profile().grown([row]), V)
    branches = Branches.at_root(History(jnp.ones((1, 4), jnp.int32), jnp.ones(1, jnp.int32)))
    apply = lambda ids: logits_processors.apply_to_draft(
        logits, request.sampling.processors, branches, V, jnp.array(ids)
    )
    np.testing.assert_array_equal(apply([0, 1, 2]), logits)
    np.testing.assert_array_equal(apply([4, 5, 6])[0, 0], [-np.inf, *logits[0, 0, 1:]])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            dict(repetition_penalty=0.0),
            "repetition_penalty=0.0 must be 1e-06 to 1e+06; 1 turns it off.",
        ),
        (
            dict(presence_penalty=float("nan")),
            "presence_penalty=nan must be in [-2, 2]; 0 turns it off.",
        ),
        (dict(min_tokens=4, max_tokens=3), "min_tokens=4 must be 0 to max_tokens."),
        (dict(bad_words=((),)), "bad_words=((),) must be runs of at least one token."),
        (dict(logit_bias=((1, float("inf")),)), "must be (token id, number) pairs."),
        (dict(allowed_token_ids=(1,), stop_token_ids=(1,), min_tokens=1), "allow another token"),
    ],
)
def test_values_out_of_range_are_refused(settings, message):
    with pytest.raises(ValueError) as error:
        SequenceParams((1,), **settings)
    assert message in str(error.value)


def test_token_ids_outside_the_vocabulary_are_refused():
    for settings in (
        dict(logit_bias=((64, 1.0),)),
        dict(allowed_token_ids=(-1, 3)),
        dict(bad_words=((1, 99),)),
    ):
        with pytest.raises(ValueError, match="outside the vocabulary of 64 tokens"):
            host.start(
                Plan(tiny.TARGET, tiny.NONE), tiny.params(), [SequenceParams((1,), **settings)]
            )

"""Speculation does not change the text, token for token, with any drafter.

This holds for rule ``coupled`` at any temperature, for deterministic drafts under every rule, and
for greedy sequences under every rule and drafter. The target hashes its whole prefix out of its
cache, so a misplaced key changes the text as a wrong verdict does.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec.core import trees
from jspec.core.types import Params
from jspec.drafters import NoDrafter
from jspec.engine.functional import SequenceParams, advance, start
from jspec.engine.plan import Plan
from jspec.verify import RULES
from tests import fakes
from tests.fakes import PrefixTarget, ScriptedDrafter, TableDrafter, run_rows, script, table

V, K = 8, 4
TARGET = PrefixTarget(V)
WEIGHTS = table(0, 509, V)
PARAMS = Params(WEIGHTS)
# A static tree whose accepted path is seldom made of neighbouring nodes.
BUSH = (-1, 0, 0, 0, 1, 2, 2, 3, 5, 6)


def sequences(**changes):
    """Ragged sequences, greedy and sampled in one batch, each with its own filters."""
    common = {"max_tokens": 24} | changes
    settings = [
        {"prompt": (1, 2, 3), "temperature": 1.0},
        {"prompt": (4,), "temperature": 0.0},
        {"prompt": (5, 6, 7, 1, 2, 3, 3), "temperature": 0.7, "top_k": 4, "max_tokens": 17},
        {"prompt": (0, 0), "temperature": 1.3, "top_p": 0.8},
        {"prompt": (7, 6, 5, 4), "temperature": 0.0, "top_k": 3, "max_tokens": 1},
        {"prompt": (2,) * 9, "temperature": 2.0, "min_p": 0.05, "max_tokens": 2},
        {"prompt": (3, 1), "temperature": 0.3, "max_tokens": 30},
        {"prompt": (6,), "temperature": 0.0, "max_tokens": 21},
    ]
    return [
        SequenceParams(**(common | {"stream": index} | sequence))
        for index, sequence in enumerate(settings)
    ]


def greedy_sequences():
    return [
        SequenceParams(sequence.prompt, sequence.max_tokens, stream=sequence.stream)
        for sequence in sequences()
    ]


@functools.cache
def plain(greedy=False):
    """The answers without a drafter."""
    return run_rows(
        Plan(TARGET, NoDrafter()), PARAMS, greedy_sequences() if greedy else sequences()
    )


def one_bucket(drafter, rule):
    """A plan whose target pass is compiled once, which halves the time of a test."""
    return Plan(TARGET, drafter, rule, node_buckets=(drafter.tree_size,))


def texts(answers):
    return [answer.tokens.tolist() for answer in answers]


def check_counts(answers):
    """Every pass of the target adds its accepted nodes and one token, even a clipped one."""
    for answer in answers:
        accepted = answer.accepted @ np.arange(len(answer.accepted))
        assert len(answer.tokens) == answer.rounds + accepted
        assert accepted <= answer.drafted


def test_the_target_notices_a_single_misplaced_key():
    tree = trees.from_parents(trees.chain(0), 0)
    cache = TARGET.init_cache(1, 8).replace(length=jnp.array([3]))
    root = jnp.zeros((1, 1), jnp.int32)
    seen = jax.jit(lambda cache: TARGET.forward(WEIGHTS, root, tree, cache).logits)
    for slot in range(3):
        layer = cache.layers[0]
        moved = layer.replace(k=layer.k.at[0, 0, slot].add(1))
        assert (seen(cache) != seen(cache.replace(layers=(moved,)))).any()
    stale = layer.replace(k=layer.k.at[0, 0, 3:].add(1))
    assert (seen(cache) == seen(cache.replace(layers=(stale,)))).all()


# ------------------------------------------------------------------------ with the target's noise


@functools.cache
def scripted(kind):
    """The answers under ``coupled``, drafted from the script in one way, or in all four."""
    kinds = np.arange(len(sequences())) % 4 if kind == "mixed" else kind
    params = Params(WEIGHTS, script(sequences(), plain(), kinds))
    return run_rows(Plan(TARGET, ScriptedDrafter(K, V), "coupled"), params, sequences())


@pytest.mark.parametrize(
    "kind",
    [fakes.RIGHT, fakes.WRONG, fakes.RANDOM, fakes.RANDOM_LENGTH, "mixed"],
    ids=["always right", "always wrong", "random", "of random length", "each sequence another"],
)
def test_text_does_not_depend_on_a_drafter_that_is(kind):
    assert texts(scripted(kind)) == texts(plain())
    check_counts(scripted(kind))


def test_a_drafter_that_is_always_right_needs_no_round_and_no_node_more_than_it_must():
    for sequence, answer in zip(sequences(), scripted(fakes.RIGHT), strict=True):
        assert answer.rounds == -(-sequence.max_tokens // (K + 1))
        assert answer.drafted == len(answer.tokens) - answer.rounds  # none past the limit


def test_a_drafter_that_is_always_wrong_gives_one_token_a_round():
    for sequence, answer in zip(sequences(), scripted(fakes.WRONG), strict=True):
        assert answer.rounds == sequence.max_tokens


def test_text_does_not_depend_on_a_tree():
    plan = one_bucket(fakes.BushDrafter(3, V, BUSH), "coupled")
    answers = run_rows(plan, Params(WEIGHTS, script(sequences(), plain())), sequences())
    assert texts(answers) == texts(plain())
    assert max(answer.acceptance_length for answer in answers) > 1.5
    check_counts(answers)


def test_text_does_not_depend_on_drafts_drawn_with_the_targets_noise():
    plan = one_bucket(TableDrafter(K, ragged=True), "coupled")
    answers = run_rows(plan, Params(WEIGHTS, table(1, V, V)), sequences())
    assert texts(answers) == texts(plain())
    check_counts(answers)


# -------------------------------------------------------------------------- greedy and neighbours


@pytest.mark.parametrize("rule", [name for name, rule in RULES.items() if rule.lossless])
def test_greedy_text_is_that_of_plain_decoding_under_every_rule(rule):
    params = Params(WEIGHTS, table(1, V, V))
    answers = run_rows(one_bucket(TableDrafter(K), rule), params, greedy_sequences())
    assert texts(answers) == texts(plain(greedy=True))


@pytest.mark.parametrize("kind", [fakes.RIGHT, fakes.RANDOM, fakes.RANDOM_LENGTH])
def test_greedy_text_does_not_depend_on_node_buckets(kind):
    plan = Plan(TARGET, ScriptedDrafter(K, V), node_buckets=(1, 2, 4, 5))
    params = Params(WEIGHTS, script(greedy_sequences(), plain(greedy=True), kind))
    assert texts(run_rows(plan, params, greedy_sequences())) == texts(plain(greedy=True))


def test_greedy_sequences_are_the_same_in_a_batch_of_sampled_ones():
    alone, beside = plain(greedy=True), plain()
    for index, sequence in enumerate(sequences()):
        if sequence.temperature == 0:
            assert alone[index].tokens.tolist() == beside[index].tokens.tolist()


@pytest.mark.parametrize("rule", ["rejection", "block"])
def test_greedy_texts_and_sampled_noise_do_not_depend_on_neighbours(rule):
    plan = one_bucket(TableDrafter(K), rule)
    params = Params(WEIGHTS, table(1, V, V))
    together = run_rows(plan, params, sequences())
    for index, sequence in enumerate(sequences()):
        if sequence.temperature == 0:
            assert together[index].tokens.tolist() == plain()[index].tokens.tolist()
    backwards = run_rows(plan, params, sequences()[::-1])
    assert texts(backwards[::-1]) == texts(together)
    assert texts(together) != texts(plain())  # sampled texts agree in distribution only


# --------------------------------------------------------------------------- ends of a sequence


@pytest.mark.parametrize("kind", [fakes.RIGHT, fakes.RANDOM])
def test_a_sequence_ends_at_its_first_stop_token_anywhere_in_an_accepted_path(kind):
    plan = Plan(TARGET, ScriptedDrafter(K, V), "coupled")
    params = Params(WEIGHTS, script(sequences(), plain(), kind))
    seen = set()
    for stops in ((3,), (0, 5), (1,), (6, 2)):
        answers = run_rows(plan, params, sequences(stop_token_ids=stops))
        for text, answer in zip(texts(plain()), answers, strict=True):
            end = min((i + 1 for i, token in enumerate(text) if token in stops), default=None)
            assert answer.tokens.tolist() == text[:end]
            assert answer.finish_reason == ("length" if end is None else "stop")
            assert answer.stop_token == (None if end is None else text[end - 1])
            if end:
                seen.add(end % (K + 1))
        check_counts(answers)
    assert seen == set(range(K + 1))  # every index in a path of K + 1 tokens


def test_a_finished_sequence_emits_nothing_while_others_continue():
    plan = Plan(TARGET, ScriptedDrafter(K, V), "coupled")
    params = Params(WEIGHTS, script(sequences(), plain(), fakes.RANDOM))
    batch = start(plan, params, sequences())
    ended = {}
    while len(ended) < len(sequences()):
        batch = advance(plan, params, batch, 1)
        for index, answer in enumerate(batch.answers):
            if answer.finish_reason:
                frozen = ended.setdefault(index, (answer.tokens.tolist(), answer.rounds))
                assert (answer.tokens.tolist(), answer.rounds) == frozen
        held, length = np.asarray(batch.state.cache.length), np.asarray(batch.state.history.length)
        np.testing.assert_array_equal(held[: len(sequences())], length[: len(sequences())] - 1)
    assert [ended[index][0] for index in range(len(sequences()))] == texts(plain())

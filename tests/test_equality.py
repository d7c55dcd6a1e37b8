"""Speculation does not change the text: token for token, whatever drafts and however well.

True of rule ``coupled`` at any temperature, of point-mass drafts under every rule, and of greedy
rows under every rule and drafter. The target here hashes its whole prefix out of its cache, so a
misplaced key changes the text as well as a wrong verdict does.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec.core import trees
from jspec.core.types import Params
from jspec.drafters import NoDrafter
from jspec.engine.batch import SequenceParams, advance, read, start
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


def rows(**changes):
    """Ragged rows, greedy and sampled in one batch, each warped in its own way."""
    common = {"max_tokens": 24} | changes
    own = [
        {"prompt": (1, 2, 3), "temperature": 1.0},
        {"prompt": (4,), "temperature": 0.0},
        {"prompt": (5, 6, 7, 1, 2, 3, 3), "temperature": 0.7, "top_k": 4, "max_tokens": 17},
        {"prompt": (0, 0), "temperature": 1.3, "top_p": 0.8},
        {"prompt": (7, 6, 5, 4), "temperature": 0.0, "top_k": 3, "max_tokens": 1},
        {"prompt": (2,) * 9, "temperature": 2.0, "min_p": 0.05, "max_tokens": 2},
        {"prompt": (3, 1), "temperature": 0.3, "max_tokens": 30},
        {"prompt": (6,), "temperature": 0.0, "max_tokens": 21},
    ]
    return [SequenceParams(**(common | {"stream": index} | row)) for index, row in enumerate(own)]


def greedy_rows():
    return [SequenceParams(row.prompt, row.max_tokens, stream=row.stream) for row in rows()]


@functools.cache
def plain(greedy=False):
    """What the rows say without a drafter."""
    return run_rows(Plan(TARGET, NoDrafter()), PARAMS, greedy_rows() if greedy else rows())


def one_bucket(drafter, rule):
    """A plan whose target pass is compiled once, which halves what a test costs."""
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
    """The rows under ``coupled``, drafted from the script in one way, or in all four."""
    kinds = np.arange(len(rows())) % 4 if kind == "mixed" else kind
    params = Params(WEIGHTS, script(rows(), plain(), kinds))
    return run_rows(Plan(TARGET, ScriptedDrafter(K, V), "coupled"), params, rows())


@pytest.mark.parametrize(
    "kind",
    [fakes.RIGHT, fakes.WRONG, fakes.RANDOM, fakes.RANDOM_LENGTH, "mixed"],
    ids=["always right", "always wrong", "random", "of random length", "each row another"],
)
def test_text_does_not_depend_on_a_drafter_that_is(kind):
    assert texts(scripted(kind)) == texts(plain())
    check_counts(scripted(kind))


def test_a_drafter_that_is_always_right_needs_no_round_and_no_node_more_than_it_must():
    for row, answer in zip(rows(), scripted(fakes.RIGHT), strict=True):
        assert answer.rounds == -(-row.max_tokens // (K + 1))
        assert answer.drafted == len(answer.tokens) - answer.rounds  # none past the row's limit


def test_a_drafter_that_is_always_wrong_gives_one_token_a_round():
    for row, answer in zip(rows(), scripted(fakes.WRONG), strict=True):
        assert answer.rounds == row.max_tokens


def test_text_does_not_depend_on_a_tree():
    plan = one_bucket(fakes.BushDrafter(3, V, BUSH), "coupled")
    answers = run_rows(plan, Params(WEIGHTS, script(rows(), plain())), rows())
    assert texts(answers) == texts(plain())
    assert max(answer.acceptance_length for answer in answers) > 1.5
    check_counts(answers)


def test_text_does_not_depend_on_drafts_drawn_with_the_targets_noise():
    plan = one_bucket(TableDrafter(K, ragged=True), "coupled")
    answers = run_rows(plan, Params(WEIGHTS, table(1, V, V)), rows())
    assert texts(answers) == texts(plain())
    check_counts(answers)


# -------------------------------------------------------------------------- greedy and neighbours


@pytest.mark.parametrize("rule", [name for name, rule in RULES.items() if rule.lossless])
def test_greedy_text_is_that_of_plain_decoding_under_every_rule(rule):
    params = Params(WEIGHTS, table(1, V, V))
    answers = run_rows(one_bucket(TableDrafter(K), rule), params, greedy_rows())
    assert texts(answers) == texts(plain(greedy=True))


@pytest.mark.parametrize("kind", [fakes.RIGHT, fakes.RANDOM, fakes.RANDOM_LENGTH])
def test_greedy_text_does_not_depend_on_the_rungs_of_the_ladder(kind):
    plan = Plan(TARGET, ScriptedDrafter(K, V), node_buckets=(1, 2, 4, 5))
    params = Params(WEIGHTS, script(greedy_rows(), plain(greedy=True), kind))
    assert texts(run_rows(plan, params, greedy_rows())) == texts(plain(greedy=True))


def test_greedy_rows_are_the_same_in_a_batch_of_sampled_ones():
    alone, beside = plain(greedy=True), plain()
    for index, row in enumerate(rows()):
        if row.temperature == 0:
            assert alone[index].tokens.tolist() == beside[index].tokens.tolist()


@pytest.mark.parametrize("rule", ["rejection", "block"])
def test_greedy_rows_keep_their_text_and_sampled_rows_their_noise_beside_any_neighbours(rule):
    plan = one_bucket(TableDrafter(K), rule)
    params = Params(WEIGHTS, table(1, V, V))
    together = run_rows(plan, params, rows())
    for index, row in enumerate(rows()):
        if row.temperature == 0:
            assert together[index].tokens.tolist() == plain()[index].tokens.tolist()
    backwards = run_rows(plan, params, rows()[::-1])
    assert texts(backwards[::-1]) == texts(together)
    assert texts(together) != texts(
        plain()
    )  # sampled rows are drawn otherwise: only in law the same


# ------------------------------------------------------------------------------------ ends of a row


@pytest.mark.parametrize("kind", [fakes.RIGHT, fakes.RANDOM])
def test_a_row_ends_at_its_first_stop_token_wherever_an_accepted_path_holds_it(kind):
    plan = Plan(TARGET, ScriptedDrafter(K, V), "coupled")
    params = Params(WEIGHTS, script(rows(), plain(), kind))
    seen = set()
    for stops in ((3,), (0, 5), (1,), (6, 2)):
        answers = run_rows(plan, params, rows(stop_token_ids=stops))
        for text, answer in zip(texts(plain()), answers, strict=True):
            end = min((i + 1 for i, token in enumerate(text) if token in stops), default=None)
            assert answer.tokens.tolist() == text[:end]
            assert answer.finish_reason == ("length" if end is None else "stop")
            assert answer.stop_token == (None if end is None else text[end - 1])
            if end:
                seen.add(end % (K + 1))
        check_counts(answers)
    assert seen == set(range(K + 1))  # every place in a path of K + 1 tokens


def test_a_row_that_is_done_emits_nothing_while_others_go_on():
    plan = Plan(TARGET, ScriptedDrafter(K, V), "coupled")
    params = Params(WEIGHTS, script(rows(), plain(), fakes.RANDOM))
    batch = start(plan, params, rows())
    ended = {}
    while len(ended) < len(rows()):
        batch = advance(plan, params, batch, 1)
        for index, answer in enumerate(read(batch)):
            if answer.finish_reason:
                frozen = ended.setdefault(index, (answer.tokens.tolist(), answer.rounds))
                assert (answer.tokens.tolist(), answer.rounds) == frozen
        held, length = np.asarray(batch.state.cache.length), np.asarray(batch.state.history.length)
        np.testing.assert_array_equal(held[: len(rows())], length[: len(rows())] - 1)
    assert [ended[index][0] for index in range(len(rows()))] == texts(plain())

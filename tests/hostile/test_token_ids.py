"""Tests of token ids outside the vocabulary: in requests, vocabulary maps, masks and trees."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jspec.checkpoints.heads import mask_token, vocabulary
from jspec.core import static_trees, trees
from jspec.core.types import Params
from jspec.engine.functional import SequenceParams, generate_sequences
from jspec.engine.plan import Plan
from tests import fakes
from tests.drafters import dflashes, peagle
from tests.hostile.junk import anything, few, refused

VOCAB = 8
PLAN = Plan(fakes.ToyTarget(VOCAB), fakes.TableDrafter(2))
PARAMS = Params(fakes.table(0, VOCAB, VOCAB), fakes.table(1, VOCAB, VOCAB))
OUTSIDE = [VOCAB, -1, 2**31 - 1, -(2**31)]


@pytest.mark.parametrize("token", OUTSIDE)
@pytest.mark.parametrize(
    "where",
    [
        lambda token: {"prompt": (1, token)},
        lambda token: {"logit_bias": ((token, 1.0),)},
        lambda token: {"allowed_token_ids": (1, token)},
        lambda token: {"bad_words": ((1, token),)},
    ],
    ids=["prompt", "logit_bias", "allowed_token_ids", "bad_words"],
)
def test_ids_outside_the_vocabulary_raise_before_anything_runs(where, token):
    row = SequenceParams(**{"prompt": (1,), "max_tokens": 4} | where(token))
    message = refused(generate_sequences, PLAN, PARAMS, [SequenceParams((1,), 4), row])
    assert "prompt 1" in message and str(token) in message


def test_errors_name_the_first_id_outside_the_vocabulary():
    rows = [SequenceParams((1, VOCAB + 1, -1), 4)]
    assert f"holds token id {VOCAB + 1}," in refused(generate_sequences, PLAN, PARAMS, rows)


def test_stop_ids_outside_the_vocabulary_are_ignored():
    rows = [SequenceParams((1,), 6, stop_token_ids=ids) for ids in ((), (VOCAB, 2**31 - 1))]
    first, second = generate_sequences(PLAN, PARAMS, rows)
    np.testing.assert_array_equal(first.tokens, second.tokens)
    assert "stop_token_ids" in refused(SequenceParams, (1,), 4, stop_token_ids=(-1,))


OFFSET = st.integers(-3, 9) | st.sampled_from([2**63 - 1, -(2**63), 2**62, 2**31, -(2**31)])


@few(300)
@given(st.lists(OFFSET, min_size=5, max_size=5), st.none() | st.lists(st.booleans(), max_size=9))
def test_vocabulary_maps_give_ascending_ids_or_raise(offsets, mask):
    mask = None if mask is None else np.array(mask, bool)
    results = []
    read = lambda: results.append(vocabulary.from_offsets(np.array(offsets), mask, 5, VOCAB))
    if refused(read, names=("d2t", "t2d")) is None:
        (ids,) = results
        assert ids.min() >= 0 and ids.max() < VOCAB and (np.diff(ids) > 0).all()


def test_offsets_that_overflow_raise():
    """After the overflow the differences of the ids are positive, as in a valid map."""
    ids = np.array([0, 2**63 - 1, -(2**63) + 1, -1, 5])
    with np.errstate(over="ignore"):
        offsets = ids - np.arange(5)
        assert (np.diff(ids) > 0).all()
    assert "d2t" in refused(vocabulary.from_offsets, offsets, None, 5, VOCAB)


@few(200)
@given(anything() | st.lists(st.lists(st.integers(-1, 3), max_size=4), max_size=5))
def test_rank_paths_give_a_tree_or_raise(paths):
    if not isinstance(paths, list | tuple):
        return
    results = []
    if refused(lambda: results.append(static_trees.from_choices(paths)), names=("tree",)) is None:
        (static,) = results
        tree = trees.from_parents(np.array(static.parents), static.max_depth)
        assert (tree.depth[1:] == tree.depth[static.parents[1:],] + 1).all()


@few(100)
@given(st.dictionaries(st.sampled_from(mask_token.KEYS), anything() | st.integers(0, 9)))
def test_mask_tokens_are_ids_or_raise(raw):
    refused(mask_token.mask_token_id, raw, names=mask_token.KEYS)


@pytest.mark.parametrize("token", [64, 2**31 - 1])
@pytest.mark.parametrize(
    ("config", "field"),
    [(peagle.CONFIG, "mask_token_id"), (dflashes.CONFIGS["dflash"], "mask_token")],
)
def test_mask_tokens_outside_the_vocabulary_raise(config, field, token):
    assert "mask" in refused(dataclasses.replace, config, **{field: token})

"""Windows of documents: nothing is lost or mixed, and little is wasted."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from training.data.packing import pack, token_counts
from training.data.settings import DataSettings
from training.data.token_file import TokenFile

documents = st.lists(st.integers(2, 40), min_size=1, max_size=30)


def file_of(lengths, learned=None):
    """Return documents whose tokens are numbered from 1 on."""
    total = sum(lengths)
    learned = np.ones(total, bool) if learned is None else learned
    groups = np.arange(len(lengths), dtype=np.uint64)
    tokens = np.arange(1, total + 1, dtype=np.uint16)
    return TokenFile(tokens, learned, np.cumsum(lengths), groups, {})


def whole(lengths, length, **options):
    file = file_of(lengths)
    return file, pack(file, np.arange(len(lengths)), length, **options)


def segments(rows):
    """Return the tokens of every segment of every window, and check the window's form."""
    for row in map(rows.__getitem__, range(len(rows))):
        assert row.tokens.shape == row.segments.shape == row.weights.shape == (rows.length + 1,)
        assert (row.tokens.dtype, row.segments.dtype, row.weights.dtype) == (
            np.int32,
            np.int32,
            np.float32,
        )
        held = row.segments > 0
        assert not held[np.argmin(held) :].any() or held.all()  # padding comes last
        assert not row.tokens[~held].any() and not row.weights[~held].any()
        steps = np.diff(row.segments[held], prepend=0)
        assert set(steps) <= {0, 1}  # numbered from 1 on, each once
        assert not row.weights[held][steps == 1].any()  # nothing predicts a segment's first token
        for number in range(1, row.segments.max() + 1):
            yield row.tokens[row.segments == number]


@given(documents, st.integers(1, 24), st.sampled_from(["best_fit", "none"]))
def test_every_token_comes_once_and_in_the_order_of_its_document(lengths, length, packing):
    # Pieces of one token predict nothing and are left out: lengths that leave one are avoided.
    lengths = [n if n % (length + 1) != 1 else n + 1 for n in lengths]
    file, rows = whole(lengths, length, packing=packing)
    document_of = np.repeat(np.arange(len(lengths)), lengths)
    seen = []
    for tokens in segments(rows):
        assert np.array_equal(tokens, np.arange(tokens[0], tokens[0] + len(tokens)))
        assert len(set(document_of[tokens - 1])) == 1  # one document a segment
        seen.append(tokens)
    assert np.array_equal(np.sort(np.concatenate(seen)), file.tokens)


@given(documents, st.integers(1, 24))
def test_no_two_windows_of_the_best_fit_could_have_been_one(lengths, length):
    _, rows = whole(lengths, length)
    held = sorted(int((rows[i].segments > 0).sum()) for i in range(len(rows)))
    assert all(a + b > length + 1 for a, b in itertools.pairwise(held))


def test_pieces_share_windows_where_they_fit_best():
    _, rows = whole([6, 5, 4, 3, 2], 9)
    counts = [np.bincount(rows[i].segments).tolist()[1:] for i in range(len(rows))]
    assert counts == [[6, 4], [5, 3, 2]] and rows.padding == 0
    _, alone = whole([6, 5, 4, 3, 2], 9, packing="none")
    assert [alone[i].segments.sum() for i in range(len(alone))] == [6, 5, 4, 3, 2]
    assert alone.padding == 0.6


@pytest.mark.parametrize(
    ("long_documents", "expected"),
    [
        ("cut", [[1, 2, 3, 4, 5], [6, 7, 8, 9, 10], [11, 12], [13, 14, 15]]),
        ("truncate", [[1, 2, 3, 4, 5], [13, 14, 15]]),
        ("drop", [[13, 14, 15]]),
    ],
)
def test_long_documents_are_cut_truncated_or_dropped(long_documents, expected):
    _, rows = whole([12, 3], 4, packing="none", long_documents=long_documents)
    assert [tokens.tolist() for tokens in segments(rows)] == expected


def test_pieces_with_nothing_to_learn_are_left_out():
    learned = np.zeros(15, bool)
    # First and third token of the second piece, first of the third, last of the second document.
    learned[[5, 7, 10, 14]] = True
    file = file_of([12, 3], learned)
    rows = pack(file, np.arange(2), 4, packing="none")
    assert [tokens.tolist() for tokens in segments(rows)] == [[6, 7, 8, 9, 10], [13, 14, 15]]
    assert [rows[i].weights.tolist() for i in range(2)] == [[0, 0, 1, 0, 0]] * 2


def test_only_the_documents_asked_for_are_packed():
    file = file_of([3, 4, 5])
    rows = pack(file, np.array([2, 0]), 7)
    assert [tokens.tolist() for tokens in segments(rows)] == [[1, 2, 3], [8, 9, 10, 11, 12]]


def test_a_window_and_its_segments_have_the_weights_of_their_labels():
    learned = np.array([1, 1, 0, 1, 0, 1, 1], bool)
    row = pack(file_of([4, 3], learned), np.arange(2), 7)[0]
    assert row.tokens.tolist() == [1, 2, 3, 4, 5, 6, 7, 0]
    assert row.segments.tolist() == [1, 1, 1, 1, 2, 2, 2, 0]
    assert row.weights.tolist() == [0, 1, 0, 1, 0, 1, 1, 0]


def test_tokens_are_counted_where_they_are_labels():
    tokens = np.array([3, 1, 3, 3, 2, 3, 0], np.uint16)
    learned = np.array([1, 1, 0, 1, 1, 1, 1], bool)
    file = TokenFile(tokens, learned, np.array([4, 7]), np.zeros(2, np.uint64), {})
    counts = token_counts(pack(file, np.arange(2), 7), 6)
    # Not the first token of a document, nor the third of the first, which is not learned.
    assert counts.dtype == np.int64 and counts.tolist() == [1, 1, 0, 2, 0, 0]
    every = token_counts(pack(file, np.arange(2), 7), 6, learned=False)
    assert every.tolist() == [1, 1, 1, 4, 0, 0]


def test_what_cannot_be_packed_is_refused():
    for options, message in (
        ({"length": 0}, "--length 0 does not work; it must be at least 1"),
        ({"packing": "first"}, "--packing 'first' does not work; choose one of best_fit, none"),
        ({"long_documents": "keep"}, "--long-documents 'keep' .* one of cut, truncate, drop"),
    ):
        with pytest.raises(ValueError, match=message):
            DataSettings(data=("a",), **options)
    with pytest.raises(ValueError, match="no document is left in windows of --length 4"):
        whole([9], 4, long_documents="drop")

"""The cache of the target's hidden states."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from training.data.batch import Batch
from training.data.features import cached
from training.data.loader import batches
from training.util.locks import alone

WIDTH, LENGTH, COUNT = 4, 6, 21


class Windows:
    """Windows that hold their own number."""

    def __len__(self):
        return COUNT

    def __getitem__(self, index):
        whole = np.full(LENGTH, index, np.int32)
        return Batch(whole, np.ones_like(whole), np.ones(LENGTH, np.float32))


class Teacher:
    """Return two hidden states and a normed one; record the windows that were computed."""

    def __init__(self, stop_after=None):
        self.seen, self.stop_after = [], stop_after

    def __call__(self, batch):
        if self.stop_after is not None and len(self.seen) >= self.stop_after:
            raise KeyboardInterrupt
        self.seen += batch.tokens[:, 0].tolist()
        x = jnp.repeat(batch.tokens[..., None] * 1.0, WIDTH, -1)
        return (x, x + 100), x + 200


def totals_of(normed):
    return normed[..., 0] * 2, normed[..., 1].astype(jnp.int32) + 1


def build(folder, teacher, key="a", gigabytes=1.0):
    sizes = dict(width=WIDTH, captured=2, gigabytes=gigabytes)
    return cached(Windows(), teacher, totals_of, folder, **sizes, key=key)


def test_rows_come_with_their_own_features(tmp_path):
    rows = build(tmp_path, Teacher())
    assert len(rows) == COUNT
    for index in (0, 7, 8, COUNT - 1):
        row = rows[index]
        np.testing.assert_array_equal(row.tokens, index)
        np.testing.assert_array_equal(row.captured[:, 0], index)
        np.testing.assert_array_equal(row.captured[:, 1], index + 100)
        normed = np.float32(index + 200).astype(jnp.bfloat16)
        np.testing.assert_array_equal(row.normed, normed)
        np.testing.assert_array_equal(row.log_total, np.float32(2 * normed))
        np.testing.assert_array_equal(row.likeliest, np.int32(normed) + 1)


def test_a_second_run_computes_nothing(tmp_path):
    build(tmp_path, Teacher())
    again = Teacher()
    build(tmp_path, again)
    assert again.seen == []
    other = Teacher()
    build(tmp_path, other, key="b")
    assert len(set(other.seen)) == COUNT


def test_totals_are_added_to_features_that_lack_them(tmp_path):
    first = build(tmp_path, Teacher())[COUNT - 1]
    [file] = tmp_path.glob("*.npy")
    file.unlink()
    again = Teacher()
    row = build(tmp_path, again)[COUNT - 1]
    assert again.seen == []
    np.testing.assert_array_equal(row.log_total, first.log_total)
    np.testing.assert_array_equal(row.likeliest, first.likeliest)


def test_no_totals_are_computed_if_nothing_reads_them(tmp_path):
    sizes = dict(width=WIDTH, captured=2, gigabytes=1.0)
    rows = cached(Windows(), Teacher(), None, tmp_path, **sizes, key="a")
    assert rows[0].log_total is None and not list(tmp_path.glob("*.npy"))


def test_an_interrupted_run_is_filled_on(tmp_path, monkeypatch):
    monkeypatch.setattr("training.data.features._FLUSH", 1)
    with pytest.raises(KeyboardInterrupt):
        build(tmp_path, Teacher(stop_after=16))
    [mark] = tmp_path.glob("*.json")
    assert json.loads(mark.read_text()) == {"windows": 16}
    rest = Teacher()
    rows = build(tmp_path, rest)
    assert set(rest.seen) == set(range(16, COUNT))
    assert [int(rows[i].normed[0, 0]) for i in (0, 15, 16, 20)] == [200, 215, 216, 220]


def test_two_runs_do_not_fill_one_file(tmp_path):
    class Meanwhile(Teacher):
        def __call__(self, batch):
            with pytest.raises(ValueError, match="is being written by another process"):
                build(tmp_path, Teacher())
            return super().__call__(batch)

    rows = build(tmp_path, Meanwhile())
    [file] = tmp_path.glob("*.features")
    with alone(file):  # a complete file is only read
        build(tmp_path, Teacher(stop_after=0))
    assert [int(rows[i].normed[0, 0]) for i in range(COUNT)] == [200 + i for i in range(COUNT)]


def test_batches_of_such_rows_carry_the_features(tmp_path):
    batch = next(batches(build(tmp_path, Teacher()), batch=3, seed=0))
    assert batch.captured.shape == (3, LENGTH, 2, WIDTH)
    np.testing.assert_array_equal(batch.captured[:, 0, 1, 0], batch.tokens[:, 0] + 100)
    assert len(jax.tree.leaves(batch)) == 7


def test_features_that_need_more_room_are_refused_before_any_work(tmp_path):
    with pytest.raises(ValueError, match=r"--feature-cache-gigabytes 1e-07 does not work; the"):
        build(tmp_path / "none", Teacher(stop_after=0), gigabytes=1e-7)
    assert not (tmp_path / "none").exists()

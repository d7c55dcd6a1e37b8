"""Batches hold every row once an epoch, resume exactly, and split by process."""

import json

import jax
import numpy as np
import pytest

from tests.training import toy
from training.data import batches, held_out
from training.data.batch import Batch


class Rows:
    """Row i holds the number i."""

    def __init__(self, count):
        self.count = count

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        assert 0 <= index < self.count
        return Batch(np.full(4, index, np.int32), np.ones(4, np.int32), np.ones(4, np.float32))


def numbers(iterator, count):
    return [next(iterator).tokens[:, 0].tolist() for _ in range(count)]


def test_batches_are_windows_in_numpy():
    batch = next(batches(Rows(10), batch=4, seed=0))
    assert isinstance(batch, Batch) and batch.positions.tolist() == [[0, 1, 2, 3]] * 4
    for leaf, dtype in (
        (batch.tokens, np.int32),
        (batch.segments, np.int32),
        (batch.weights, np.float32),
    ):
        assert isinstance(leaf, np.ndarray) and leaf.shape == (4, 4) and leaf.dtype == dtype


def test_every_row_comes_once_an_epoch_in_the_epochs_own_order():
    dealt = np.concatenate(numbers(batches(Rows(10), batch=4, seed=0), 10)).reshape(4, 10)
    for epoch in dealt:
        assert sorted(epoch) == list(range(10))
    assert len({tuple(epoch) for epoch in dealt}) == 4


def test_the_order_depends_on_the_seed():
    orders = {tuple(numbers(batches(Rows(10), batch=10, seed=seed), 1)[0]) for seed in range(5)}
    assert len(orders) == 5
    # The second epoch of a seed is not the first of the next one.
    assert (
        numbers(batches(Rows(10), batch=10, seed=0), 2)[1]
        != numbers(batches(Rows(10), batch=10, seed=1), 1)[0]
    )


@pytest.mark.parametrize("stop", [0, 1, 3, 7])
def test_a_resumed_iterator_continues_as_if_never_stopped(stop):
    make = lambda: batches(Rows(10), batch=4, seed=3)
    uninterrupted = numbers(make(), 12)
    stopped = make()
    assert numbers(stopped, stop) == uninterrupted[:stop]
    state = json.loads(json.dumps(stopped.get_state()))
    resumed = make()
    numbers(resumed, 2)  # at any position
    resumed.set_state(state)
    assert numbers(resumed, 12 - stop) == uninterrupted[stop:]


def test_the_parts_of_all_processes_are_the_batch_of_one():
    one = numbers(batches(Rows(10), batch=6, seed=3), 5)
    parts = [
        numbers(batches(Rows(10), batch=6, seed=3, process_index=i, process_count=2), 5)
        for i in range(2)
    ]
    assert [left + right for left, right in zip(*parts, strict=True)] == one


@pytest.mark.parametrize(("batch", "processes"), [(1, 1), (3, 3), (4, 2)])
def test_a_process_may_get_one_row_of_a_batch_or_more(batch, processes):
    parts = [
        numbers(batches(Rows(6), batch=batch, seed=3, process_index=i, process_count=processes), 6)
        for i in range(processes)
    ]
    dealt = np.concatenate(parts, axis=1).reshape(-1, 6)
    assert [sorted(epoch) for epoch in dealt.tolist()] == [list(range(6))] * batch
    for i in range(processes):
        held = held_out(Rows(12), batch=batch, process_index=i, process_count=processes)
        assert [len(part.tokens) for part in held] == [batch // processes] * (12 // batch)


def test_a_run_of_one_window_a_step_trains_and_resumes(tmp_path):
    whole = toy.run(tmp_path / "whole", batch=1, accumulate=1, steps=4)
    toy.run(tmp_path / "parts", batch=1, accumulate=1, steps=4, stop_after=2)
    parts = toy.run(tmp_path / "parts", batch=1, accumulate=1, steps=4)
    for one, other in zip(
        jax.tree.leaves(whole.params), jax.tree.leaves(parts.params), strict=True
    ):
        assert (one == other).all()


def test_held_out_batches_are_the_same_each_time_and_spread_evenly():
    held = held_out(Rows(11), batch=2, limit=4)
    dealt = [batch.tokens[:, 0].tolist() for batch in held]
    assert dealt == [[0, 2], [5, 8]] == [batch.tokens[:, 0].tolist() for batch in held]
    everything = np.concatenate([b.tokens[:, 0] for b in held_out(Rows(11), batch=2)])
    assert len(set(everything.tolist())) == 10
    (second,) = held_out(Rows(11), batch=2, limit=2, process_index=1, process_count=2)
    assert second.tokens[:, 0].tolist() == [5]


def test_fewer_held_out_rows_than_a_batch_fill_one():
    (batch,) = held_out(Rows(3), batch=4)
    assert batch.tokens[:, 0].tolist() == [0, 0, 1, 2]


@pytest.mark.parametrize("deal", [lambda *a, **k: batches(*a, seed=0, **k), held_out])
def test_batches_that_cannot_be_made_are_refused(deal):
    with pytest.raises(ValueError, match="the training data holds no rows"):
        deal(Rows(0), batch=2)
    with pytest.raises(ValueError, match="batch 5 cannot be cut into 2 equal parts"):
        deal(Rows(8), batch=5, process_index=0, process_count=2)

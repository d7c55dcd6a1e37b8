"""The trainer, in one process on one device."""

import os
import signal

import jax
import numpy as np

from tests.training import toy
from training.trainer.checkpointing import Checkpoints


def same(left, right) -> bool:
    """Bit for bit."""
    pairs = zip(jax.tree.leaves(left), jax.tree.leaves(right), strict=True)
    return all(np.array_equal(a, b) for a, b in pairs)


def test_a_resumed_run_equals_an_uninterrupted_one_bit_for_bit(tmp_path):
    task = toy.Bigrams(noise=0.1)
    whole = toy.run(tmp_path / "whole", task)
    for steps in (4, 3, None, None):  # the last finds the run finished, and leaves it as it is
        result = toy.run(tmp_path / "parts", task, stop_after=steps)
    assert result.step == 10 and result.finished and same(result.params, whole.params)
    assert [part["from_step"] for part in result.record["segments"]] == [0, 4, 7]
    held = lambda run: [e["heldout_loss"] for e in run.record["evaluations"]]
    assert held(result) == held(whole) and len(held(whole)) == 2


def test_a_signal_ends_the_run_after_its_step_with_everything_saved(tmp_path):
    stop = lambda step, _: os.kill(os.getpid(), signal.SIGTERM) if step == 4 else None
    result = toy.run(tmp_path, bar=stop)
    with Checkpoints(tmp_path / "checkpoints") as checkpoints:
        assert checkpoints.latest == result.step and not result.finished
    assert 4 <= result.step <= 6
    assert same(toy.run(tmp_path).params, toy.run(tmp_path / "other").params)

"""Damaged and half deleted checkpoints: one is never trained on, and the other goes."""

import json
import logging
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.training import toy
from training import data, trainer
from training.trainer.checkpointing import Checkpoints
from training.trainer.programs import TrainState
from training.util.command import run_command


@pytest.fixture(scope="module")
def stopped(tmp_path_factory):
    """A run of ten steps that stopped after six; it has the checkpoints 4 and 6."""
    out = tmp_path_factory.mktemp("stopped") / "run"
    toy.run(out, stop_after=6, save_every=2, eval_every=100)
    return out


@pytest.fixture
def run(stopped, tmp_path):
    return shutil.copytree(stopped, tmp_path / "run")


def resume(run, **options):
    """Resume the run as a command does; return the exit code."""
    train = lambda *_: toy.run(run, save_every=2, eval_every=100, **options)
    return run_command(trainer.TrainerSettings, train, [], module="x", description="x")


def data_file(checkpoint):
    return max((checkpoint / "state" / "d").iterdir(), key=lambda path: path.stat().st_size)


def cut(path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def flip(path):
    content = bytearray(path.read_bytes())
    middle = len(content) // 2
    content[middle : middle + 64] = (255 - byte for byte in content[middle : middle + 64])
    path.write_bytes(content)


def edit(path):
    """Change a digit, so that the file is still JSON."""
    text = path.read_text()
    before = "6" if "6" in text else next(letter for letter in text if letter.isdigit())
    path.write_text(text.replace(before, str((int(before) + 1) % 10), 1))


@pytest.mark.parametrize(
    ("file_of", "damage"),
    [
        (data_file, cut),
        (data_file, flip),
        (data_file, lambda path: path.unlink()),
        (lambda folder: folder / "record" / "metadata", cut),
        (lambda folder: folder / "record" / "metadata", edit),
        (lambda folder: folder / "batches" / "process_0-of-1.json", cut),
        (lambda folder: folder / "batches" / "process_0-of-1.json", edit),
        (lambda folder: folder / "metrics" / "metrics", cut),
        (lambda folder: folder / "state" / "_METADATA", cut),
    ],
)
def test_a_damaged_checkpoint_is_named_with_the_one_to_go_on_from(file_of, damage, run, capfd):
    newest = run / "checkpoints" / "6"
    damage(file_of(newest))
    assert resume(run) == 2
    printed = capfd.readouterr().err
    assert printed.startswith("error: checkpoint 6 is damaged (") and printed.count("\n") == 1
    assert printed.endswith(f"; delete the folder '{newest}' to go on from checkpoint 4\n")
    shutil.rmtree(newest)
    assert resume(run) == 0


def test_changed_values_of_a_large_array_are_found(tmp_path):
    values = jax.random.normal(jax.random.key(0), (512, 256))
    state = TrainState(jnp.int32(1), {"matrix": values}, ())
    layout = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), state)
    batches = data.batches(toy.Rows(), batch=8, seed=0)
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, state, {}, batches)
    with Checkpoints(tmp_path) as checkpoints:
        restored = checkpoints.restore(layout, batches)
        assert np.array_equal(restored.params["matrix"], values)
    files = (path for path in (tmp_path / "1").rglob("*") if path.is_file())
    flip(max(files, key=lambda path: path.stat().st_size))
    with (
        Checkpoints(tmp_path) as checkpoints,
        pytest.raises(ValueError, match="not those that were saved"),
    ):
        checkpoints.restore(layout, batches)
    with Checkpoints(tmp_path) as checkpoints, pytest.raises(ValueError, match="to start again"):
        checkpoints.restore_best(layout)


def test_a_checkpoint_of_an_earlier_version_has_no_digests_and_is_restored(run):
    record = run / "checkpoints" / "6" / "record" / "metadata"
    facts = json.loads(record.read_text())
    assert facts.pop("digests")
    record.write_text(json.dumps(facts))
    assert resume(run) == 0


@pytest.mark.parametrize("gone", ["_CHECKPOINT_METADATA", "metrics", "all"])
def test_a_checkpoint_whose_deletion_was_cut_off_is_deleted(gone, run, caplog):
    older = run / "checkpoints" / "4"
    for path in [older / gone] if gone != "all" else list(older.iterdir()):
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    with caplog.at_level(logging.WARNING):
        assert resume(run, stop_after=0) == 0
    assert not caplog.records
    assert [path.name for path in (run / "checkpoints").iterdir()] == ["6"]

"""Writers: nothing lands outside of what they were given, and nothing old is lost by an error."""

import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec.checkpoints import shared_file
from jspec.util import atomic_files
from tests import tiny
from tests.drafters import heads
from tests.hostile.junk import refused
from training import export

SHARED = {"tokens": jnp.arange(6), "counts": jnp.ones((2, 3))}


def files_under(folder):
    return sorted(str(file.relative_to(folder)) for file in folder.rglob("*"))


def test_what_was_learnt_replaces_an_older_file_or_leaves_it(tmp_path, monkeypatch):
    path = tmp_path / "learnt"
    shared_file.save(path, SHARED)
    before = path.read_bytes()

    def fail(*_):
        raise OSError("no room")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OSError, match="no room"):
        shared_file.save(path, SHARED)
    assert path.read_bytes() == before
    assert files_under(tmp_path) == ["learnt"]


@pytest.mark.parametrize("there", [True, False])
def test_a_link_to_what_was_learnt_stays_one(tmp_path, there):
    folder, link = tmp_path / "folder", tmp_path / "link"
    folder.mkdir()
    link.symlink_to("folder/learnt")
    if there:
        (folder / "learnt").write_text("of an older run")
    shared_file.save(link, SHARED)
    assert link.is_symlink()
    assert files_under(tmp_path) == ["folder", "folder/learnt", "link"]
    np.testing.assert_array_equal(shared_file.load(link, SHARED)["tokens"], range(6))


def test_writers_of_one_file_do_not_disturb_each_other(tmp_path):
    path = tmp_path / "file"
    with atomic_files.aside(path) as slow:
        slow.write_text("slow")
        with atomic_files.aside(path) as quick:
            quick.write_text("quick")
        assert path.read_text() == "quick" and slow.read_text() == "slow"
    assert path.read_text() == "slow" and files_under(tmp_path) == ["file"]


def test_a_file_that_is_moved_into_place_may_be_read_by_whom_the_umask_lets(tmp_path):
    (tmp_path / "opened").write_text("")
    atomic_files.write(tmp_path / "moved", b"")
    assert (tmp_path / "moved").stat().st_mode == (tmp_path / "opened").stat().st_mode


def test_a_place_that_holds_no_file_is_refused_before_anything_is_fetched(tmp_path, monkeypatch):
    monkeypatch.setattr(jax, "device_get", None)  # calling it would fail
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to("pipe")
    for name in ("pipe", "link"):
        message = refused(shared_file.save, tmp_path / name, SHARED)
        assert f"path {tmp_path / name} is a device or a pipe, which keeps nothing" in message
    assert "is a folder; name a file in it" in refused(shared_file.save, tmp_path, SHARED)
    message = refused(shared_file.save, tmp_path / "none" / "learnt", SHARED)
    assert f"there is no folder {tmp_path / 'none'}; make it first" in message
    assert (tmp_path / "pipe").is_fifo() and files_under(tmp_path) == ["link", "pipe"]


def test_errors_name_the_file_that_was_asked_for(tmp_path):
    for path in (tmp_path / "none" / "file", tmp_path):
        with pytest.raises(OSError) as error:
            atomic_files.write(path, b"")
        assert str(path) in str(error.value) and ".jspec-" not in str(error.value)
    assert files_under(tmp_path) == []
    assert f"{tmp_path} is no file" in refused(shared_file.load, tmp_path, SHARED)
    assert "nowhere does not exist" in refused(shared_file.load, tmp_path / "nowhere", SHARED)


def test_what_was_learnt_is_read_whole_or_refused(tmp_path):
    path = tmp_path / "learnt"
    shared_file.save(path, SHARED)
    whole = path.read_bytes()
    for size in range(0, len(whole), 7):
        path.write_bytes(whole[:size])
        assert refused(shared_file.load, path, SHARED)
    for like in ({"tokens": jnp.arange(7)}, {"other": jnp.arange(6)}, ()):
        path.write_bytes(whole)
        assert "saved by another method" in refused(shared_file.load, path, like)


@pytest.mark.parametrize("name", ["../../evil", "/evil", "a\0b", "..", "a\nb", "\x1b[31m"])
def test_the_name_of_a_target_is_no_path(tmp_path, name):
    config, folder = heads.CONFIGS["eagle3"], tmp_path / "a" / "head"
    export.save(
        folder,
        config,
        heads.random_params("eagle3"),
        tiny.TARGET.config,
        "speculators",
        target_name=name,
        embedding=tiny.params().target.embedding,
        dtype=None,
    )
    assert files_under(tmp_path) == [
        "a",
        "a/head",
        "a/head/config.json",
        "a/head/model.safetensors",
    ]

"""Tests that writers stay inside their paths, and that a failed write keeps the old file."""

import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec.checkpoints import shared_file
from jspec.checkpoints.heads import head_files
from jspec.util import atomic_files
from tests import tiny
from tests.drafters import heads
from tests.hostile.junk import refused

SHARED = {"tokens": jnp.arange(6), "counts": jnp.ones((2, 3))}


def files_under(folder):
    return sorted(str(file.relative_to(folder)) for file in folder.rglob("*"))


def test_a_failed_save_keeps_the_old_shared_file(tmp_path, monkeypatch):
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


@pytest.mark.parametrize("exists", [True, False])
def test_a_link_to_a_shared_file_stays_a_link(tmp_path, exists):
    folder, link = tmp_path / "folder", tmp_path / "link"
    folder.mkdir()
    link.symlink_to("folder/learnt")
    if exists:
        (folder / "learnt").write_text("of an older run")
    shared_file.save(link, SHARED)
    assert link.is_symlink()
    assert files_under(tmp_path) == ["folder", "folder/learnt", "link"]
    np.testing.assert_array_equal(shared_file.load(link, SHARED)["tokens"], range(6))


def test_concurrent_writers_of_one_file_do_not_interfere(tmp_path):
    path = tmp_path / "file"
    with atomic_files.aside(path) as slow:
        slow.write_text("slow")
        with atomic_files.aside(path) as quick:
            quick.write_text("quick")
        assert path.read_text() == "quick" and slow.read_text() == "slow"
    assert path.read_text() == "slow" and files_under(tmp_path) == ["file"]


def test_a_moved_file_has_the_permissions_of_the_umask(tmp_path):
    (tmp_path / "opened").write_text("")
    atomic_files.write(tmp_path / "moved", b"")
    assert (tmp_path / "moved").stat().st_mode == (tmp_path / "opened").stat().st_mode


def test_invalid_paths_raise_before_anything_is_fetched(tmp_path, monkeypatch):
    monkeypatch.setattr(jax, "device_get", None)  # calling it would fail
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to("pipe")
    for name in ("pipe", "link"):
        message = refused(shared_file.save, tmp_path / name, SHARED)
        assert f"path {tmp_path / name} is a device or a pipe, which stores nothing" in message
    assert "is a folder; name a file in it" in refused(shared_file.save, tmp_path, SHARED)
    message = refused(shared_file.save, tmp_path / "none" / "learnt", SHARED)
    assert f"there is no folder {tmp_path / 'none'}; make it first" in message
    assert (tmp_path / "pipe").is_fifo() and files_under(tmp_path) == ["link", "pipe"]


def test_errors_name_the_path_of_the_user(tmp_path):
    for path in (tmp_path / "none" / "file", tmp_path):
        with pytest.raises(OSError) as error:
            atomic_files.write(path, b"")
        assert str(path) in str(error.value) and ".jspec-" not in str(error.value)
    assert files_under(tmp_path) == []
    assert f"{tmp_path} is no file" in refused(shared_file.load, tmp_path, SHARED)
    assert "nowhere does not exist" in refused(shared_file.load, tmp_path / "nowhere", SHARED)


def test_truncated_or_foreign_shared_files_raise(tmp_path):
    path = tmp_path / "learnt"
    shared_file.save(path, SHARED)
    complete = path.read_bytes()
    for size in range(0, len(complete), 7):
        path.write_bytes(complete[:size])
        assert refused(shared_file.load, path, SHARED)
    for like in ({"tokens": jnp.arange(7)}, {"other": jnp.arange(6)}, ()):
        path.write_bytes(complete)
        assert "saved by another method" in refused(shared_file.load, path, like)


@pytest.mark.parametrize("name", ["../../evil", "/evil", "a\0b", "..", "a\nb", "\x1b[31m"])
def test_the_name_of_a_target_is_not_used_as_a_path(tmp_path, name):
    config, folder = heads.CONFIGS["eagle3"], tmp_path / "a" / "head"
    head_files.save_head(
        folder,
        config,
        heads.random_params("eagle3"),
        tiny.TARGET.config,
        layout="speculators",
        target_name=name,
        embedding=tiny.params().target.embedding,
    )
    assert files_under(tmp_path) == [
        "a",
        "a/head",
        "a/head/config.json",
        "a/head/model.safetensors",
    ]

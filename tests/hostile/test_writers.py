"""Writers: nothing lands outside of what they were given, and nothing old is lost by an error."""

import os

import jax.numpy as jnp
import numpy as np
import pytest

from jspec.files import shared_file
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


def test_what_was_learnt_is_written_through_no_link(tmp_path):
    outside = tmp_path / "outside"
    outside.write_text("as it was")
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / ".learnt.partial").symlink_to(outside)
    (folder / "learnt").symlink_to(outside)
    shared_file.save(folder / "learnt", SHARED)
    assert outside.read_text() == "as it was"
    assert files_under(folder) == ["learnt"] and not (folder / "learnt").is_symlink()
    np.testing.assert_array_equal(shared_file.load(folder / "learnt", SHARED)["tokens"], range(6))


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
        folder, config, heads.random_params("eagle3"), tiny.TARGET.config, "speculators",
        target_name=name, embedding=tiny.params().target.embedding, dtype=None,
    )  # fmt: skip
    assert files_under(tmp_path) == ["a", "a/head", "a/head/config.json",
                                     "a/head/model.safetensors"]  # fmt: skip

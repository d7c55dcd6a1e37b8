"""Atomic replacement of several files."""

import re

import pytest

from jspec.util import staging

STALE = re.compile(r"part\d")


def contents(directory):
    return {file.name: file.read_text() for file in directory.iterdir()}


def save(directory, **files):
    with staging.replace_files(directory, STALE) as aside:
        for name, text in files.items():
            (aside / name).write_text(text)


def test_new_files_replace_old_ones_and_stale_ones_go(tmp_path):
    save(tmp_path / "deep" / "down", part1="a", part2="a", index="a")
    directory = tmp_path / "deep" / "down"
    (directory / "other").write_text("stays")
    save(directory, part3="b", index="b")
    assert contents(directory) == {"part3": "b", "index": "b", "other": "stays"}


def test_an_error_leaves_everything_as_it_was(tmp_path):
    save(tmp_path, part1="a")
    with pytest.raises(RuntimeError), staging.replace_files(tmp_path, STALE) as aside:
        (aside / "part1").write_text("b")
        raise RuntimeError
    assert contents(tmp_path) == {"part1": "a"}


def test_uncommitted_files_of_a_killed_writer_are_removed(tmp_path):
    save(tmp_path, part1="a")
    (tmp_path / ".jspec-saving").mkdir()
    (tmp_path / ".jspec-saving" / "part9").write_text("half")
    staging.finish_interrupted(tmp_path, STALE)
    assert (tmp_path / "part1").read_text() == "a"
    save(tmp_path, part1="b")
    assert contents(tmp_path) == {"part1": "b"}


def test_the_next_reader_finishes_a_commit_once(tmp_path, monkeypatch):
    save(tmp_path, part1="a")
    with monkeypatch.context() as patch:
        patch.setattr(staging, "finish_interrupted", lambda *_: None)  # killed after the commit
        save(tmp_path, part2="b", part3="b")
    assert (tmp_path / "part1").exists()
    (tmp_path / ".jspec-saved" / "part2").rename(tmp_path / "part2")  # a finisher killed midway
    for _ in range(2):
        staging.finish_interrupted(tmp_path, STALE)
        assert contents(tmp_path) == {"part2": "b", "part3": "b"}

"""Atomic replacement of several files of a directory: all of them change, or none.

    directory/.jspec-saving/   being written; worthless if the writer dies
    directory/.jspec-saved/    complete: the rename to this name commits; then its files are moved

A writer that dies between the commit and the last move leaves ``.jspec-saved`` behind. The next
reader or writer finishes the moves.
"""

import contextlib
import json
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

from jspec.util import values

_SAVING, _SAVED, _MANIFEST = ".jspec-saving", ".jspec-saved", "files.json"


@contextlib.contextmanager
def replace_files(directory: str | Path, stale: re.Pattern) -> Iterator[Path]:
    """Yield an empty directory to write into; on a clean exit its files replace the old ones.

    Old files whose whole name matches ``stale`` are removed unless they are written again. Other
    files stay. An exception leaves everything unchanged.
    """
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    finish_interrupted(directory, stale)
    saving = directory / _SAVING
    shutil.rmtree(saving, ignore_errors=True)  # left by a writer that died
    saving.mkdir()
    try:
        yield saving
        names = sorted(file.name for file in saving.iterdir())
        (saving / _MANIFEST).write_text(json.dumps(names))
        for name in (*names, _MANIFEST):
            _sync(saving / name)
        os.replace(saving, directory / _SAVED)  # the commit
    except BaseException:
        shutil.rmtree(saving, ignore_errors=True)
        raise
    finish_interrupted(directory, stale)


def finish_interrupted(directory: Path, stale: re.Pattern) -> None:
    """Move committed files into place, if there are any.

    The call is idempotent: the manifest lists all files of the save, moved or not.

    Raises:
      ValueError: ``.jspec-saved`` is not from a save of jspec; it may come with a checkpoint.
    """
    saved = directory / _SAVED
    if not saved.is_dir():
        return
    with contextlib.suppress(FileNotFoundError):  # another process finishes the same save
        names = _names(saved / _MANIFEST)
        for file in directory.iterdir():
            if stale.fullmatch(file.name) and file.name not in names:
                file.unlink()
        for name in names:
            if (saved / name).exists():
                os.replace(saved / name, directory / name)
        shutil.rmtree(saved)


def _names(manifest: Path) -> list[str]:
    """Return the names of the files that a save wrote, checked to stay inside the directory."""
    if not manifest.is_symlink() and manifest.is_file():
        with contextlib.suppress(ValueError):
            names = values.json_of(manifest.read_text())
            are_names = isinstance(names, list) and all(map(_is_name, names))
            if are_names and not manifest.parent.is_symlink():
                return names
    elif not manifest.exists() and not manifest.is_symlink():
        raise FileNotFoundError(manifest)
    raise ValueError(
        f"{manifest.parent} is not what an interrupted save leaves behind; remove that folder"
    )


def _is_name(name: object) -> bool:
    special = ("", os.curdir, os.pardir, _SAVING, _SAVED)
    return isinstance(name, str) and not {"/", os.sep, "\0"} & {*name} and name not in special


def _sync(path: Path) -> None:
    with open(path, "rb") as file:
        os.fsync(file.fileno())

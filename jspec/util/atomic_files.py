"""Paths that a user gave for output: checks before the work, and atomic writes of single files."""

import contextlib
import os
import secrets
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO


def is_stream(path: Path) -> bool:
    """Return whether ``path`` is a stream: /dev/null, a pipe, a terminal, /dev/stdout."""
    if _output_stream(path) is not None:
        return True
    return path.exists() and not path.is_file() and not path.is_dir()


def _output_stream(path: Path) -> BinaryIO | None:
    """Return the stdout or stderr of this process if a link such as /dev/stdout leads to it.

    The stream may be a file. To replace or reopen it would lose the output around this write.
    """
    for stream in (sys.stdout, sys.stderr):
        # Notebooks and tests replace the streams by objects without a file descriptor.
        with contextlib.suppress(OSError, ValueError, AttributeError):
            if path.is_symlink() and os.path.samestat(path.stat(), os.fstat(stream.fileno())):
                stream.flush()
                return stream.buffer
    return None


def followed(path: Path) -> Path:
    """Return the target of a link, which need not exist; any other path is returned as it is."""
    return Path(os.path.realpath(path)) if path.is_symlink() else path


@contextlib.contextmanager
def aside(path: Path) -> Iterator[Path]:
    """Yield a temporary path beside ``path``; on a clean exit it replaces ``path``.

    Each writer has its own temporary path. Of several concurrent writers, the last to finish wins.

    Raises:
      OSError: the file cannot be written; the error names ``path``.
    """
    # A short name, because ``path`` may have the longest one. tempfile would ignore the umask.
    partial = path.with_name(f".jspec-{secrets.token_hex(8)}.partial")
    try:
        partial.touch(exist_ok=False)
        yield partial
        os.replace(partial, path)
    except OSError as error:
        if error.filename != str(partial):
            raise
        raise OSError(error.errno, error.strerror, str(path)) from None  # not the hidden file
    finally:
        partial.unlink(missing_ok=True)


def write(path: Path, content: bytes) -> None:
    """Write a file atomically, or write to a stream directly. A link stays a link."""
    if (stream := _output_stream(path)) is not None:
        stream.write(content)
        stream.flush()
        return
    if is_stream(path):
        path.write_bytes(content)
        return
    with aside(followed(path)) as partial:
        partial.write_bytes(content)


def check_output(option: str, path: Path | None, *, folder: bool = False) -> None:
    """Refuse an output path that cannot be written, before a command begins its work.

    Args:
      option: name of the command-line option.
      path: the file to write, or None. With ``folder`` it is a folder that the command creates.

    Raises:
      ValueError: the parent folder is missing or is a file, or permissions forbid the write.
    """
    if path is None or (not folder and is_stream(path) and os.access(path, os.W_OK)):
        return
    target = followed(path)
    parent = target if folder else target.parent
    while folder and not parent.exists():
        parent = parent.parent
    if parent.exists() and not parent.is_dir():
        raise ValueError(f"{option} {path}: {parent} is a file, not a folder; name another place.")
    if not parent.is_dir():
        raise ValueError(f"{option} {path}: there is no folder {parent}; make it first.")
    if not folder and path.is_dir():
        raise ValueError(f"{option} {path} is a folder; name a file in it.")
    # The folder must be writable too: the file is written beside its target and then moved.
    for needed in (parent, target):
        if needed.exists() and not os.access(needed, os.W_OK):
            raise ValueError(f"{option} {path}: {needed} may not be written; name another place.")


def check_apart(*outputs: tuple[str, Path | None]) -> None:
    """Refuse outputs (option, path or None) that would overwrite each other; streams may repeat.

    Raises:
      ValueError: two options name the same file.
    """
    option_of: dict[str, str] = {}
    for option, path in outputs:
        if path is None or is_stream(path):
            continue
        target = os.path.realpath(path)
        if target in option_of:
            raise ValueError(
                f"{option} {path} is the file of {option_of[target]} too and would overwrite it; "
                "name another."
            )
        option_of[target] = option

"""Locks that let one process at a time write a file or a run."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

from filelock import FileLock, Timeout


@contextlib.contextmanager
def alone(path: Path, *, folder: bool = False) -> Iterator[None]:
    """Lock ``path`` by a file beside it, or in it if it is a ``folder``; it is removed afterwards.

    The operating system releases the lock when the process dies.

    Raises:
      ValueError: another process holds it.
      OSError: the lock cannot be written; the error names ``path``.
    """
    name = path / ".lock" if folder else path.with_name(f"{path.name}.lock")
    name.parent.mkdir(parents=True, exist_ok=True)
    try:
        name.touch()  # the lock itself would take an error for a lock of another process
    except OSError as error:
        error.filename = str(path)  # not that of the lock, which no option names
        raise
    lock = FileLock(name, timeout=0)
    try:
        lock.acquire()
    except Timeout:
        raise ValueError(
            f"{path.name!r} is being written by another process; wait for it, or give a new name"
        ) from None
    try:
        yield
    finally:
        Path(lock.lock_file).unlink(missing_ok=True)
        lock.release()

"""Locks that let one process at a time write a file or a run."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

from filelock import FileLock, Timeout


@contextlib.contextmanager
def alone(path: Path) -> Iterator[None]:
    """Lock ``path`` by a file beside it, which is removed afterwards.

    The operating system releases the lock when the process dies.

    Raises:
      ValueError: another process holds it.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    lock = FileLock(path.with_name(f"{path.name}.lock"), timeout=0)
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

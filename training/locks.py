"""One process at a time writes a file or a run."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

from filelock import FileLock, Timeout


@contextlib.contextmanager
def alone(path: Path) -> Iterator[None]:
    """Holds ``path``, by a file of that name with ``.lock`` behind it, which is gone afterwards.

    The system gives the lock back when the process dies, however it dies.

    Raises:
      ValueError: another process holds it.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    lock = FileLock(path.with_name(f"{path.name}.lock"), timeout=0)
    try:
        lock.acquire()
    except Timeout:
        raise ValueError(
            f"{path.name!r} is being written by another process; wait for that one, or give a "
            "new name"
        ) from None
    try:
        yield
    finally:
        Path(lock.lock_file).unlink(missing_ok=True)
        lock.release()

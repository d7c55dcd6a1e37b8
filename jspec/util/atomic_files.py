"""Files that are written whole or not at all, where a user wants them."""

import contextlib
import os
import secrets
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO


def is_stream(path: Path) -> bool:
    """Whether nothing that is written there is kept in a file: /dev/null, a pipe, a terminal."""
    if own_stream(path) is not None:
        return True
    return path.exists() and not path.is_file() and not path.is_dir()


def own_stream(path: Path) -> BinaryIO | None:
    """What this process prints to, if a link such as /dev/stdout leads there.

    That may be a file. Replaced or opened anew, it would lose what is printed before and after.
    """
    for stream in (sys.stdout, sys.stderr):
        # Neither may be there, or it is no file of the system's: a notebook's, a test's.
        with contextlib.suppress(OSError, ValueError, AttributeError):
            if path.is_symlink() and os.path.samestat(path.stat(), os.fstat(stream.fileno())):
                stream.flush()
                return stream.buffer
    return None


def followed(path: Path) -> Path:
    """Where a link leads, though nothing may be there yet; any other path as it is."""
    return Path(os.path.realpath(path)) if path.is_symlink() else path


@contextlib.contextmanager
def aside(path: Path) -> Iterator[Path]:
    """A place beside a file's: what is written there takes the file's place once it is whole.

    Each writer has a place of its own: where several write one file, the last one to end stays.

    Raises:
      OSError: it cannot be written; where a file is named, it is ``path``.
    """
    # Short, as names of files may be as long as they can be. Not of tempfile: umask has a say.
    partial = path.with_name(f".jspec-{secrets.token_hex(8)}.partial")
    try:
        partial.touch(exist_ok=False)
        yield partial
        os.replace(partial, path)
    except OSError as error:
        if error.filename != str(partial):
            raise
        raise OSError(error.errno, error.strerror, str(path)) from None  # of no hidden file
    finally:
        partial.unlink(missing_ok=True)


def write(path: Path, content: bytes) -> None:
    """Writes a file whole or not at all, and straight into a stream.

    Where the path is a link, it stays one: the file that it leads to is written.
    """
    if (stream := own_stream(path)) is not None:
        stream.write(content)
        stream.flush()
        return
    if is_stream(path):
        path.write_bytes(content)
        return
    with aside(followed(path)) as partial:
        partial.write_bytes(content)

"""The end of a process."""

import contextlib
import ctypes
import logging
import os
import sys
from collections.abc import Callable
from typing import NoReturn

_ends: list[Callable[[int], None]] = []  # what ``exit_at_once`` calls with the code


def before_exit_at_once(end: Callable[[int], None]) -> None:
    """Have ``exit_at_once`` call ``end`` with the exit code; it does not run ``atexit``."""
    _ends.append(end)


def write_exit_code(number: int) -> bool:
    """Have the C library write the exit code to a file descriptor when this process ends.

    It writes a C int as the last thing it does. Python cannot: ``atexit`` runs while the code of a
    SystemExit is in the interpreter alone. Return whether this C library can; glibc does.
    """
    library = ctypes.CDLL(None) if sys.platform == "linux" else None
    if not hasattr(library, "on_exit"):
        return False
    library.fdopen.restype = ctypes.c_void_p
    file = ctypes.c_void_p(library.fdopen(os.dup(number), b"w"))
    return library.on_exit(library.putw, file) == 0  # putw(code, file)


def has_failed() -> bool:
    """Return whether an exception that nothing caught ends this process, for ``atexit``.

    Python keeps it, as it does in a session at a prompt, where it ends nothing.
    """
    return hasattr(sys, "last_value") and not hasattr(sys, "ps1")


def exit_at_once(code: int) -> NoReturn:
    """End the process with an exit code, after what was printed and logged is written.

    XLA compiles in threads of its own and goes on after Ctrl-C. At the usual end of Python, JAX
    frees the devices that these threads use: a segmentation fault.
    """
    for end in _ends:
        end(code)
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(AttributeError, OSError, ValueError):  # it may be closed
            stream.flush()
    os._exit(code)

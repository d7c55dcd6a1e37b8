"""The end of a process."""

import contextlib
import logging
import os
import sys
from typing import NoReturn

_codes = [0]  # exit codes of commands


def note_exit_code(code: int) -> None:
    """Note the code with which a command ends this process."""
    _codes.append(code)


def exit_code() -> int:
    """Return the code with which this process ends, for ``atexit``.

    1 after an exception that nothing caught: Python keeps it, as it does in a session at a prompt,
    where it ends nothing.
    """
    has_failed = hasattr(sys, "last_value") and not hasattr(sys, "ps1")
    return 1 if has_failed else _codes[-1]


def exit_at_once(code: int) -> NoReturn:
    """End the process with an exit code, after what was printed and logged is written.

    XLA compiles in threads of its own and goes on after Ctrl-C. At the usual end of Python, JAX
    frees the devices that these threads use: a segmentation fault.
    """
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(AttributeError, OSError, ValueError):  # it may be closed
            stream.flush()
    os._exit(code)

"""The end of a process."""

import contextlib
import logging
import os
import sys
from typing import NoReturn


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

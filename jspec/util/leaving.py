"""Work that ends once its reader has left."""

import contextvars
import functools
import threading
from collections.abc import Callable
from typing import Any

_left: contextvars.ContextVar[threading.Event | None] = contextvars.ContextVar("left", default=None)


class Left(Exception):
    """Raised in work whose readers have all left."""


def watched(call: Callable[[], Any], left: threading.Event) -> Callable[[], Any]:
    """Return ``call`` with ``left`` as the event that its reader sets when it leaves."""
    context = contextvars.copy_context()
    context.run(_left.set, left)
    return functools.partial(context.run, call)


def event() -> threading.Event | None:
    """Return the event of the present reader; None for one that cannot leave."""
    return _left.get()

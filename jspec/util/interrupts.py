"""Ctrl-C that waits for the end of a piece of work."""

import signal
import threading
from types import FrameType
from typing import Any


class Uninterrupted:
    """A context in which Ctrl-C is noted, and acts at its end; a second one acts at once.

    So work on shared values is not left half done. Threads other than the main one get no signals.
    """

    def __enter__(self) -> None:
        self._frame: FrameType | None = None  # frame that the first signal interrupted
        self._handler: Any = None
        handler = signal.getsignal(signal.SIGINT)
        if threading.current_thread() is threading.main_thread() and callable(handler):
            self._handler = handler
            signal.signal(signal.SIGINT, self._note)

    def __exit__(self, *_: object) -> None:
        if self._handler is not None:
            signal.signal(signal.SIGINT, self._handler)
            if self._frame is not None:
                self._handler(signal.SIGINT, self._frame)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self._frame is not None:
            self._handler(number, frame)
        self._frame = frame

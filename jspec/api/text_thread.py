"""The thread in which the texts of an ``AsyncLLM`` are decoded."""

import threading
from collections.abc import Callable


class TextThread:
    """Calls ``read`` after every ``wake``, once for all calls that came meanwhile.

    So the engine's thread never waits for tokenizers, stop strings and outputs.
    """

    def __init__(self, read: Callable[[], None]):
        self._read = read
        self._has_news, self._has_closed = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._serve, name="jspec-text", daemon=True)
        self._thread.start()

    def wake(self) -> None:
        """Have what is new read."""
        self._has_news.set()

    def close(self) -> None:
        """Read the last time, and wait for it."""
        self._has_closed.set()
        self._has_news.set()
        self._thread.join()

    def _serve(self) -> None:
        while not self._has_closed.is_set():
            self._has_news.wait()
            self._has_news.clear()
            self._read()

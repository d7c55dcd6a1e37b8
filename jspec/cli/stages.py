"""The stages of a command that takes long before it answers."""

import threading
from collections.abc import Callable
from time import perf_counter
from typing import Any

from rich.console import Console
from rich.text import Text


class Stages:
    """A spinner at a terminal; elsewhere a line for each stage, with the seconds since the start.

    Args:
      console: of standard error.
      write: writes a line; None to print it.
      patience: seconds of a stage before its line, so that quick commands and errors have none.
    """

    def __init__(
        self,
        console: Console,
        write: Callable[[str], None] | None = None,
        patience: float = 2.0,
    ):
        self._has_spinner, self._patience = console.is_terminal, patience
        self._console, self._write = console, write or self._print
        self._status = console.status("")
        self._timer = threading.Timer(0, int)
        self._begin = perf_counter()

    def __enter__(self) -> "Stages":
        self._status.start()
        return self

    def __exit__(self, *_: Any) -> None:
        self._timer.cancel()
        self._status.stop()

    def begin(self, words: str) -> None:
        """Begin a stage."""
        self._timer.cancel()
        if self._has_spinner:
            self._status.update(Text(words))
            return
        self._timer = threading.Timer(self._patience, lambda: self._write(self._timed(words)))
        self._timer.daemon = True
        self._timer.start()

    def end(self, words: str) -> None:
        """Write that the last stage is over."""
        self._timer.cancel()
        self._status.stop()
        self._write(self._timed(words))

    def note(self, words: str) -> None:
        """Write a line beside the stages."""
        self._write(words)

    def _print(self, words: str) -> None:
        self._console.print(words, markup=False, soft_wrap=True)

    def _timed(self, words: str) -> str:
        return f"{words} ({perf_counter() - self._begin:.1f} s)"

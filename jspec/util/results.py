"""Results of long work by key: made once for readers who ask together, and cached in bounds."""

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from concurrent.futures import Future
from typing import Any

from jspec.util import leaving
from jspec.util.leaving import Left

_LOOK_SECONDS = 0.05  # between two looks whether a reader has left


class Results:
    """The last results of a kind of work, up to ``most_bytes``, of which each takes some bytes.

    A ``ValueError`` is a result too. A ``TimeoutError`` is one for present readers, and not cached.
    Several threads may use it.
    """

    def __init__(self, most_bytes: int):
        self._most_bytes, self._num_bytes = most_bytes, 0
        self._lock = threading.Lock()
        self._cached: OrderedDict[Hashable, tuple[Any, int]] = OrderedDict()
        self._running: dict[Hashable, _Running] = {}

    def get(
        self,
        key: Hashable,
        make: Callable[[Callable[[], bool]], Any],
        size_of: Callable[[Any], int],
    ) -> Any:
        """Return the result of a key.

        Args:
          key: decides about the result.
          make: returns the result; called with a function that is true while a reader waits.
          size_of: bytes of a result.

        Raises:
          Left: the reader has left, by the event of ``leaving``.
        """
        left = leaving.event()
        while True:
            with self._lock:
                if key in self._cached:
                    self._cached.move_to_end(key)
                    return _opened(self._cached[key][0])
                running = self._running.get(key)
                is_first = running is None
                if is_first:
                    running = self._running[key] = _Running()
                running.readers.append(left)
            if is_first:
                self._make(key, make, size_of, running)
            result = running.result(left)
            if not isinstance(result, Left):
                return _opened(result)
            if left is not None and left.is_set():
                raise Left

    def clear(self) -> None:
        """Drop all results."""
        with self._lock:
            self._cached.clear()
            self._num_bytes = 0

    def _make(self, key: Hashable, make: Any, size_of: Any, running: "_Running") -> None:
        result: Any = Left()
        try:
            result = make(running.is_read)
        except (ValueError, TimeoutError, Left) as error:
            result = error.with_traceback(None)
        finally:
            with self._lock:
                del self._running[key]
                if not isinstance(result, Left | TimeoutError):
                    is_error = isinstance(result, ValueError)
                    size = len(str(result)) if is_error else size_of(result)
                    self._put(key, result, size)
            running.future.set_result(result)

    def _put(self, key: Hashable, result: Any, size: int) -> None:
        if size > self._most_bytes:
            return
        self._cached[key] = result, size
        self._num_bytes += size
        while self._num_bytes > self._most_bytes:
            self._num_bytes -= self._cached.popitem(last=False)[1][1]


class _Running:
    """Work that runs, and its readers."""

    def __init__(self) -> None:
        self.future: Future[Any] = Future()
        self.readers: list[threading.Event | None] = []

    def is_read(self) -> bool:
        """Return whether any reader still waits."""
        return any(left is None or not left.is_set() for left in list(self.readers))

    def result(self, left: threading.Event | None) -> Any:
        """Return the result; raise Left if the reader leaves before."""
        while True:
            try:
                return self.future.result(None if left is None else _LOOK_SECONDS)
            except TimeoutError:
                if left.is_set():
                    raise Left from None


def _opened(result: Any) -> Any:
    if isinstance(result, ValueError | TimeoutError):
        raise type(result)(*result.args)
    return result

"""Threads that never hold up the end of the process.

Those of ``concurrent.futures`` do: the interpreter waits for them until their work is done.
"""

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from jspec.util import leaving


class DaemonThreads:
    """Up to ``count`` threads, started when needed, that run calls in their order.

    Args:
      count: most threads.
      name: of each.
      closed: words of the error once they are closed.
    """

    def __init__(self, count: int, name: str, closed: str):
        self._count, self._name, self._words = count, name, closed
        self._lock = threading.Lock()
        self._calls: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None]
        self._calls = queue.SimpleQueue()
        self._num_threads = 0
        self._closed = threading.Event()
        self._left: set[threading.Event] = set()  # events of calls that wait or run

    def submit(self, call: Callable[[], Any], left: threading.Event | None = None) -> Future[Any]:
        """Return the future result of a call.

        Args:
          call: what to run.
          left: set when no caller waits for the result any more; ``leaving`` ends its work.

        Raises:
          RuntimeError: the threads were closed.
        """
        left = threading.Event() if left is None else left
        future: Future[Any] = Future()
        with self._lock:
            if self._closed.is_set():
                raise RuntimeError(self._words)
            self._left.add(left)
            self._calls.put((future, leaving.watched(call, left)))
            if self._num_threads < self._count:
                self._num_threads += 1
                threading.Thread(target=self._serve, name=self._name, daemon=True).start()
        future.add_done_callback(lambda _: self._left.discard(left))
        return future

    def _serve(self) -> None:
        while True:
            item = self._calls.get()
            if item is None:
                return
            future, call = item
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(call())
            except leaving.Left:
                future.set_exception(RuntimeError(self._words))
            except BaseException as error:
                future.set_exception(error)
            del future, call, item  # else their arrays live until the next call

    def close(self) -> None:
        """End the calls that wait, and those whose work can end; do not wait for others."""
        with self._lock:
            self._closed.set()
            while not self._calls.empty():
                future, _ = self._calls.get()
                if future.set_running_or_notify_cancel():
                    future.set_exception(RuntimeError(self._words))
            for left in list(self._left):
                left.set()
            for _ in range(self._num_threads):
                self._calls.put(None)

"""Child processes that compile grammars, within bounds of time and memory.

One that was killed, or that took long, is replaced. They end with this process.
"""

import contextlib
import json
import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from jspec.grammar import child, limits
from jspec.grammar.tables import Vocabulary
from jspec.util.leaving import Left

_LOOK_SECONDS = 0.02  # between two looks whether anybody still waits
_MOST_RUNNING = 3  # tasks at a time; the others wait
_QUICK_SECONDS = 1.0  # after which a task leaves the processors to others
_NICENESS = 10
# The paths of this process, so that the child imports the same packages.
_PROGRAM = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from jspec.grammar import child; child.main()"
)

Reply = tuple[Any, Mapping[str, np.ndarray]]


class _Child:
    """A process that runs one task at a time; a thread reads its replies."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-c", _PROGRAM, json.dumps([*map(str, sys.path)])],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        self._replies: queue.SimpleQueue[Any] = queue.SimpleQueue()
        threading.Thread(target=self._read, name="jspec-grammar-reader", daemon=True).start()
        self.vocabulary: Vocabulary | None = None  # The last one that it was sent.

    def _read(self) -> None:
        with contextlib.suppress(EOFError, OSError, ValueError):
            while True:
                self._replies.put(child.read(self._process.stdout))
        self._replies.put(None)

    def send(self, task: dict[str, Any], arrays: Mapping[str, np.ndarray]) -> None:
        """Begin a task; raise OSError if the process has ended."""
        child.write(self._process.stdin, task, arrays)

    def reply(self, is_read: Callable[[], bool], end: float) -> Any:
        """Return the reply; None if the process ended.

        Raises:
          Left: no reader waits any more.
          TimeoutError: it is later than ``end``, of ``time.monotonic``.
        """
        renice_at = time.monotonic() + _QUICK_SECONDS
        while True:
            try:
                return self._replies.get(timeout=_LOOK_SECONDS)
            except queue.Empty:
                now = time.monotonic()
                if not is_read():
                    raise Left from None
                if now > end:
                    raise TimeoutError("the grammar took longer than a machine may take") from None
                if now > renice_at:
                    self._renice()
                    renice_at = end + 1

    def _renice(self) -> None:
        """Leave the processors to others."""
        with contextlib.suppress(OSError, AttributeError):  # has ended; not on Windows
            os.setpriority(os.PRIO_PROCESS, self._process.pid, _NICENESS)

    @property
    def is_running(self) -> bool:
        """True unless the process was killed from outside."""
        return self._process.poll() is None

    def kill(self) -> None:
        """End the process now."""
        self._process.kill()
        self._process.wait()
        with contextlib.suppress(OSError):
            self._process.stdin.close()


class _Pool:
    """Children, of which one waits for the next task."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._idle: list[_Child] = []
        self._places = threading.Semaphore(_MOST_RUNNING)

    def run(
        self,
        task: dict[str, Any],
        vocabulary: Vocabulary | None,
        seconds: float,
        is_read: Callable[[], bool],
    ) -> Reply | None:
        while not self._places.acquire(timeout=_LOOK_SECONDS):
            if not is_read():
                raise Left
        given, is_reusable, begin = None, False, time.monotonic()
        try:
            given = self._take()
            end = begin + limits.WAIT_SECONDS
            if vocabulary is not None and given.vocabulary is not vocabulary:
                self._send_vocabulary(given, vocabulary, is_read, end)
            given.send({**task, "seconds": seconds}, {})
            reply = given.reply(is_read, end)
            is_reusable = reply is not None and time.monotonic() - begin < _QUICK_SECONDS
        except TimeoutError:  # an OSError too
            raise
        except OSError:  # it was killed while it waited
            reply = None
        finally:
            self._places.release()
            self._put(given, is_reusable)
        return reply

    def _send_vocabulary(self, given: _Child, vocabulary: Vocabulary, *wait: Any) -> None:
        parts = {name: part for name, part in vars(vocabulary).items() if name != "size"}
        seconds = limits.VOCABULARY_SECONDS
        given.send({"operation": "vocabulary", "size": vocabulary.size, "seconds": seconds}, parts)
        reply = given.reply(*wait)
        if reply is None or "error" in reply[0]:
            raise BrokenPipeError("the child process has no vocabulary")
        given.vocabulary = vocabulary

    def _take(self) -> _Child:
        with self._lock:
            while self._idle:
                given = self._idle.pop()
                if given.is_running:
                    return given
                given.kill()
        return _Child()

    def _put(self, given: _Child | None, is_reusable: bool) -> None:
        """Keep one child for the next task; a fresh one in place of one that took long."""
        with self._lock:
            if given is not None and is_reusable and not self._idle:
                self._idle.append(given)
                return
        if given is not None:
            given.kill()
        with self._lock, contextlib.suppress(OSError):  # the next task starts one if this fails
            if not self._idle:
                self._idle.append(_Child())


_POOL = _Pool()


def run(
    operation: str,
    is_read: Callable[[], bool],
    *,
    vocabulary: Vocabulary | None = None,
    seconds: float | None = None,
    **arguments: Any,
) -> Reply:
    """Return the result and the arrays of an operation of ``child``.

    Args:
      operation: its name.
      is_read: returns whether a reader still waits for the result.
      vocabulary: of operations over tokens.
      seconds: of processor time; None for ``limits.SECONDS``.
      arguments: of the operation, as JSON has them.

    Raises:
      ValueError: the operation raised it.
      MemoryError: it needs more than time or memory allow.
      Left: no reader waits any more.
      TimeoutError: it did not end in ``limits.WAIT_SECONDS``, on this busy machine.
    """
    seconds = limits.SECONDS if seconds is None else seconds
    reply = _POOL.run({"operation": operation, **arguments}, vocabulary, seconds, is_read)
    if reply is None:
        raise MemoryError
    header, arrays = reply
    if "error" in header:
        raise ValueError(header["error"])
    return header["result"], arrays

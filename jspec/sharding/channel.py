"""The channel between processes: the first one decides, and the others run the same after it.

JAX runs a program on the devices of several processes once each of them calls it, all in one order.
So every process has a replica of what calls programs. The first process sends each call with its
arguments, as plain data, before it runs it itself.

If a process is lost, the others end at once: they would wait for it in their next collective. The
thread that notices it cannot raise in the one that waits, so it ends the process.
"""

import atexit
import contextlib
import functools
import os
import pickle
import queue
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import jax

from jspec.util.processes import before_exit_at_once, exit_at_once, has_failed, write_exit_code

_FAILED = "failed"  # message of the first process beside calls and the end
_INT_BYTES = 4  # bytes of a C int
_FAULT_SECONDS = 10  # longest time between the failures of two processes in the same call


class _End(NamedTuple):
    """The last message of a process: the exit code for those that follow.

    None if the code itself follows, as a C int, once the process has ended.
    """

    code: int | None = None
    at_once: bool = False


class _Beside(NamedTuple):
    """A call that runs in a thread, beside those that follow; its answer is an error, or None."""

    name: str
    method: str
    given: tuple[Any, ...]


class Replica:
    """An object of which every process has one. It has no ``channel`` but in the first process."""

    channel: "Channel | None" = None


def everywhere(method: Callable[..., Any]) -> Callable[..., Any]:
    """Have a method of a ``Replica`` run in all processes; its arguments are plain data."""

    @functools.wraps(method)
    def run(self: Replica, *given: Any, **named: Any) -> Any:
        if self.channel is None:
            return method(self, *given, **named)
        self.channel.send((type(self).__name__, method.__name__, given, named))
        try:
            return method(self, *given, **named)
        except BaseException:
            self.channel.send(_FAILED)
            raise

    return run


class Channel:
    """Connections between the first process and each of the others.

    Args:
      index: of this process.
      count: of all processes.
      peers: connections by process: of the first process to all others, of others to the first one.
    """

    def __init__(self, index: int, count: int, peers: Mapping[int, Connection]):
        self.index, self.count, self._peers = index, count, dict(peers)
        self._inboxes = {number: queue.SimpleQueue() for number in self._peers}
        self._ends = threading.Event()  # set once the end of others is no surprise
        self._has_closed = False
        self._sending = threading.Lock()  # threads may send beside each other
        for number in self._peers:
            name = f"jspec-process-{number}"
            threading.Thread(target=self._listen, args=(number,), name=name, daemon=True).start()
        atexit.register(self.close)
        before_exit_at_once(self.close)

    # -------------------------------------------------------------------------------- at the start

    def gather(self, value: Any) -> list[Any]:
        """Return the values of all processes, in their order, in each of them."""
        if self.index:
            self._send(value)
            values = self._inboxes[0].get()
            if isinstance(values, _End):
                raise SystemExit(self._code_of(values))
            return values
        values = [value, *(self._inboxes[number].get() for number in sorted(self._peers))]
        self._send(values)
        return values

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        """A context that bad input in one process ends in all: ValueError or OSError."""
        try:
            yield
        except (ValueError, OSError) as error:
            if not self._ends.is_set():
                self._agree({}, error)
            raise
        self._agree({})

    def check_same(self, facts: Mapping[str, str]) -> None:
        """Raise ValueError, in every process, if any of them has other ``facts``, or has failed."""
        self._agree(facts)

    def _agree(self, facts: Mapping[str, str], error: Exception | None = None) -> None:
        every = self.gather((dict(facts), None if error is None else str(error)))
        failed = [(number, text) for number, (_, text) in enumerate(every) if text is not None]
        if failed:
            self._ends.set()
            if error is None:
                number, text = failed[0]
                raise ValueError(f"process {number} of {self.count} has ended: {text}")
            return
        first = every[0][0]
        for number, (other, _) in enumerate(every):
            for name in first:
                if other.get(name) != first[name]:
                    self._ends.set()
                    raise ValueError(
                        f"{name} differs: process 0 has {first[name]}, process {number} has "
                        f"{other.get(name)}; start all processes with the same model and arguments."
                    )

    # --------------------------------------------------------------------------- the first process

    def lead(self, *replicas: Replica | None) -> None:
        """Send the calls of these objects from now on."""
        for replica in replicas:
            if replica is not None:
                replica.channel = self

    def send(self, message: Any) -> None:
        """Send a message to all other processes."""
        self._send(message)

    @contextlib.contextmanager
    def beside(self, replica: Any, method: str, *given: Any) -> Iterator[None]:
        """A context in which all others call a method in a thread; it ends once all of them have.

        Only one thread at a time may be in such a context.

        Args:
          replica: of which the others have one, of the same class.
          method: its name.
          *given: its arguments, as plain data.

        Raises:
          RuntimeError: it failed in another process.
        """
        self._send(_Beside(type(replica).__name__, method, given))
        try:
            yield
        finally:
            answers = {number: self._inboxes[number].get() for number in self._peers}
        for number, error in answers.items():
            if error is not None:
                raise RuntimeError(f"process {number} of {self.count}: {error}")

    def close(self, code: int | None = None) -> None:
        """End the connections, and the processes that follow; at once if ``code`` is their code.

        Otherwise they end with the code of this process.

        A process whose connection ends without a word is lost. Of those that follow, only one that
        ends together with all others says so.
        """
        if self._has_closed:
            return
        is_planned = self.index == 0 or self._ends.is_set()
        self._has_closed = True
        self._ends.set()
        for peer in self._peers.values():
            with contextlib.suppress(OSError):
                if is_planned:
                    follows = code is None and write_exit_code(peer.fileno())
                    last = int(has_failed()) if code is None else code
                    end = _End(None if follows else last, at_once=code is not None)
                    peer.send_bytes(pickle.dumps(end))
                else:
                    with socket.fromfd(peer.fileno(), socket.AF_INET, socket.SOCK_STREAM) as copy:
                        copy.shutdown(socket.SHUT_RDWR)

    # -------------------------------------------------------------------------- the other processes

    def follow(self, *replicas: Replica | None) -> int:
        """Run what the first process sends, until it ends; return the exit code that it has.

        A call that fails here must fail there too. SIGTERM and Ctrl-C reach all processes; this
        one goes on until the first process has drained, unless they come again.

        Raises:
          RuntimeError: a call has failed in one of the two processes alone.
        """
        by_name = {type(replica).__name__: replica for replica in replicas}
        with _patient():
            message = self._next(by_name)
            while not isinstance(message, _End):
                name, method, given, named = message
                fault = None
                try:
                    getattr(by_name[name], method)(*given, **named)
                except Exception as error:
                    fault = error
                try:
                    message = self._next(by_name, None if fault is None else _FAULT_SECONDS)
                except queue.Empty:
                    message = None
                if (message == _FAILED) != (fault is not None):
                    where = "here" if fault is not None else "in process 0"
                    raise RuntimeError(f"{name}.{method} failed {where} alone.") from fault
                if message == _FAILED:
                    message = self._next(by_name)
            return self._code_of(message)

    def _next(self, by_name: Mapping[str, Any], seconds: float | None = None) -> Any:
        """Return the next message of the first process; begin the calls before it that run beside.

        Raises:
          queue.Empty: none came in these ``seconds``.
        """
        while isinstance(message := self._inboxes[0].get(timeout=seconds), _Beside):
            given = by_name[message.name], message
            threading.Thread(target=self._run_beside, args=given, name="jspec-beside").start()
        return message

    def _run_beside(self, replica: Any, call: _Beside) -> None:
        error = None
        try:
            getattr(replica, call.method)(*call.given)
        except Exception as fault:
            error = f"{type(fault).__name__}: {fault}"
        self._send(error)

    def _code_of(self, end: _End) -> int:
        """Return the exit code of the first process; wait for its end if that has the code."""
        if end.code is not None:
            return end.code
        jax.distributed.shutdown()  # where the processes wait for each other
        with contextlib.suppress(OSError):
            data = os.read(self._peers[0].fileno(), _INT_BYTES)
            if len(data) == _INT_BYTES:
                return int.from_bytes(data, sys.byteorder, signed=True)
        return 1

    # -------------------------------------------------------------------------------- the network

    def _send(self, message: Any) -> None:
        data = pickle.dumps(message)
        with self._sending:
            for connection in self._peers.values():
                connection.send_bytes(data)

    def _listen(self, number: int) -> None:
        """Receive the messages of a process, and end this one if that ends unexpectedly."""
        try:
            message = None
            while not isinstance(message, _End):
                message = pickle.loads(self._peers[number].recv_bytes())
                self._inboxes[number].put(message)
            if self.index and message.at_once:
                self._has_closed = True
                exit_at_once(message.code)
        except (EOFError, OSError):
            if not self._ends.is_set():
                line = f"jspec: process {number} of {self.count} has ended, so process {self.index}"
                print(f"{line} ends too; start all of them again.", file=sys.stderr)
                self._has_closed = True  # So the others see that this process ends.
                exit_at_once(1)


@contextlib.contextmanager
def _patient() -> Iterator[None]:
    """Outlive the first SIGTERM or Ctrl-C, if this is the main thread."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def note(number: int, _: Any) -> None:
        for each, handler in before.items():
            signal.signal(each, handler)
        word = signal.Signals(number).name
        print(f"jspec: {word}: this process ends after process 0; again: at once", file=sys.stderr)

    before = {each: signal.signal(each, note) for each in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)

"""The thread that runs the requests of an ``AsyncLLM``, and the one that reads their texts."""

import functools
import logging
import queue
import threading
from collections.abc import Callable, Sequence
from time import perf_counter

from jspec.api.compiler import Compiler
from jspec.api.llm import LLM, STREAM_ROUNDS
from jspec.api.running import RunningRequest
from jspec.api.runtime import OnLaunch, running_of
from jspec.api.text_thread import TextThread

CLOSED = "AsyncLLM is closed; make another one."
_log = logging.getLogger(__name__)
_MOST_ROUNDS = 32  # rounds of a launch
_MEMORY = 0.8  # weight of the past in the mean time of a round

# What the engine's thread is to do, and for whom.
_Act = tuple[Sequence[RunningRequest], Callable[[], None]]


class EngineThread:
    """Steps the engine of an ``LLM`` while requests run, and turns what they generate into text.

    The engine's thread submits, steps and aborts. A second thread decodes texts, so that launches
    never wait for a tokenizer. A request leaves ``running`` in whichever thread it ends.

    Args:
      llm: whose engine it is.
      compiler: names the sequences that requests share programs with.
      max_num_queued: most sequences that wait for a slot; None for any number.
      launch_seconds: about how long the device runs before texts are read and requests join.
      on_launch: as of ``Runtime.pin``.
    """

    def __init__(
        self,
        llm: LLM,
        compiler: Compiler,
        *,
        max_num_queued: int | None,
        launch_seconds: float,
        on_launch: OnLaunch | None,
    ):
        self._runtime, self._detailed, self._compiler = llm.runtime, llm.detailed, compiler
        self._max_num_queued, self._on_launch = max_num_queued, on_launch
        self._launch_seconds = launch_seconds
        self._round_seconds = launch_seconds / STREAM_ROUNDS  # until it is measured
        self._inbox: queue.SimpleQueue[_Act | None] = queue.SimpleQueue()
        self.running: dict[str, RunningRequest] = {}  # by id
        self._taking_out = threading.Lock()  # guards ``running``
        self.error: BaseException | None = None  # the error that ended the thread
        self._texts = TextThread(self._read_all)
        self._runtime.pin(on_launch)
        self._thread = threading.Thread(target=self._serve, name="jspec-engine", daemon=True)
        self._thread.start()

    # ---------------------------------------------------------------------------------- any thread

    def submit(self, together: Sequence[RunningRequest]) -> None:
        """Queue requests, all or none. Each is notified once it is accepted, or refused."""
        self.running |= {running.id: running for running in together}
        self._inbox.put((together, functools.partial(self._begin, together)))
        if self.error is not None:
            self._fail_all()  # the thread has ended, and reads no more

    def abort(self, running: RunningRequest) -> None:
        """End a request with its texts as they are."""
        self._inbox.put(([running], lambda: self._runtime.abort(running_of([running.request]))))

    def leave(self, running: RunningRequest) -> bool:
        """End a request without a word to its reader; return whether it was still there."""
        is_there = self._take_out(running)
        if is_there:
            self._inbox.put(([], lambda: self._runtime.leave([running.request])))
        return is_there

    def close(self, timeout: float | None = None) -> None:
        """End all requests and both threads, and wait for a launch, up to ``timeout`` seconds."""
        self._inbox.put(None)
        self._thread.join(timeout)

    def _take_out(self, running: RunningRequest) -> bool:
        """Take a request out; return whether it was still there."""
        with self._taking_out:
            is_there = self.running.get(running.id) is running
            if is_there:
                del self.running[running.id]
        return is_there

    def _fail(self, running: RunningRequest, error: BaseException) -> bool:
        """End a request by an error; return whether it was still there."""
        is_there = self.leave(running)
        if is_there:
            running.fail(error)
        return is_there

    def _fail_all(self) -> None:
        for running in list(self.running.values()):
            self._fail(running, self.error)

    # ------------------------------------------------------------------------- the engine's thread

    def _serve(self) -> None:
        try:
            while self._receive():
                self._step()
                self._texts.wake()
            self.error = RuntimeError(CLOSED)
        except BaseException as error:
            self.error = error
        self._texts.close()
        self._fail_all()
        while not self._inbox.empty():
            act = self._inbox.get()
            if act is not None:
                self._do(*act)
        self._runtime.unpin(self._on_launch)

    def _receive(self) -> bool:
        """Take what came, and wait if nothing runs; return False at the end."""
        while True:
            runs = self._runs
            if not runs:
                self._texts.wake()  # steps of other threads may have ended texts
            try:
                act = self._inbox.get(block=not runs)
            except queue.Empty:
                return True
            if act is None:
                return False
            self._do(*act)
            if self._runs and self._inbox.empty():
                return True

    @property
    def _runs(self) -> bool:
        """True if a sequence of these requests waits or runs."""
        return any(running_of([running.request]) for running in list(self.running.values()))

    def _do(self, together: Sequence[RunningRequest], act: Callable[[], None]) -> None:
        """Run what serves some requests; an error ends these, and no others."""
        try:
            act()
        except BaseException as error:  # panics of Rust are no Exception
            if not any([self._fail(running, error) for running in together]):
                _log.error("the end of a request failed", exc_info=error)

    def _step(self) -> None:
        """Run launches of about ``launch_seconds``.

        A step that fails where no sequence ran, so that none can start again, ends all requests.
        """
        rounds = max(1, min(round(self._launch_seconds / self._round_seconds), _MOST_ROUNDS))
        for running in list(self.running.values()):
            for ticket in running.request.tickets:
                ticket.rounds = rounds
        begin = perf_counter()
        try:
            share = self._runtime.step()
        except BaseException as error:
            _log.error("a step of the engine failed", exc_info=error)
            for running in list(self.running.values()):
                self._fail(running, error)
            return
        if share:
            past, taken = self._round_seconds, (perf_counter() - begin) / (share * rounds)
            taken = min(taken, 2 * past)  # a step that compiled is no measure
            self._round_seconds = _MEMORY * past + (1 - _MEMORY) * taken

    def _begin(self, together: Sequence[RunningRequest], waits: bool = True) -> None:
        if any(self.running.get(running.id) is not running for running in together):
            return  # their reader has left
        batch = [running.request for running in together]
        if waits and not self._compiler.may_run(batch):
            self._compiler.compile(batch, functools.partial(self._begin_again, together))
            return
        num_queued = self._runtime.num_waiting + sum(len(each.sequences) for each in batch)
        if self._max_num_queued is not None and num_queued > self._max_num_queued:
            raise queue.Full(
                f"max_num_queued={self._max_num_queued} sequences wait already; submit this one "
                "later, or allow more."
            )
        self._runtime.submit(
            batch,
            rounds=STREAM_ROUNDS,
            priority=together[0].priority,
        )
        for running in together:
            running.accept()

    def _begin_again(self, together: Sequence[RunningRequest], has_programs: bool) -> None:
        """Begin what has waited for programs; if these cannot be compiled, it fails then."""
        begin = functools.partial(self._begin, together, waits=has_programs)
        self._inbox.put((together, begin))

    # ---------------------------------------------------------------------------- the text thread

    def _read_all(self) -> None:
        """Read all texts that have grown."""
        for running in list(self.running.values()):
            try:
                self._read(running)
            except BaseException as error:  # panics of Rust are no Exception
                self._fail(running, error)

    def _read(self, running: RunningRequest) -> None:
        """Decode what is new, and give it to the reader."""
        request = running.request
        has_grown = request.read()
        if ended := request.overrunning:
            self._inbox.put(([], lambda: self._runtime.abort(ended)))
        if not has_grown:
            return
        output = None
        if request.finished or not request.has_candidates:
            output = request.output(self._detailed)
        if request.finished:
            if not self._take_out(running):
                return
            self._runtime.count([request])
        if output is not None:
            running.put(output)

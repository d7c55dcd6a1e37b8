"""``AsyncLLM``: an ``LLM`` for asyncio, whose requests join one running batch."""

import asyncio
import atexit
import collections
import functools
import logging
import queue
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import Future
from time import perf_counter
from typing import Any

from jspec.api.compiler import Compiler
from jspec.api.llm import LLM, STREAM_ROUNDS
from jspec.api.outputs import RequestOutput
from jspec.api.requests import GenerationRequest
from jspec.api.running import RunningRequest, check_ids
from jspec.api.runtime import running_of
from jspec.api.sampling_params import SamplingParams
from jspec.api.text_thread import TextThread
from jspec.engine.launches import Launch
from jspec.engine.sequences import check_priority
from jspec.util.messages import shown
from jspec.util.threads import DaemonThreads
from jspec.util.values import is_real, is_whole

_log = logging.getLogger(__name__)
_MOST_ROUNDS = 32  # of a launch
_GRAMMARS = 16  # grammars that are waited for at a time; child processes compile them
_EXIT_SECONDS = 60  # that the end of the process waits for a launch, which may compile first
_CLOSED = "AsyncLLM is closed; make another one."
_MEMORY = 0.8  # weight of the past in the mean time of a round


# What the engine's thread is to do, and for whom.
_Act = tuple[Sequence[RunningRequest], Callable[[], None]]


class AsyncLLM:
    """Runs requests in the engine of an ``LLM``, from a thread of its own.

    A request joins whenever it comes, if a slot is free, and has the text that ``LLM.generate``
    gives it. A reader that leaves (a cancelled task, ``break`` and ``aclose``) aborts its request
    within one launch. Use it as a context manager, or ``close`` it; the end of the program does.
    The ``LLM`` can be used meanwhile, also by another ``AsyncLLM``: all requests share one batch.

    A second thread turns tokens into text, so that launches never wait for a tokenizer.

    Args:
      llm: the loaded models. Its ``max_num_seqs`` is the number of slots, and its
        ``max_model_len`` the capacity of each.
      max_num_queued: most sequences that wait for a slot; None for any number.
      launch_seconds: about how long the device runs before texts are read and requests join.
      on_launch: called with every launch of the engine that was read, as NumPy arrays, in the
        thread that read it. What it raises is logged.

    Raises:
      ValueError: ``max_num_queued`` or ``launch_seconds`` is out of range.
    """

    def __init__(
        self,
        llm: LLM,
        *,
        max_num_queued: int | None = None,
        launch_seconds: float = 0.05,
        on_launch: Callable[[Launch], None] | None = None,
    ):
        if not (is_real(launch_seconds) and launch_seconds > 0):
            raise ValueError(f"launch_seconds={shown(launch_seconds)} must be a number above 0.")
        if not (max_num_queued is None or is_whole(max_num_queued, 1)):
            raise ValueError(
                f"max_num_queued={shown(max_num_queued)} must be whole and at least 1."
            )
        self.llm, self._runtime = llm, llm.runtime
        self._max_num_queued, self._on_launch = max_num_queued, on_launch
        self._launch_seconds = launch_seconds
        self._round_seconds = launch_seconds / STREAM_ROUNDS  # until it is measured
        self._inbox: queue.SimpleQueue[_Act | None] = queue.SimpleQueue()
        self._running: dict[str, RunningRequest] = {}
        self._taking_out = threading.Lock()  # of ``_running``
        self._error: BaseException | None = None  # that ended the thread
        self._compiler = Compiler(llm)
        self._grammars = DaemonThreads(_GRAMMARS, "jspec-grammar", _CLOSED)
        self._texts = TextThread(self._read_all)
        self._runtime.pin(on_launch)
        self._thread = threading.Thread(target=self._serve, name="jspec-engine", daemon=True)
        self._thread.start()
        atexit.register(self._close_at_exit)  # a thread inside XLA would abort the process

    def __enter__(self) -> "AsyncLLM":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def warm_up(self, on_progress: Callable[[int, int], None] = lambda *_: None) -> None:
        """Allocate the KV cache and compile, before any request comes.

        Programs are those for prompts of all lengths, and for all numeric settings of sampling.
        What only few use is compiled when it is asked for: grammars, scores, lists of token ids.
        From now on a request that needs a program waits for it, and the others go on. With weights
        on several devices, prompts of other lengths compile when they come.

        Args:
          on_progress: called with the number of programs that are done, and of all.
        """
        self._compiler.warm_up(on_progress)

    def prepare(self, sampling_params: SamplingParams) -> Future[None]:
        """Compile in a thread what requests with these settings need, after ``warm_up``.

        Requests that need it meanwhile wait for it, and the others go on. Smaller grammars share
        the programs of one that was prepared.

        Raises:
          RuntimeError: ``warm_up`` was not called.
        """
        return self._compiler.prepare(sampling_params)

    async def generate(
        self,
        prompt: Any,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        priority: int = 0,
    ) -> AsyncIterator[RequestOutput]:
        """Continue a prompt; yield its texts so far each time they grow.

        It is ``submit`` and a loop over its outputs. The last one is that of ``LLM.generate``.
        """
        running = await self.submit(prompt, sampling_params, request_id, priority=priority)
        try:
            async for output in running:
                yield output
        finally:
            running.close()

    async def submit(
        self,
        prompt: Any,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        priority: int = 0,
    ) -> RunningRequest:
        """Queue a request; return it once it is accepted. Its reader must ``close`` it.

        Args:
          prompt: as of ``LLM.generate``, one.
          sampling_params: None for ``SamplingParams()``.
          request_id: of the outputs, and for ``abort``; None for the request's number.
          priority: the lowest number runs first.

        Raises:
          queue.Full: ``max_num_queued`` sequences wait already.
          RuntimeError: this was closed, or the device failed for this request.
          ValueError: the request is not valid; nothing has run then.
        """
        ids = None if request_id is None else [request_id]
        together = await self.submit_all(prompt, sampling_params, ids, priority=priority)
        if len(together) != 1:
            for running in together:
                running.close()
            raise ValueError(f"prompt has {len(together)} prompts; call submit_all.")
        return together[0]

    async def submit_all(
        self,
        prompts: Any,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        request_ids: Sequence[str] | None = None,
        *,
        priority: int = 0,
    ) -> list[RunningRequest]:
        """Queue a request for each prompt, all or none; errors are those of ``submit``."""
        check_priority(priority)
        check_ids(request_ids)
        batch = await self._resolved(prompts, sampling_params)
        names = [str(each.number) for each in batch] if request_ids is None else request_ids
        if len(names) != len(batch):
            raise ValueError(
                f"request_ids has {len(names)} names for {len(batch)} prompts; give one for each."
            )
        for name, count in collections.Counter(names).items():
            if name in self._running or count > 1:
                raise ValueError(f"request_id={shown(name)} is running already; take another one.")
        for name, request in zip(names, batch, strict=True):
            request.id = name
        together = [RunningRequest(request, priority, self._leave) for request in batch]
        self._running |= {running.id: running for running in together}
        self._inbox.put((together, functools.partial(self._begin, together)))
        if self._error is not None:
            self._fail_all()  # the thread has ended, and reads no more
        try:
            for running in together:
                await running.accepted()
        except BaseException:
            for running in together:
                running.close()
            raise
        return together

    async def _resolved(self, prompts: Any, params: Any) -> list[GenerationRequest]:
        """Resolve requests in a thread."""
        each = params if isinstance(params, Sequence) else [params]
        has_grammar = any(getattr(one, "structured_outputs", None) for one in each)
        resolve = functools.partial(self.llm.resolver.resolve, prompts, params)
        batch = await self.in_thread(resolve, compiles=has_grammar)
        await self._compiler.wait_for_programs(batch)
        return batch

    async def in_thread(self, call: Callable[[], Any], *, compiles: bool = False) -> Any:
        """Return the result of a call that takes long, in a thread.

        Calls that compile grammars have threads of their own. If this task is cancelled, their
        work ends, unless others wait for the same grammar.
        """
        if not compiles:
            return await asyncio.get_running_loop().run_in_executor(None, call)
        left = threading.Event()
        try:
            return await asyncio.wrap_future(self._grammars.submit(call, left))
        finally:
            left.set()

    def abort(self, request_id: str) -> None:
        """End a request: texts that still run end as they are, with finish_reason "abort".

        An unknown id is left alone: its request may have ended.
        """
        running = self._running.get(request_id)
        if running is not None:
            self._inbox.put(([running], lambda: self._runtime.abort(running_of([running.request]))))

    @property
    def num_running(self) -> int:
        """Requests that run or wait."""
        return len(self._running)

    @property
    def running_ids(self) -> list[str]:
        """The ids of requests that run or wait."""
        return list(self._running)

    @property
    def num_waiting(self) -> int:
        """Sequences that wait for a slot."""
        return self._runtime.num_waiting

    @property
    def num_in_slots(self) -> int:
        """Sequences that run."""
        return self._runtime.num_running

    @property
    def error(self) -> BaseException | None:
        """The error that ended the thread; None while it runs."""
        return self._error

    def close(self) -> None:
        """End all requests and the threads, and wait for them: for a launch at most."""
        atexit.unregister(self._close_at_exit)
        self._inbox.put(None)
        self._thread.join()
        self._grammars.close()
        self._compiler.close()

    def _close_at_exit(self) -> None:
        self._inbox.put(None)
        self._thread.join(_EXIT_SECONDS)

    # ------------------------------------------------------------------------- the engine's thread

    def _serve(self) -> None:
        try:
            while self._receive():
                self._step()
                self._texts.wake()
            self._error = RuntimeError(_CLOSED)
        except BaseException as error:
            self._error = error
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
        return any(running_of([running.request]) for running in list(self._running.values()))

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
        for running in list(self._running.values()):
            for ticket in running.request.tickets:
                ticket.rounds = rounds
        begin = perf_counter()
        try:
            has_run = self._runtime.step()
        except BaseException as error:
            _log.error("a step of the engine failed", exc_info=error)
            for running in list(self._running.values()):
                self._fail(running, error)
            return
        if has_run:
            past, taken = self._round_seconds, (perf_counter() - begin) / rounds
            taken = min(taken, 2 * past)  # a step that compiled tells nothing
            self._round_seconds = _MEMORY * past + (1 - _MEMORY) * taken

    def _begin(self, together: Sequence[RunningRequest]) -> None:
        if any(self._running.get(running.id) is not running for running in together):
            return  # their reader has left
        batch = [running.request for running in together]
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
            alike=[sequence for each in batch for sequence in self._compiler.alike(each)],
        )
        for running in together:
            running.accept()

    # ---------------------------------------------------------------------------- the text thread

    def _read_all(self) -> None:
        """Read all texts that have grown."""
        for running in list(self._running.values()):
            try:
                self._read(running)
            except BaseException as error:  # panics of Rust are no Exception
                self._fail(running, error)

    def _read(self, running: RunningRequest) -> None:
        """Decode what is new, and give it to the reader."""
        request = running.request
        if not request.read():
            return
        output = None
        if request.finished or not request.has_candidates:
            output = request.output(self.llm.detailed)
        if request.finished:
            if not self._take_out(running):
                return
            self._runtime.count([request])
        if ended := request.overrunning:
            self._inbox.put(([], lambda: self._runtime.abort(ended)))
        if output is not None:
            running.put(output)

    # ---------------------------------------------------------------------------------- any thread

    def _take_out(self, running: RunningRequest) -> bool:
        """Forget a request; return whether it was still there."""
        with self._taking_out:
            is_there = self._running.get(running.id) is running
            if is_there:
                del self._running[running.id]
        return is_there

    def _leave(self, running: RunningRequest) -> bool:
        """End a request without a word to its reader; return whether it was still there."""
        is_there = self._take_out(running)
        if is_there:
            self._inbox.put(([], lambda: self._runtime.leave([running.request])))
        return is_there

    def _fail(self, running: RunningRequest, error: BaseException) -> bool:
        """End a request by an error; return whether it was still there."""
        is_there = self._leave(running)
        if is_there:
            running.fail(error)
        return is_there

    def _fail_all(self) -> None:
        for running in list(self._running.values()):
            self._fail(running, self._error)

"""``AsyncLLM``: an ``LLM`` for asyncio, whose requests join one running batch."""

import asyncio
import atexit
import collections
import contextlib
import dataclasses
import functools
import itertools
import logging
import queue
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from time import perf_counter
from typing import Any

from jspec.api.llm import LLM, STREAM_ROUNDS
from jspec.api.outputs import RequestOutput
from jspec.api.requests import GenerationRequest
from jspec.api.running import RunningRequest, check_ids
from jspec.api.sampling_params import SamplingParams
from jspec.engine.launches import Launch
from jspec.engine.programs import Programs
from jspec.engine.sequences import SequenceParams, check_priority
from jspec.util import leaving
from jspec.util.messages import shown
from jspec.util.threads import DaemonThreads
from jspec.util.values import is_real

_log = logging.getLogger(__name__)
_MOST_ROUNDS = 32  # of a launch
_COMPILERS = 2  # programs that are compiled at a time
_GRAMMARS = 16  # grammars that are waited for at a time; child processes compile them
_EXIT_SECONDS = 60  # that the end of the process waits for a launch, which may compile first
_CLOSED = "AsyncLLM is closed; make another one."
_MEMORY = 0.8  # weight of the past in the mean time of a round


# What the thread is to do, and for whom.
_Act = tuple[Sequence[RunningRequest], Callable[[], None]]


class AsyncLLM:
    """Runs the requests of an ``LLM`` in one batch, in a thread of its own.

    A request joins whenever it comes, if a slot is free, and has the text that ``LLM.generate``
    gives it. A reader that leaves (a cancelled task, ``break`` and ``aclose``) aborts its request
    within one launch. Use it as a context manager, or ``close`` it; the end of the program does.

    Args:
      llm: the loaded models. Its ``max_num_seqs`` is the number of slots, and its
        ``max_model_len`` the capacity of each.
      max_num_queued: most sequences that wait for a slot; None for any number.
      launch_seconds: about how long the device runs before texts are read and requests join.
      on_launch: called in the thread with every launch that was read, as NumPy arrays. What it
        raises is logged.

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
        self.llm, self._runtime = llm, llm.runtime
        size = llm.max_num_seqs, llm.max_model_len
        on_launch = None if on_launch is None else functools.partial(_call_logged, on_launch)
        options = dict(max_num_queued=max_num_queued, on_launch=on_launch, joins_together=False)
        self._engine = self._runtime.engine(*size, **options)
        self._programs: Programs | None = None  # after ``warm_up``
        self._typical: tuple[SequenceParams, ...] = ()  # with grammars that were prepared
        self._launch_seconds = launch_seconds
        self._round_seconds = launch_seconds / STREAM_ROUNDS  # until it is measured
        self._inbox: queue.SimpleQueue[_Act | None] = queue.SimpleQueue()
        self._running: dict[str, RunningRequest] = {}
        self._error: BaseException | None = None  # that ended the thread
        # At the end of the process a thread in XLA must be waited for, or it aborts the process.
        self._compilers = ThreadPoolExecutor(_COMPILERS, "jspec-compiler")
        self._has_closed = threading.Event()
        self._grammars = DaemonThreads(_GRAMMARS, "jspec-grammar", _CLOSED)
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
        typical = SamplingParams(
            temperature=0.7,
            top_p=0.9,
            top_k=20,
            min_p=0.02,
            presence_penalty=0.1,
            frequency_penalty=0.1,
            repetition_penalty=1.1,
        )
        ends = tuple(self.llm.eos_token_ids) or (0,)
        options = dict(max_tokens=2, stop_token_ids=ends, **typical.parameters)
        programs = Programs(self._engine)
        sequence = SequenceParams((0, 0), **options)
        self._runtime.warm_up(self._engine, programs, sequence, on_progress)
        self._programs = programs

    def prepare(self, sampling_params: SamplingParams) -> Future[None]:
        """Compile in a thread what requests with these settings need, after ``warm_up``.

        Requests that need it meanwhile wait for it, and the others go on. Smaller grammars share
        the programs of one that was prepared.

        Raises:
          RuntimeError: ``warm_up`` was not called.
        """
        if self._programs is None:
            raise RuntimeError("prepare follows warm_up; call warm_up first.")

        def compile() -> None:
            prompt = {"prompt_token_ids": [0]}
            (request,) = self.llm.resolve(prompt, sampling_params, will_run=False)
            if request.sequences[0].grammar is not None:
                self._typical = (*self._typical, request.sequences[0])
            self._compile([request])

        return self._compilers.submit(leaving.watched(compile, self._has_closed))

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
        pairs = zip(names, batch, strict=True)
        together = [RunningRequest(*pair, priority, self._close) for pair in pairs]
        self._running |= {running.id: running for running in together}
        self._put(together, lambda: self._begin(together))
        if self._error is not None:
            self._fail_all()  # the thread has ended, and reads no more
        try:
            for running in together:
                await running._accepted()
        except BaseException:
            for running in together:
                running.close()
            raise
        return together

    async def _resolved(self, prompts: Any, params: Any) -> list[GenerationRequest]:
        """Resolve requests in a thread."""
        each = params if isinstance(params, Sequence) else [params]
        has_grammar = any(getattr(one, "structured_outputs", None) for one in each)
        resolve = functools.partial(self.llm.resolve, prompts, params)
        batch = await self.in_thread(resolve, compiles=has_grammar)
        if self._needs_programs(batch):
            loop = asyncio.get_running_loop()
            await loop.run_in_executor(self._compilers, self._compile, batch)
        return batch

    def _needs_programs(self, batch: Sequence[GenerationRequest]) -> bool:
        """Return whether a batch may need programs that no request has needed so far."""
        if self._programs is None:
            return False
        scoring = self._runtime.scoring_of(batch)
        return any(self._programs.may_lack(self._like(each), scoring) for each in batch)

    def _compile(self, batch: Sequence[GenerationRequest]) -> None:
        scoring = self._runtime.scoring_of(batch)
        for request in batch:
            self._programs.compile(self._like(request), scoring)

    def _like(self, request: GenerationRequest) -> list[SequenceParams]:
        """Return a sequence of a request, and those prepared that it shares programs with."""
        sequence = request.sequences[0]  # the others differ by streams
        return [sequence, *(self._typical if sequence.grammar is not None else ())]

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

    def _close(self, running: RunningRequest) -> None:
        self._put([running], lambda: self._end(running))

    def _put(self, together: Sequence[RunningRequest], act: Callable[[], None]) -> None:
        self._inbox.put((together, act))

    def abort(self, request_id: str) -> None:
        """End a request: texts that still run end as they are, with finish_reason "abort".

        An unknown id is left alone: its request may have ended.
        """
        running = self._running.get(request_id)
        if running is not None:
            self._put([running], lambda: self._abort(running))

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
        return self._engine.num_waiting

    @property
    def num_in_slots(self) -> int:
        """Sequences that run."""
        return self._engine.num_running

    @property
    def error(self) -> BaseException | None:
        """The error that ended the thread; None while it runs."""
        return self._error

    def close(self) -> None:
        """End all requests and the thread, and wait for it: for a launch at most."""
        atexit.unregister(self._close_at_exit)
        self._inbox.put(None)
        self._thread.join()
        self._grammars.close()
        self._has_closed.set()
        self._compilers.shutdown(wait=False, cancel_futures=True)

    def _close_at_exit(self) -> None:
        self._inbox.put(None)
        self._thread.join(_EXIT_SECONDS)

    # -------------------------------------------------------------------------------- the thread

    def _serve(self) -> None:
        try:
            while self._receive():
                self._step()
                for running in list(self._running.values()):
                    self._do([running], functools.partial(self._report, running))
            self._error = RuntimeError(_CLOSED)
        except BaseException as error:
            self._error = error
        self._fail_all()
        with contextlib.suppress(Exception):  # prompts that were half read hold pages
            while not self._engine.is_idle:
                self._runtime.step(self._engine)

    def _receive(self) -> bool:
        """Take what came, and wait if nothing runs; return False at the end."""
        while True:
            try:
                act = self._inbox.get(block=self._engine.is_idle)
            except queue.Empty:
                return True
            if act is None:
                return False
            self._do(*act)
            if not self._engine.is_idle and self._inbox.empty():
                return True

    def _do(self, together: Sequence[RunningRequest], act: Callable[[], None]) -> None:
        """Run what serves some requests; an error ends these, and no others."""
        try:
            act()
        except BaseException as error:  # panics of Rust are no Exception
            for running in together:
                self._fail(running, error)

    def _step(self) -> None:
        """Run launches of about ``launch_seconds``."""
        rounds = max(1, min(round(self._launch_seconds / self._round_seconds), _MOST_ROUNDS))
        for running in list(self._running.values()):
            for ticket in running._tickets:
                ticket.rounds = rounds
        begin = perf_counter()
        self._runtime.step(self._engine)
        past, taken = self._round_seconds, (perf_counter() - begin) / rounds
        taken = min(taken, 2 * past)  # a step that compiled tells nothing
        self._round_seconds = _MEMORY * past + (1 - _MEMORY) * taken

    def _begin(self, together: Sequence[RunningRequest]) -> None:
        if any(self._running.get(running.id) is not running for running in together):
            return  # their reader has left
        batch = [running._request for running in together]
        self._engine.profile = self._engine.profile.grown(
            sequence for request in batch for sequence in self._like(request)
        )
        options = dict(rounds=STREAM_ROUNDS, priority=together[0]._priority)
        tickets = iter(self._runtime.submit(batch, engine=self._engine, **options)[1])
        for running in together:
            running._tickets = list(itertools.islice(tickets, len(running._request.sequences)))
            running._tell()

    def _report(self, running: RunningRequest) -> None:
        """Tell the reader what is new."""
        for ticket in running._tickets:
            if ticket.error is not None:
                self._fail(running, ticket.error)
                return
        count, is_finished = running._num_tokens, running._is_finished
        if count < 0 or (count == running._num_written and not is_finished):
            return
        running._num_written = count
        output = running._request.output(self.llm.detailed)
        running.output = dataclasses.replace(output, request_id=running.id)
        if is_finished:
            self._end(running)
        running._tell()

    def _abort(self, running: RunningRequest) -> None:
        output = running._request.output(self.llm.detailed)
        ended = [
            dataclasses.replace(text, finish_reason=text.finish_reason or "abort")
            for text in output.outputs
        ]
        changes = dict(request_id=running.id, outputs=ended, finished=True)
        running.output = dataclasses.replace(output, **changes)
        self._end(running)
        running._tell()

    def _end(self, running: RunningRequest) -> None:
        """Forget a request, and abort what still runs of it."""
        if self._running.get(running.id) is running:
            del self._running[running.id]
            self._runtime.leave(self._engine, [running._request], running._tickets)

    def _fail(self, running: RunningRequest, error: BaseException) -> None:
        try:
            self._end(running)
        except Exception:  # its reader gets the first error
            _log.exception("the end of request %s failed, too", running.id)
        if not isinstance(error, Exception):
            error = RuntimeError(f"{type(error).__name__}: {error}")
        running._error = error
        running._tell()

    def _fail_all(self) -> None:
        for running in list(self._running.values()):
            self._fail(running, self._error)


def _call_logged(on_launch: Callable[[Launch], None], launch: Launch) -> None:
    """Call an observer, which is no part of any request."""
    try:
        on_launch(launch)
    except Exception:
        _log.exception("on_launch failed")

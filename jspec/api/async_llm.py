"""``AsyncLLM``: an ``LLM`` for asyncio, whose requests join one running batch."""

import asyncio
import atexit
import collections
import functools
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import Future
from typing import Any

from jspec.api.compiler import Compiler
from jspec.api.engine_thread import CLOSED, EngineThread
from jspec.api.llm import LLM
from jspec.api.outputs import RequestOutput
from jspec.api.requests import GenerationRequest
from jspec.api.running import RunningRequest, check_ids
from jspec.api.sampling_params import SamplingParams
from jspec.engine.launches import Launch
from jspec.engine.sequences import check_priority, check_sizes
from jspec.util.messages import shown
from jspec.util.threads import DaemonThreads
from jspec.util.values import is_real

_GRAMMARS = 16  # grammars that are waited for at a time; child processes compile them
_EXIT_SECONDS = 60  # time that the end of the process waits for a launch, which may compile first


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
        check_sizes(max_num_queued=max_num_queued)
        self.llm, self._compiler = llm, Compiler(llm)
        self._grammars = DaemonThreads(_GRAMMARS, "jspec-grammar", CLOSED)
        self._thread = EngineThread(
            llm,
            self._compiler,
            max_num_queued=max_num_queued,
            launch_seconds=launch_seconds,
            on_launch=on_launch,
        )
        atexit.register(self._close_at_exit)  # a thread inside XLA would abort the process

    def __enter__(self) -> "AsyncLLM":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def warm_up(self, on_progress: Callable[[int, int], None] = lambda *_: None) -> None:
        """Allocate the KV cache and compile, before any request comes.

        Programs are those for prompts of all lengths, for all numeric settings of sampling, and for
        short lists. What only few use is compiled when it is asked for: grammars, scores, long
        lists of token ids.
        From now on a request that needs a program waits for it, and the others go on.

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
            if name in self._thread.running or count > 1:
                raise ValueError(f"request_id={shown(name)} is running already; take another one.")
        for name, request in zip(names, batch, strict=True):
            request.id = name
        together = [RunningRequest(request, priority, self._thread.leave) for request in batch]
        self._thread.submit(together)
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
        running = self._thread.running.get(request_id)
        if running is not None:
            self._thread.abort(running)

    @property
    def num_running(self) -> int:
        """Requests that run or wait."""
        return len(self._thread.running)

    @property
    def running_ids(self) -> list[str]:
        """The ids of requests that run or wait."""
        return list(self._thread.running)

    @property
    def num_waiting(self) -> int:
        """Sequences that wait for a slot."""
        return self.llm.runtime.num_waiting

    @property
    def num_in_slots(self) -> int:
        """Sequences that run."""
        return self.llm.runtime.num_running

    @property
    def error(self) -> BaseException | None:
        """The error that ended the thread; None while it runs."""
        return self._thread.error

    def close(self) -> None:
        """End all requests and the threads, and wait for them: for a launch at most."""
        atexit.unregister(self._close_at_exit)
        self._thread.close()
        self._grammars.close()
        self._compiler.close()

    def _close_at_exit(self) -> None:
        self._thread.close(_EXIT_SECONDS)

"""``AsyncLLM``: an ``LLM`` for asyncio, whose requests join one running batch."""

import asyncio
import contextlib
import dataclasses
import queue
import threading
from collections.abc import AsyncIterator, Callable
from time import perf_counter
from typing import Any

from jspec.api.llm import LLM, STREAM_ROUNDS
from jspec.api.outputs import RequestOutput
from jspec.api.requests import GenerationRequest
from jspec.api.sampling_params import SamplingParams
from jspec.engine.admission import chunk_widths
from jspec.engine.engine import Ticket
from jspec.engine.sequences import SequenceParams
from jspec.util.messages import shown

_MOST_ROUNDS = 32  # of a launch
_MEMORY = 0.8  # weight of the past in the mean time of a round


@dataclasses.dataclass(eq=False)
class _Running:
    """A request and its reader. The thread writes, and the reader's event loop is told."""

    id: str
    request: GenerationRequest
    priority: int
    loop: asyncio.AbstractEventLoop
    has_news: asyncio.Event
    tickets: list[Ticket] = dataclasses.field(default_factory=list)
    num_read: int = -1  # tokens of the last output
    output: RequestOutput | None = None
    error: BaseException | None = None

    @property
    def is_finished(self) -> bool:
        return all(text.finish_reason for text in self.request.transcripts)

    @property
    def num_tokens(self) -> int:
        answers = [text.answer for text in self.request.transcripts]
        return -1 if None in answers else sum(len(answer.tokens) for answer in answers)

    def tell(self) -> None:
        """Wake the reader."""
        with contextlib.suppress(RuntimeError):  # its event loop is closed: nobody reads any more
            self.loop.call_soon_threadsafe(self.has_news.set)


class AsyncLLM:
    """Runs the requests of an ``LLM`` in one batch, in a thread of its own.

    A request joins whenever it comes, if a slot is free, and has the text that ``LLM.generate``
    gives it. A reader that leaves (a cancelled task, ``break`` and ``aclose``) aborts its request
    within one launch. Use it as a context manager, or ``close`` it.

    Args:
      llm: the loaded models. Its ``max_num_seqs`` is the number of slots, and its
        ``max_model_len`` the capacity of each.
      max_num_queued: most sequences that wait for a slot; None for any number.
      launch_seconds: about how long the device runs before texts are read and requests join.

    Raises:
      ValueError: ``max_num_queued`` or ``launch_seconds`` is out of range.
    """

    def __init__(
        self, llm: LLM, *, max_num_queued: int | None = None, launch_seconds: float = 0.05
    ):
        if not launch_seconds > 0:
            raise ValueError(f"launch_seconds={shown(launch_seconds)} must be above 0.")
        self.llm, self._runtime = llm, llm.runtime
        size = llm.max_num_seqs, llm.max_model_len
        self._engine = self._runtime.engine(*size, max_num_queued=max_num_queued)
        self._launch_seconds = launch_seconds
        self._round_seconds = launch_seconds / STREAM_ROUNDS  # until it is measured
        self._inbox: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._running: dict[str, _Running] = {}
        self._error: BaseException | None = None  # that ended the thread
        self._thread = threading.Thread(target=self._serve, name="jspec-engine", daemon=True)
        self._thread.start()

    def __enter__(self) -> "AsyncLLM":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def warm_up(self) -> None:
        """Allocate the KV cache and compile, before any request comes.

        Programs are those for prompts of all lengths, and for all numeric settings of sampling.
        What only few use is compiled when it is asked for: grammars, scores, lists of token ids.
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
        capacity = self.llm.max_model_len
        prompt = lambda width: (0,) * min(width + 1, capacity - 2)
        ends = tuple(self.llm.eos_token_ids) or (0,)
        options = dict(max_tokens=2, stop_token_ids=ends, **typical.parameters)
        alone = [SequenceParams(prompt(width), **options) for width in chunk_widths(capacity)]
        together = [SequenceParams(prompt(1), **options)] * self.llm.max_num_seqs
        self._runtime.warm_up(self._engine, [together, *([each] for each in alone)])

    async def generate(
        self,
        prompt: Any,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        priority: int = 0,
    ) -> AsyncIterator[RequestOutput]:
        """Continue a prompt; yield its texts so far each time they grow.

        A reader that is slower than the device misses outputs, and no text: each has all of it. The
        last one is that of ``LLM.generate``. With ``best_of`` it is the only one.

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
        batch = await asyncio.to_thread(self.llm.resolve, prompt, sampling_params)
        if len(batch) != 1:
            raise ValueError(f"prompt has {len(batch)} prompts; call generate once for each.")
        name = str(batch[0].number) if request_id is None else request_id
        if name in self._running:
            raise ValueError(f"request_id={shown(name)} is running already; take another one.")
        where = asyncio.get_running_loop(), asyncio.Event()
        running = self._running[name] = _Running(name, batch[0], priority, *where)
        self._inbox.put(lambda: self._begin(running))
        if self._error is not None:
            self._fail_all()  # the thread has ended, and reads no more
        is_whole = batch[0].params.num_texts > batch[0].params.n
        output = None
        try:
            while True:
                await running.has_news.wait()
                running.has_news.clear()
                if running.error is not None:
                    raise running.error
                if running.output is output:
                    continue  # two outputs came while the first one was read
                output = running.output
                if output.finished or not is_whole:
                    yield output
                if output.finished:
                    return
        finally:
            self._inbox.put(lambda: self._end(running))

    def abort(self, request_id: str) -> None:
        """End a request: texts that still run end as they are, with finish_reason "abort".

        An unknown id is left alone: its request may have ended.
        """
        running = self._running.get(request_id)
        if running is not None:
            self._inbox.put(lambda: self._abort(running))

    @property
    def num_running(self) -> int:
        """Requests that run or wait."""
        return len(self._running)

    def close(self) -> None:
        """End all requests and the thread, and wait for it: for a launch at most."""
        self._inbox.put(None)
        self._thread.join()

    # -------------------------------------------------------------------------------- the thread

    def _serve(self) -> None:
        try:
            while self._receive():
                self._step()
                for running in list(self._running.values()):
                    self._report(running)
            self._error = RuntimeError("AsyncLLM is closed; make another one.")
        except BaseException as error:
            self._error = error
        self._fail_all()

    def _receive(self) -> bool:
        """Take what came, and wait if nothing runs; return False at the end."""
        while True:
            try:
                act = self._inbox.get(block=self._engine.is_idle)
            except queue.Empty:
                return True
            if act is None:
                return False
            act()
            if not self._engine.is_idle and self._inbox.empty():
                return True

    def _step(self) -> None:
        """Run launches of about ``launch_seconds``."""
        rounds = max(1, min(round(self._launch_seconds / self._round_seconds), _MOST_ROUNDS))
        for running in list(self._running.values()):
            for ticket in running.tickets:
                ticket.rounds = rounds
        begin = perf_counter()
        self._runtime.step(self._engine)
        past, taken = self._round_seconds, (perf_counter() - begin) / rounds
        taken = min(taken, 2 * past)  # a step that compiled tells nothing
        self._round_seconds = _MEMORY * past + (1 - _MEMORY) * taken

    def _begin(self, running: _Running) -> None:
        if self._running.get(running.id) is not running:
            return  # its reader has left
        try:
            options = dict(engine=self._engine, rounds=STREAM_ROUNDS, priority=running.priority)
            _, running.tickets = self._runtime.submit([running.request], **options)
        except Exception as error:
            self._fail(running, error)

    def _report(self, running: _Running) -> None:
        """Tell the reader what is new."""
        for ticket in running.tickets:
            if ticket.error is not None:
                self._fail(running, ticket.error)
                return
        count, is_finished = running.num_tokens, running.is_finished
        if count < 0 or (count == running.num_read and not is_finished):
            return
        running.num_read = count
        output = running.request.output(self.llm.detailed)
        running.output = dataclasses.replace(output, request_id=running.id)
        if is_finished:
            self._end(running)
        running.tell()

    def _abort(self, running: _Running) -> None:
        output = running.request.output(self.llm.detailed)
        ended = [
            dataclasses.replace(text, finish_reason=text.finish_reason or "abort")
            for text in output.outputs
        ]
        changes = dict(request_id=running.id, outputs=ended, finished=True)
        running.output = dataclasses.replace(output, **changes)
        self._end(running)
        running.tell()

    def _end(self, running: _Running) -> None:
        """Forget a request, and abort what still runs of it."""
        if self._running.get(running.id) is running:
            del self._running[running.id]
            self._runtime.leave(self._engine, [running.request], running.tickets)

    def _fail(self, running: _Running, error: BaseException) -> None:
        running.error = error
        self._end(running)
        running.tell()

    def _fail_all(self) -> None:
        for running in list(self._running.values()):
            with contextlib.suppress(Exception):  # the engine's own, which all readers get
                self._end(running)
            running.error = self._error
            running.tell()

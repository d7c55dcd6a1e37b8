"""A request that an ``AsyncLLM`` runs, as its reader sees it."""

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from typing import Any

from jspec.api.outputs import RequestOutput
from jspec.api.requests import GenerationRequest
from jspec.engine.engine import Ticket
from jspec.util.messages import shown


class RunningRequest:
    """The outputs of a request, for one reader: an asynchronous iterator.

    It yields the texts so far each time they grow. A reader that is slower than the device misses
    outputs, and no text: each has all of it. With ``best_of`` the last output is the only one.
    ``close`` aborts a request that still runs.

    Attributes:
      id: of the outputs, and for ``AsyncLLM.abort``.
      output: the last one; None before the first.
    """

    def __init__(self, id: str, request: GenerationRequest, priority: int, close: Callable):
        self.id, self.output = id, None
        self._request, self._priority, self._close = request, priority, close
        self._is_whole = request.params.num_texts > request.params.n
        self._loop, self._has_news = asyncio.get_running_loop(), asyncio.Event()
        # The thread writes the following, and then wakes the reader.
        self._tickets: list[Ticket] = []
        self._num_written = -1  # tokens of the last output
        self._error: BaseException | None = None
        self._last: RequestOutput | None = None  # that the reader has

    def __aiter__(self) -> "RunningRequest":
        return self

    async def __anext__(self) -> RequestOutput:
        while True:
            if self.output is not self._last:
                self._last = self.output
                if self._last.finished or not self._is_whole:
                    return self._last
            elif self._last is not None and self._last.finished:
                raise StopAsyncIteration
            else:
                await self._news()

    def close(self) -> None:
        """Abort what still runs, within one launch."""
        self._close(self)

    @property
    def begin(self) -> float | None:
        """When the first of its prompts left the queue, of ``time.perf_counter``; None: not yet."""
        begins = [ticket.begin for ticket in self._tickets if ticket.begin is not None]
        return min(begins, default=None)

    @property
    def num_cached_tokens(self) -> int:
        """Tokens of the prompt that the prefix cache had."""
        return max((ticket.answer.num_cached_tokens for ticket in self._tickets), default=0)

    async def _news(self) -> None:
        if self._error is None:
            await self._has_news.wait()
            self._has_news.clear()
        if self._error is not None:
            raise self._error

    async def _accepted(self) -> None:
        while not self._tickets:
            await self._news()

    @property
    def _is_finished(self) -> bool:
        return all(text.finish_reason for text in self._request.transcripts)

    @property
    def _num_tokens(self) -> int:
        answers = [text.answer for text in self._request.transcripts]
        return -1 if None in answers else sum(len(answer.tokens) for answer in answers)

    def _tell(self) -> None:
        with contextlib.suppress(RuntimeError):  # its event loop is closed: nobody reads any more
            self._loop.call_soon_threadsafe(self._has_news.set)


def check_ids(ids: Any) -> None:
    """Raise ValueError unless ``request_ids`` is None or a list of names."""
    is_list = isinstance(ids, Sequence) and not isinstance(ids, str | bytes)
    if ids is None or (is_list and all(isinstance(name, str) for name in ids)):
        return
    raise ValueError(f"request_ids={shown(ids)} must be a list of str, or None for numbers.")

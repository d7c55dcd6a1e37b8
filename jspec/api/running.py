"""A request that an ``AsyncLLM`` runs, as its reader sees it."""

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from typing import Any

from jspec.api.outputs import RequestOutput
from jspec.api.requests import GenerationRequest
from jspec.util.messages import shown


class RunningRequest:
    """The outputs of a request, for one reader: an asynchronous iterator.

    It yields the texts so far each time they grow. A reader that is slower than the device misses
    outputs, and no text: each has all of it. With ``best_of`` the last output is the only one.
    ``close`` aborts a request that still runs.

    Attributes:
      request: its sequences and their texts.
      priority: the lowest number runs first.
      output: the last one; None before the first.
    """

    def __init__(
        self,
        request: GenerationRequest,
        priority: int,
        close: Callable[["RunningRequest"], Any],
    ):
        self.request, self.priority, self._close = request, priority, close
        self._loop, self._has_news = asyncio.get_running_loop(), asyncio.Event()
        # Other threads write the following, and then wake the reader.
        self.output: RequestOutput | None = None
        self._is_accepted = False
        self._error: BaseException | None = None
        self._last: RequestOutput | None = None  # the output that the reader has

    def __aiter__(self) -> "RunningRequest":
        return self

    async def __anext__(self) -> RequestOutput:
        while True:
            if self.output is not self._last:
                self._last = self.output
                return self._last
            elif self._last is not None and self._last.finished:
                raise StopAsyncIteration
            else:
                await self._news()

    @property
    def id(self) -> str:
        """The id of its outputs, and for ``AsyncLLM.abort``."""
        return self.request.id

    def close(self) -> None:
        """Abort what still runs, within one launch."""
        self._close(self)

    async def accepted(self) -> None:
        """Wait until the engine has taken its sequences; raise the error if it has not."""
        while not self._is_accepted:
            await self._news()

    def accept(self) -> None:
        """Note that the engine has taken its sequences."""
        self._is_accepted = True
        self._tell()

    def put(self, output: RequestOutput) -> None:
        """Give the reader an output."""
        self.output = output
        self._tell()

    def fail(self, error: BaseException) -> None:
        """End the request by an error, which the reader gets; panics of Rust are no Exception."""
        if not isinstance(error, Exception):
            error = RuntimeError(f"{type(error).__name__}: {error}")
        self._error = error
        self._tell()

    async def _news(self) -> None:
        if self._error is None:
            await self._has_news.wait()
            self._has_news.clear()
        if self._error is not None:
            raise self._error

    def _tell(self) -> None:
        with contextlib.suppress(RuntimeError):  # its event loop is closed: there is no reader
            self._loop.call_soon_threadsafe(self._has_news.set)


def check_ids(ids: Any) -> None:
    """Raise ValueError unless ``request_ids`` is None or a list of names."""
    is_list = isinstance(ids, Sequence) and not isinstance(ids, str | bytes)
    if ids is None or (is_list and all(isinstance(name, str) for name in ids)):
        return
    raise ValueError(f"request_ids={shown(ids)} must be a list of str, or None for numbers.")

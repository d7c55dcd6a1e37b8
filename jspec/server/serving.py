"""The engine of a server, its settings, and its running requests, for all endpoints."""

import asyncio
import contextvars
import dataclasses
import json
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from starlette.responses import StreamingResponse

from jspec.api.async_llm import AsyncLLM, RunningRequest
from jspec.api.outputs import CompletionOutput, Logprob, RequestOutput
from jspec.api.sampling_params import SamplingParams
from jspec.server import errors
from jspec.server.errors import RequestError, refusals
from jspec.server.fields import GenerationFields
from jspec.server.metrics import Observer
from jspec.util import limits
from jspec.util.messages import printable

SHORT_BYTES = 64 << 10  # of a body that is worked on at once
_LONG_THREADS = 2  # bodies above it that are worked on at a time

body_size: contextvars.ContextVar[int] = contextvars.ContextVar("body_size", default=0)


@dataclasses.dataclass(frozen=True)
class Settings:
    """The choices of an operator, beside the arguments of ``LLM``."""

    model_names: tuple[str, ...]  # the first one is that of answers
    defaults: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # of requests
    max_new_tokens: int | None = None  # most tokens of any text; None: the room after its prompt
    chat_template: str | None = None  # None: the tokenizer's
    template_variables: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # of requests
    trusts_chat_templates: bool = False  # whether requests may bring their own
    chat_template_content_format: str = "auto"
    tool_parser: str | None = None  # None: tool_choice "auto" is refused
    max_texts: int = limits.TEXTS_OF_BODY.most  # of a request: its prompts times n
    reasoning_parser: str | None = None  # None: texts have no reasoning
    request_seconds: float | None = None  # longest time for a request; None: any
    has_dev_endpoints: bool = False
    shows_stats: bool = False  # whether each choice has its counts of drafts
    forces_usage: bool = False  # whether every event of a stream has the usage


class Server:
    """The engine of a server and its settings."""

    def __init__(self, served: AsyncLLM, settings: Settings, observer: Observer):
        self.served, self.settings, self.observer = served, settings, observer
        self.is_draining, self.created = False, int(time.time())
        self._long = ThreadPoolExecutor(_LONG_THREADS, "jspec-long-body")

    @property
    def llm(self) -> Any:
        """The ``LLM`` that answers."""
        return self.served.llm

    @property
    def model_name(self) -> str:
        """The model's name in answers."""
        return self.settings.model_names[0]

    async def in_thread(self, call: Callable[[], Any]) -> Any:
        """Return the result of work on the body of the current request, in a thread.

        Long bodies have few threads of their own, so that short ones do not wait for them.
        """
        if body_size.get() <= SHORT_BYTES:
            return await self.served.in_thread(call)
        return await asyncio.get_running_loop().run_in_executor(self._long, call)

    def check_model(self, name: str | None) -> None:
        """Raise RequestError if a request is for another model; None is for any."""
        if name is not None and name not in self.settings.model_names:
            raise RequestError(
                f"the model {printable(name)!r} does not exist; GET /v1/models lists those of "
                "this server.",
                status=404,
                param="model",
            )

    def room(self, num_prompt_tokens: int, asked: int | None, param: str = "max_tokens") -> int:
        """Return the most tokens of a text: those asked for, or all that fit.

        The operator's ``max_new_tokens`` cuts both, as in vLLM.

        Raises:
          RequestError: the prompt, or as many tokens after it, do not fit the model.
        """
        most = self.llm.max_model_len
        room = most - num_prompt_tokens
        if room < 1:
            raise RequestError(
                f"the prompt has {num_prompt_tokens} tokens, and the model's length is {most}; "
                "shorten the prompt, or set truncate_prompt_tokens.",
                param="prompt",
            )
        if asked is not None and asked > room:
            raise RequestError(
                f"{param}={asked} is too large: the prompt has {num_prompt_tokens} tokens, and "
                f"the model's length is {most}; ask for at most {room}.",
                param=param,
            )
        most = self.settings.max_new_tokens
        return min(room if asked is None else asked, room if most is None else most)

    async def submit(
        self,
        prompts: Sequence[Mapping[str, Any]],
        params: Sequence[SamplingParams],
        fields: GenerationFields,
        request_id: str,
    ) -> "Batch":
        """Queue the prompts of a request; return once all are accepted.

        Raises:
          RequestError: one of them is refused. None runs then.
        """
        salt = {} if fields.cache_salt is None else {"cache_salt": fields.cache_salt}
        names = [f"{request_id}-{index}" for index in range(len(prompts))]
        names[0] = request_id
        salted = [{**prompt, **salt} for prompt in prompts]
        arrival = time.perf_counter()
        with refusals():
            limits.SCORES.check(self._num_scores(prompts, params))
            given = salted, params, names
            running = await self.served.submit_all(*given, priority=fields.priority or 0)
        return Batch(self, running, arrival)

    def _num_scores(
        self, prompts: Sequence[Mapping[str, Any]], params: Sequence[SamplingParams]
    ) -> int:
        """Return the number of scores of prompts that a request asks for."""
        total = 0
        for prompt, one in zip(prompts, params, strict=True):
            count = one.prompt_logprobs
            if count is not None:
                listed = self.llm.build.plan.target.vocab_size if count == -1 else count
                total += len(prompt["prompt_token_ids"]) * (listed + 1)
        return total


class Batch:
    """The running requests of the prompts of one HTTP request, which came at ``arrival``."""

    def __init__(self, server: Server, running: list[RunningRequest], arrival: float):
        seconds = server.settings.request_seconds
        self._end = None if seconds is None else time.monotonic() + seconds
        self.running = running
        self._watched = [server.observer.begin(each, arrival) for each in running]

    def close(self) -> None:
        """Abort what still runs."""
        for running, watch in zip(self.running, self._watched, strict=True):
            running.close()
            watch.end()

    async def outputs(self) -> AsyncIterator[tuple[int, RequestOutput]]:
        """Yield the outputs of all prompts as they come, each with the index of its prompt.

        Raises:
          RequestError: a text failed, or the time is over.
        """
        waiting: dict[int, asyncio.Future[RequestOutput]] = {}
        came: asyncio.Queue[int] = asyncio.Queue()  # an output costs the same among many prompts

        def wait_for(index: int) -> None:
            waiting[index] = asyncio.ensure_future(anext(self.running[index]))
            waiting[index].add_done_callback(lambda _: came.put_nowait(index))

        try:
            for index in range(len(self.running)):
                wait_for(index)
            while waiting:
                left = None if self._end is None else self._end - time.monotonic()
                async with asyncio.timeout(left):
                    index = await came.get()
                output = waiting.pop(index).result()
                self._watched[index].see(output)
                for text in output.outputs:
                    if text.finish_reason == "error":
                        raise RequestError(str(text.stop_reason), status=500)
                yield index, output
                if not output.finished:
                    wait_for(index)
        finally:
            for task in waiting.values():
                task.cancel()
            self.close()

    async def last(self) -> list[RequestOutput]:
        """Return the last output of each prompt."""
        last = {index: output async for index, output in self.outputs()}
        return [last[index] for index in range(len(self.running))]


@dataclasses.dataclass
class Piece:
    """The part of a text that is new since the piece before.

    ``is_first`` is True for the first piece that is not empty. The last piece alone has a
    ``finish_reason`` and a ``stop_reason``.
    """

    text: str
    token_ids: list[int]
    logprobs: list[dict[int, Logprob]] | None
    is_first: bool
    output: CompletionOutput
    finish_reason: str | None
    stop_reason: int | str | None

    @property
    def is_empty(self) -> bool:
        """True if nothing is new."""
        return not (self.text or self.token_ids or self.finish_reason)


class Cursor:
    """Cuts the growing outputs of one text into pieces.

    A text that ended stays among the outputs while other texts of its request run; its pieces are
    empty then.
    """

    def __init__(self) -> None:
        self._num_characters = self._num_tokens = 0
        self._is_first, self._is_ended = True, False

    def advance(self, output: CompletionOutput) -> Piece:
        """Return what is new."""
        tokens = slice(self._num_tokens, None)
        is_open = not self._is_ended
        piece = Piece(
            text=output.text[self._num_characters :],
            token_ids=list(output.token_ids[tokens]),
            logprobs=None if output.logprobs is None else output.logprobs[tokens],
            is_first=self._is_first,
            output=output,
            finish_reason=output.finish_reason if is_open else None,
            stop_reason=output.stop_reason if is_open else None,
        )
        self._num_characters = max(self._num_characters, len(output.text))
        self._num_tokens = max(self._num_tokens, len(output.token_ids))
        self._is_first &= piece.is_empty  # an empty piece is not sent
        self._is_ended |= output.finish_reason is not None
        return piece


def whole(output: CompletionOutput) -> Piece:
    """Return a text as one piece."""
    return Cursor().advance(output)


class Events(StreamingResponse):
    """Server-sent events of a batch; an error after the first one is an event too.

    With ``is_named`` their types are names too, as /v1/responses has it, and no "[DONE]" ends them.
    """

    def __init__(self, batch: Batch, events: AsyncIterator[Any], is_named: bool = False):
        headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        lines = _lines(events, is_named)
        super().__init__(lines, media_type="text/event-stream", headers=headers)
        self._batch = batch

    async def __call__(self, *request: Any) -> None:
        """Send the events; the batch ends with them, and with the connection."""
        try:
            await super().__call__(*request)
        finally:
            self._batch.close()


async def _lines(events: AsyncIterator[Any], is_named: bool) -> AsyncIterator[str]:
    try:
        async for event in events:
            yield (f"event: {event['type']}\n" if is_named else "") + line(event)
    except Exception as error:
        yield line(errors.of(error).body)
    if not is_named:
        yield "data: [DONE]\n\n"


def line(event: Any) -> str:
    """Return an event as text."""
    return f"data: {json.dumps(event, separators=(',', ':'))}\n\n"

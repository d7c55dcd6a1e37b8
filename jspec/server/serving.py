"""The engine of a server, its settings, and its running requests, for all endpoints."""

import asyncio
import contextvars
import dataclasses
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from jspec.api.async_llm import AsyncLLM, RunningRequest
from jspec.api.outputs import RequestOutput
from jspec.api.sampling_params import SamplingParams
from jspec.server.errors import RequestError, refusals
from jspec.server.fields import GenerationFields
from jspec.server.metrics import Observer
from jspec.util import limits
from jspec.util.messages import printable

SHORT_BYTES = 64 << 10  # largest body that is worked on at once
_LONG_THREADS = 2  # bodies above it that are worked on at a time

body_size: contextvars.ContextVar[int] = contextvars.ContextVar("body_size", default=0)


@dataclasses.dataclass(frozen=True)
class Settings:
    """The choices of an operator, beside the arguments of ``LLM``."""

    model_names: tuple[str, ...]  # the first one is that of answers
    defaults: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # by field
    max_new_tokens: int | None = None  # most tokens of any text; None: the room after its prompt
    chat_template: str | None = None  # None: the tokenizer's
    template_variables: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # by name
    trusts_chat_templates: bool = False  # whether requests may bring their own
    chat_template_content_format: str = "auto"
    tool_parser: str | None = None  # None: tool_choice "auto" is refused
    max_texts: int = limits.TEXTS_OF_BODY.most  # texts of a request: its prompts times n
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
            running = await self.served.submit_all(
                salted, params, names, priority=fields.priority or 0
            )
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

"""/v1/chat/completions."""

import time
import uuid
from collections.abc import AsyncIterator
from typing import Any

from starlette.responses import Response

from jspec.api.outputs import RequestOutput
from jspec.server import prompts, sampling, scores, tools, usage
from jspec.server.errors import RequestError
from jspec.server.fields import ChatFields
from jspec.server.serving import Batch, Cursor, Events, Piece, Server, whole


async def answer(server: Server, fields: ChatFields) -> dict[str, Any] | Response:
    """Answer a conversation: whole, or as events with ``stream``.

    Raises:
      RequestError: the request is refused, or its text failed.
    """
    batch, form = await begun(server, fields)
    if fields.stream:
        return Events(batch, form.events(batch))
    (output,) = await batch.last()
    choices = [form.choice(output, whole(text)) for text in output.outputs]
    counted = usage.of([output], batch.running, has_stats=form.has_stats)
    body = {**form.head, "choices": choices, "usage": counted}
    if fields.prompt_logprobs is not None:
        body["prompt_logprobs"] = scores.of_prompt(output.prompt_logprobs)
    if fields.return_token_ids:
        body["prompt_token_ids"] = output.prompt_token_ids
    return body


async def begun(server: Server, fields: ChatFields) -> tuple[Batch, "Form"]:
    """Check a request and queue it; return it with the form of its answer."""
    fields.check()
    server.check_model(fields.model)
    if fields.top_logprobs and not fields.logprobs:
        raise RequestError("top_logprobs needs logprobs: true.", param="top_logprobs")
    if fields.stream and fields.prompt_logprobs is not None:
        raise RequestError("prompt_logprobs are not streamed.", param="prompt_logprobs")
    use = tools.use_of(
        fields.tools,
        fields.tool_choice,
        parser=server.settings.tool_parser,
        is_parallel=fields.parallel_tool_calls is not False,
    )
    shown = fields if fields.tool_choice != "none" else fields.model_copy(update={"tools": None})
    prompt = await server.served.in_thread(lambda: prompts.of_chat(server, shown))
    name = "max_tokens" if fields.max_completion_tokens is None else "max_completion_tokens"
    asked = getattr(fields, name)
    options = dict(
        max_tokens=server.room(len(prompt["prompt_token_ids"]), asked, name),
        logprobs=(fields.top_logprobs or 0) if fields.logprobs else None,
        structured_outputs=use.structured_outputs,
    )
    if use.reader and not use.structured_outputs:
        options["skip_special_tokens"] = False  # marks of calls may be special tokens
    params = await server.served.in_thread(
        lambda: sampling.params_of(fields, server.settings.defaults, **options),
        compiles=fields.has_grammar or bool(use.structured_outputs),
    )
    id = f"chatcmpl-{fields.request_id or uuid.uuid4().hex}"
    batch = await server.submit([prompt], [params], fields, id)
    return batch, Form(server, fields, use, id)


class Form:
    """The form of the answer to one request."""

    def __init__(self, server: Server, fields: ChatFields, use: tools.Use, id: str):
        self._server, self._fields, self._use = server, fields, use
        as_ids = bool(fields.return_tokens_as_token_ids)
        self._names = scores.TokenNames(server.llm.get_tokenizer(), as_ids)
        self._readers: dict[int, tools.Reader] = {}  # of each text
        self._num_calls: dict[int, int] = {}
        self.has_stats = bool(fields.speculative_decoding_stats)
        self._common = dict(id=id, created=int(time.time()), model=server.model_name)
        self.head = {**self._common, "object": "chat.completion"}

    async def events(self, batch: Batch) -> AsyncIterator[dict[str, Any]]:
        """Yield the events of a stream."""
        head = {**self._common, "object": "chat.completion.chunk"}
        options = self._fields.stream_options
        is_counted = bool(options and options.include_usage)
        is_always_counted = is_counted and bool(options.continuous_usage_stats)
        cursors: dict[int, Cursor] = {}
        counted, output = None, None
        async for _, output in batch.outputs():
            counted = usage.of([output], batch.running, has_stats=self.has_stats)
            for text in output.outputs:
                piece = cursors.setdefault(text.index, Cursor()).advance(text)
                for choice in self._deltas(output, piece):
                    event = {**head, "choices": [choice]}
                    if is_counted:
                        event["usage"] = counted if is_always_counted else None
                    yield event
        if is_counted:
            yield {**head, "choices": [], "usage": counted}

    def choice(self, output: RequestOutput, piece: Piece) -> dict[str, Any]:
        """Return a whole text."""
        content, calls, reason = self.read(piece)
        message: dict[str, Any] = {"role": "assistant", "content": content or None}
        if calls:
            message["tool_calls"] = [call.body() for call in calls]
        else:
            message["content"] = content
        return self._choice(piece, reason, {"message": message})

    def read(self, piece: Piece) -> tuple[str, list[tools.Call], str | None]:
        """Return the content and the calls of a piece, and the reason if the text ended."""
        index, reason = piece.output.index, piece.finish_reason
        if self._use.reader is None:
            return piece.text, [], reason
        reader = self._readers.setdefault(index, self._use.reader())
        content, calls = reader.feed(piece.text, reason is not None)
        if self._fields.parallel_tool_calls is False:
            calls = calls[: 1 - self._num_calls.get(index, 0)]
        self._num_calls[index] = self._num_calls.get(index, 0) + len(calls)
        if reason == "stop" and self._num_calls[index]:
            reason = self._use.finish_reason
        return content, calls, reason

    def _deltas(self, output: RequestOutput, piece: Piece) -> list[dict[str, Any]]:
        """Return the choices of the events for a piece: the role, content and calls, the end."""
        choices = []
        index = piece.output.index
        if piece.is_first:
            delta = {"role": "assistant", "content": ""}
            first = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
            if self._fields.return_token_ids:
                first["prompt_token_ids"] = output.prompt_token_ids
            choices.append(first)
        if piece.is_empty:
            return choices
        known = self._num_calls.get(index, 0)
        content, calls, reason = self.read(piece)
        delta: dict[str, Any] = {"content": content} if content or not calls else {}
        if calls:
            delta["tool_calls"] = [call.body(known + i) for i, call in enumerate(calls)]
        choices.append(self._choice(piece, reason, {"delta": delta}))
        return choices

    def _choice(self, piece: Piece, reason: str | None, body: dict[str, Any]) -> dict[str, Any]:
        scored = None
        if piece.logprobs is not None:
            count = self._fields.top_logprobs or 0
            content = scores.of_chat(piece.token_ids, piece.logprobs, self._names, count)
            scored = {"content": content, "refusal": None}
        choice = {
            "index": piece.output.index,
            **body,
            "logprobs": scored,
            "finish_reason": reason,
            "stop_reason": piece.output.stop_reason,
        }
        if self._fields.return_token_ids:
            choice["token_ids"] = piece.token_ids
        if self._server.settings.shows_stats and reason:
            choice["speculative_decoding_stats"] = piece.output.speculative_decoding_stats
        return choice

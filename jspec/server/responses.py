"""/v1/responses, for text: a request becomes a chat, and its answer a response."""

import time
import uuid
from collections.abc import AsyncIterator, Mapping
from typing import Any

from starlette.responses import Response

from jspec.api.outputs import RequestOutput
from jspec.server import chat, usage
from jspec.server.errors import RequestError
from jspec.server.fields import ChatFields, ResponseFields
from jspec.server.serving import Batch, Cursor, Events, Server, whole
from jspec.server.tools import Call
from jspec.util.messages import shown

_SAME_NAMES = ("model", "temperature", "top_p", "stream")


async def answer(server: Server, fields: ResponseFields) -> dict[str, Any] | Response:
    """Answer a request of /v1/responses: whole, or as events with ``stream``.

    Raises:
      RequestError: the request is refused, or its text failed.
    """
    fields.check()
    batch, form = await chat.begun(server, _as_chat(fields))
    response = _Response(fields, form, server.model_name)
    if fields.stream:
        return Events(batch, response.events(batch), is_named=True)
    (output,) = await batch.last()
    content, calls, _ = form.read(whole(output.outputs[0]))
    return response.ended(output, batch, content, calls)


def _as_chat(fields: ResponseFields) -> ChatFields:
    given = fields.input
    items = [{"role": "user", "content": given}] if isinstance(given, str) else given
    messages = [_message(index, item) for index, item in enumerate(items)]
    if fields.instructions:
        messages = [{"role": "system", "content": fields.instructions}, *messages]
    return ChatFields(
        messages=messages,
        max_completion_tokens=fields.max_output_tokens,
        response_format=(fields.text or {}).get("format"),
        tools=None if fields.tools is None else [_tool(tool) for tool in fields.tools],
        tool_choice=_tool_choice(fields.tool_choice),
        **{name: getattr(fields, name) for name in _SAME_NAMES},
    )


def _message(index: int, item: Mapping[str, Any]) -> dict[str, Any]:
    """Return an item of ``input`` as a message of a chat."""
    match item:
        case {"type": "function_call", "call_id": id, "name": name, "arguments": arguments}:
            function = {"name": name, "arguments": arguments}
            call = {"id": id, "type": "function", "function": function}
            return {"role": "assistant", "content": "", "tool_calls": [call]}
        case {"type": "function_call_output", "call_id": id, "output": output}:
            return {"role": "tool", "tool_call_id": id, "content": output}
        case {"role": role, "content": content}:
            return {"role": role, "content": content}
    raise RequestError(
        f"input[{index}]={shown(item)} must be a message, a function_call or its output.",
        param="input",
    )


def _tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    """Return a tool in the form of chats; others are refused there."""
    if tool.get("type") != "function" or "function" in tool:
        return dict(tool)
    return {"type": "function", "function": {k: v for k, v in tool.items() if k != "type"}}


def _tool_choice(choice: Any) -> Any:
    match choice:
        case {"type": "function", "name": name}:
            return {"type": "function", "function": {"name": name}}
    return choice


class _Response:
    """The form of one response."""

    def __init__(self, fields: ResponseFields, form: chat.Form, model: str):
        self._form = form
        self._message_id = f"msg_{uuid.uuid4().hex}"
        self._head = {
            "id": f"resp_{uuid.uuid4().hex}",
            "object": "response",
            "created_at": int(time.time()),
            "model": model,
            "error": None,
            "incomplete_details": None,
            "instructions": fields.instructions,
            "max_output_tokens": fields.max_output_tokens,
            "metadata": {},
            "parallel_tool_calls": True,
            "temperature": fields.temperature,
            "top_p": fields.top_p,
            "tool_choice": fields.tool_choice or "auto",
            "tools": fields.tools or [],
            "text": fields.text or {"format": {"type": "text"}},
        }

    def ended(
        self, output: RequestOutput, batch: Batch, content: str, calls: list[Call]
    ) -> dict[str, Any]:
        """Return the response with its whole text."""
        counted = usage.of([output], batch.running, has_stats=False)
        is_cut = output.outputs[0].finish_reason == "length"
        items = [self._message("completed", content)] if content or not calls else []
        return {
            **self._head,
            "status": "incomplete" if is_cut else "completed",
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "output": [*items, *map(_call_item, calls)],
            "usage": {
                "input_tokens": counted["prompt_tokens"],
                "input_tokens_details": counted["prompt_tokens_details"],
                "output_tokens": counted["completion_tokens"],
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": counted["total_tokens"],
            },
        }

    async def events(self, batch: Batch) -> AsyncIterator[dict[str, Any]]:
        """Yield the events of a stream, numbered."""
        number = 0
        async for event in self._unnumbered(batch):
            yield {**event, "sequence_number": number}
            number += 1

    async def _unnumbered(self, batch: Batch) -> AsyncIterator[dict[str, Any]]:
        begun = {**self._head, "status": "in_progress", "output": [], "usage": None}
        yield {"type": "response.created", "response": begun}
        yield {"type": "response.in_progress", "response": begun}
        where = {"item_id": self._message_id, "output_index": 0, "content_index": 0}
        item = {**self._message("in_progress", ""), "content": []}
        yield {"type": "response.output_item.added", "output_index": 0, "item": item}
        yield {"type": "response.content_part.added", **where, "part": _part("")}
        cursor, content, calls, output = Cursor(), "", [], None
        async for _, output in batch.outputs():
            new, more, _ = self._form.read(cursor.advance(output.outputs[0]))
            content, calls = content + new, [*calls, *more]
            if new:
                yield {"type": "response.output_text.delta", **where, "delta": new, "logprobs": []}
        yield {"type": "response.output_text.done", **where, "text": content, "logprobs": []}
        yield {"type": "response.content_part.done", **where, "part": _part(content)}
        item = self._message("completed", content)
        yield {"type": "response.output_item.done", "output_index": 0, "item": item}
        ended = self.ended(output, batch, content, calls)
        ended["output"] = [item, *map(_call_item, calls)]
        for index, call in enumerate(ended["output"][1:], 1):
            at = {"output_index": index, "item": call}
            yield {"type": "response.output_item.added", **at}
            yield {"type": "response.output_item.done", **at}
        yield {"type": f"response.{ended['status']}", "response": ended}

    def _message(self, status: str, content: str) -> dict[str, Any]:
        common = {"id": self._message_id, "type": "message", "role": "assistant"}
        return {**common, "status": status, "content": [_part(content)]}


def _part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _call_item(call: Call) -> dict[str, Any]:
    function = {"name": call.name, "arguments": call.arguments}
    return {
        "type": "function_call",
        "id": f"fc_{uuid.uuid4().hex}",
        "call_id": call.id,
        "status": "completed",
        **function,
    }

"""/v1/responses, for text: a request becomes a chat, and its answer a response."""

import copy
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from starlette.responses import Response

from jspec.api.outputs import RequestOutput
from jspec.server import chat
from jspec.server.errors import RequestError
from jspec.server.fields import SAMPLING, ChatFields, ResponseFields
from jspec.server.readers.calls import Delta
from jspec.server.serving import Server
from jspec.server.streams import Event, Events, Form, Piece, whole
from jspec.util.messages import shown

_SAME_NAMES = [
    name for name in ("model", "stream", *SAMPLING) if name in ResponseFields.model_fields
]
# Of each kind of item: its type, the prefix of its id, and the fields of its text.
_KINDS: dict[str, tuple[str, str, dict[str, Any] | None]] = {
    "reasoning": (
        "reasoning",
        "rs",
        {"summary": [], "content": [{"type": "reasoning_text", "text": ""}]},
    ),
    "message": (
        "message",
        "msg",
        {
            "role": "assistant",
            "content": [{"type": "output_text", "text": "", "annotations": [], "logprobs": []}],
        },
    ),
    "call": ("function_call", "fc", None),
}
_EVENTS = {
    "reasoning": "response.reasoning_text",
    "message": "response.output_text",
    "call": "response.function_call_arguments",
}


async def answer(server: Server, fields: ResponseFields) -> dict[str, Any] | Response:
    """Answer a request of /v1/responses: whole, or as events with ``stream``.

    Raises:
      RequestError: the request is refused, or its text failed.
    """
    fields.check()
    batch, form = await chat.begun(server, _as_chat(fields))
    response = _Response(fields, form, server.model_name)
    if fields.stream:
        return Events(batch, response)
    (output,) = await batch.last()
    return await server.in_thread(lambda: response.whole(output))


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


class _Response(Form):
    """The form of one response: items of reasoning, of a message, and of calls, one at a time."""

    is_named = True

    def __init__(self, fields: ResponseFields, form: chat.Form, model: str):
        self._form = form
        self._items: list[dict[str, Any]] = []
        self._kind: str | None = None  # kind of the last item, while it grows
        self._num_events = 0
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

    def whole(self, output: RequestOutput) -> dict[str, Any]:
        """Return the response with its whole text."""
        for _ in self._grown(whole(output.outputs[0])):
            pass  # the items grow
        return self._ended(output)

    def begin(self) -> Iterator[Event]:
        """Yield the empty response."""
        begun = {**self._head, "status": "in_progress", "output": [], "usage": None}
        for kind in ("created", "in_progress"):
            yield self._numbered({"type": f"response.{kind}", "response": begun})

    def grow(self, index: int, output: RequestOutput, piece: Piece) -> Iterator[Event]:
        """Yield the events of a piece."""
        yield from map(self._numbered, self._grown(piece))

    def end(self, outputs: Sequence[RequestOutput]) -> Iterator[Event]:
        """Yield the whole response."""
        ended = self._ended(outputs[0])
        yield self._numbered({"type": f"response.{ended['status']}", "response": ended})

    def _numbered(self, event: Event) -> Event:
        self._num_events += 1
        return {**event, "sequence_number": self._num_events - 1}

    def _ended(self, output: RequestOutput) -> dict[str, Any]:
        counted = self._form.usage([output])
        details = counted.get("completion_tokens_details", {"reasoning_tokens": 0})
        is_cut = output.outputs[0].finish_reason == "length"
        return {
            **self._head,
            "status": "incomplete" if is_cut else "completed",
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "output": self._items,
            "usage": {
                "input_tokens": counted["prompt_tokens"],
                "input_tokens_details": counted["prompt_tokens_details"],
                "output_tokens": counted["completion_tokens"],
                "output_tokens_details": details,
                "total_tokens": counted["total_tokens"],
            },
        }

    def _grown(self, piece: Piece) -> Iterator[dict[str, Any]]:
        """Add a piece of the text to the items; yield the events of it."""
        parts = self._form.read(piece)
        if parts.reasoning:
            yield from self._text("reasoning", parts.reasoning)
        if parts.content:
            yield from self._text("message", parts.content)
        for delta in parts.deltas:
            yield from self._call(delta)
        if piece.finish_reason:
            if not self._items:
                yield from self._begin("message")
            yield from self._end()

    def _text(self, kind: str, text: str) -> Iterator[dict[str, Any]]:
        """Add to the text of an item, and begin it if there is none of its kind."""
        if self._kind != kind:
            yield from self._begin(kind)
        self._items[-1]["content"][0]["text"] += text
        more = {"logprobs": []} if kind == "message" else {}
        yield {"type": f"{_EVENTS[kind]}.delta", **self._where(0), "delta": text, **more}

    def _call(self, delta: Delta) -> Iterator[dict[str, Any]]:
        """Begin a call, or add to its arguments."""
        if delta.name is not None:
            yield from self._begin("call", call_id=delta.id, name=delta.name, arguments="")
        if delta.arguments:
            self._items[-1]["arguments"] += delta.arguments
            yield {"type": f"{_EVENTS['call']}.delta", **self._where(), "delta": delta.arguments}

    def _begin(self, kind: str, **fields: Any) -> Iterator[dict[str, Any]]:
        """End the item before, and begin one."""
        yield from self._end()
        type, prefix, text = _KINDS[kind]
        item = {"id": f"{prefix}_{uuid.uuid4().hex}", "type": type, "status": "in_progress"}
        item |= fields | ({} if text is None else copy.deepcopy(text))
        self._items.append(item)
        self._kind = kind
        index = len(self._items) - 1
        shown = copy.deepcopy(item) | ({} if text is None else {"content": []})
        yield {"type": "response.output_item.added", "output_index": index, "item": shown}
        if kind == "message":
            part = copy.deepcopy(item["content"][0])
            yield {"type": "response.content_part.added", **self._where(0), "part": part}

    def _end(self) -> Iterator[dict[str, Any]]:
        """End the last item, if it still grows."""
        if self._kind is None:
            return
        item, where = self._items[-1], self._where(None if self._kind == "call" else 0)
        done = {"type": f"{_EVENTS[self._kind]}.done", **where}
        if self._kind == "call":
            yield {**done, "arguments": item["arguments"], "name": item["name"]}
        else:
            (part,) = item["content"]
            more = {"logprobs": []} if self._kind == "message" else {}
            yield {**done, "text": part["text"], **more}
            if self._kind == "message":
                yield {"type": "response.content_part.done", **where, "part": part}
        self._kind = None
        item["status"] = "completed"
        index = where["output_index"]
        yield {"type": "response.output_item.done", "output_index": index, "item": item}

    def _where(self, content_index: int | None = None) -> dict[str, Any]:
        """Return where events of the last item belong."""
        where = {"item_id": self._items[-1]["id"], "output_index": len(self._items) - 1}
        return where if content_index is None else {**where, "content_index": content_index}

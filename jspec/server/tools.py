"""Calls of tools: grammars that force them, and readers that find them in texts."""

import dataclasses
import json
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

from jspec.api import detokenizer
from jspec.server.errors import RequestError
from jspec.util.messages import shown

_ANY = {"type": "object"}


@dataclasses.dataclass(frozen=True)
class Call:
    """A call of a tool; ``arguments`` are JSON."""

    name: str
    arguments: str
    id: str = dataclasses.field(default_factory=lambda: f"call_{uuid.uuid4().hex[:24]}")

    def body(self, index: int | None = None) -> dict[str, Any]:
        """Return it as in a message, or with its index as in an event."""
        function = {"name": self.name, "arguments": self.arguments}
        numbered = {} if index is None else {"index": index}
        return {**numbered, "id": self.id, "type": "function", "function": function}


class Reader:
    """Splits a growing text into content and calls."""

    def feed(self, text: str, is_end: bool) -> tuple[str, list[Call]]:
        """Take more of the text; return the content and the calls that are complete now."""
        raise NotImplementedError


class Whole(Reader):
    """Reads a text that a grammar made a call, or a list of calls.

    Args:
      name: of the function whose arguments the text is; None for a list of calls with names.
    """

    def __init__(self, name: str | None):
        self._name, self._text = name, ""

    def feed(self, text: str, is_end: bool) -> tuple[str, list[Call]]:
        """Return the calls at the end. A text that was cut has those that are complete."""
        self._text += text
        if not is_end:
            return "", []
        if self._name is not None:
            return "", [Call(self._name, self._text)]
        calls, position = [], self._text.find("{")
        while position >= 0:
            try:
                call, end = json.JSONDecoder().raw_decode(self._text, position)
                calls.append(Call(call["name"], _dumped(call["parameters"])))
            except (ValueError, KeyError, TypeError):
                break
            position = self._text.find("{", end)
        return "", calls


class Hermes(Reader):
    """Reads ``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``, of Hermes and Qwen."""

    BEGIN, END = "<tool_call>", "</tool_call>"

    def __init__(self) -> None:
        self._rest = ""

    def feed(self, text: str, is_end: bool) -> tuple[str, list[Call]]:
        """Return content as it comes, and each call once its end is there."""
        self._rest += text
        content, calls = "", []
        while True:
            before, begin, after = self._rest.partition(self.BEGIN)
            if not begin:
                unsure = 0 if is_end else detokenizer.held_back(before, [self.BEGIN])
                content += before[: len(before) - unsure]
                self._rest = before[len(before) - unsure :]
                return _without_space(content, calls), calls
            inner, end, rest = after.partition(self.END)
            if not (end or is_end):
                content, self._rest = content + before, begin + after
                return _without_space(content, calls), calls
            call = _call_of(inner, "arguments")
            if call is None:  # the model wrote something else: it is content
                content += before + begin + inner + end
            else:
                content += before
                calls.append(call)
            self._rest = rest


class Llama(Reader):
    """Reads texts that are ``{"name": ..., "parameters": {...}}``, of Llama 3."""

    TAG = "<|python_tag|>"

    def __init__(self) -> None:
        self._text, self._is_content = "", False

    def feed(self, text: str, is_end: bool) -> tuple[str, list[Call]]:
        """Return content as it comes if the text is no call; else the calls at the end."""
        if self._is_content:
            return text, []
        self._text += text
        inner = self._text.lstrip().removeprefix(self.TAG).lstrip()
        may_call = inner.startswith("{") or not inner or self.TAG.startswith(inner)
        if may_call and not is_end:
            return "", []
        calls = self._calls(inner) if is_end else []
        self._is_content = not calls
        return ("", calls) if calls else (self._text, [])

    @staticmethod
    def _calls(text: str) -> list[Call]:
        calls = []
        for part in text.split("; {") if text else ():
            call = _call_of(part if part.startswith("{") else "{" + part, "parameters")
            if call is None:
                return []
            calls.append(call)
        return calls


READERS: dict[str, type[Reader]] = {"hermes": Hermes, "llama3_json": Llama}


def parser_for(chat_template: str | None) -> str | None:
    """Return the name of the reader for the calls that a chat template shows; None if unknown."""
    text = chat_template or ""
    if Hermes.BEGIN in text:
        return "hermes"
    return "llama3_json" if Llama.TAG in text or '"parameters"' in text else None


@dataclasses.dataclass(frozen=True)
class Use:
    """The use of tools by a request.

    Attributes:
      structured_outputs: the grammar that makes the text a call; None for none.
      reader: makes a reader for each text; None where texts have no calls.
      finish_reason: of texts with calls.
    """

    structured_outputs: dict[str, Any] | None = None
    reader: Any = None
    finish_reason: str = "tool_calls"


def use_of(
    tools: Sequence[Mapping[str, Any]] | None,
    choice: str | Mapping[str, Any] | None,
    *,
    parser: str | None,
    is_parallel: bool,
) -> Use:
    """Return how a request uses tools.

    Args:
      tools: of the request.
      choice: ``tool_choice``.
      parser: a name in ``READERS``, for "auto"; None for none.
      is_parallel: whether a text may have several calls.

    Raises:
      RequestError: a tool is malformed, or the choice does not fit the tools.
    """
    schemas = dict(_schema(index, tool) for index, tool in enumerate(tools or ()))
    if choice is None:
        choice = "auto" if schemas else "none"
    if choice == "none":
        return Use()
    if not schemas:
        raise RequestError(f"tool_choice={shown(choice)} needs tools.", param="tool_choice")
    if choice == "auto":
        if parser is None:
            raise RequestError(
                'tool_choice="auto" needs a reader of calls, and the chat template of this model '
                "shows none; start the server with --tool-call-parser, or send tool_choice "
                '"none", "required" or a function.',
                param="tool_choice",
            )
        return Use(None, READERS[parser])
    if choice == "required":
        each = [
            {
                "type": "object",
                "properties": {"name": {"enum": [name]}, "parameters": schema},
                "required": ["name", "parameters"],
                "additionalProperties": False,
            }
            for name, schema in schemas.items()
        ]
        most = {} if is_parallel else {"maxItems": 1}
        items = each[0] if len(each) == 1 else {"anyOf": each}
        schema = {"type": "array", "items": items, "minItems": 1, **most}
        return Use({"json": schema}, lambda: Whole(None))
    match choice:
        case {"type": "function", "function": {"name": str(name)}} if name in schemas:
            return Use({"json": schemas[name]}, lambda: Whole(name), "stop")
    raise RequestError(
        f'tool_choice={shown(choice)} must be "none", "auto", "required" or the function of a tool '
        f"({', '.join(schemas)}).",
        param="tool_choice",
    )


def _schema(index: int, tool: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    match tool:
        case {"type": "function", "function": {"name": str(name), **rest}}:
            schema = rest.get("parameters") or _ANY
            if isinstance(schema, Mapping):
                return name, dict(schema)
    raise RequestError(
        f'tools[{index}]={shown(tool)} must be {{"type": "function", "function": {{"name": ..., '
        '"parameters": a JSON schema}}.',
        param="tools",
    )


def _call_of(text: str, key: str) -> Call | None:
    """Return the call that a text is; None if it is none."""
    try:
        given = json.loads(text)
        arguments = given[key] if key in given else given.get("arguments", {})
        is_call = isinstance(given["name"], str) and isinstance(arguments, Mapping)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None
    return Call(given["name"], _dumped(arguments)) if is_call else None


def _dumped(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _without_space(content: str, calls: Sequence[Call]) -> str:
    """Return content; line breaks between calls are none."""
    return "" if calls and content.isspace() else content

"""Messages of conversations, as chat templates read them."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from jspec.util.messages import shown
from jspec.util.values import is_real, json_of

# Names of the roles that chat templates have, ShareGPT's included.
ROLES = {
    **{"system": "system", "developer": "system", "human": "user", "user": "user"},
    **dict.fromkeys(("gpt", "chatgpt", "assistant", "model", "bot"), "assistant"),
    "tool": "tool",
}
REASONING = ("reasoning_content", "reasoning", "thinking")  # names of what precedes an answer

# ``role``, ``content``, ``weight`` 0 for an answer that is not learned, and other keys for the chat
# template, such as ``reasoning_content`` and ``tool_calls``.
Message = dict[str, Any]


def read_message(turn: Any) -> Message:
    """Return one turn: OpenAI's ``role`` and ``content``, or ShareGPT's ``from`` and ``value``.

    Raises:
      ValueError: a part of it is malformed; the message names no place.
    """
    if not isinstance(turn, Mapping):
        raise ValueError(f"turn {_short(turn)} is no object with 'role' and 'content'")
    others = {str(key): value for key, value in turn.items() if value is not None}
    role, content = (
        others.pop(new if new in others else old, None)
        for new, old in (("role", "from"), ("content", "value"))
    )
    if not isinstance(role, str) or role not in ROLES:
        raise ValueError(f"role {_short(role)} is unknown; known are {', '.join(ROLES)}")
    calls = others.pop("tool_calls", None)
    if content is None and calls:
        content = ""
    if not isinstance(content, str):
        raise ValueError(f"the content of {role} is {_short(content)}; it must be a text")
    message = {"role": ROLES[role], "content": content}
    if "weight" in others:
        weight = _weight(others.pop("weight"), message["role"])
        message |= {} if weight or message["role"] != "assistant" else {"weight": 0}
    for name in REASONING:
        if not isinstance(others.get(name, ""), str):
            raise ValueError(f"{name!r} is {_short(others[name])}; it must be a text")
    if calls:
        message["tool_calls"] = _calls(calls)
    return message | others


def read_tools(tools: Any) -> tuple[Mapping[str, Any], ...]:
    """Return the tools of a conversation, given as a list or as its JSON text; () for None.

    Raises:
      ValueError: they are no list of objects.
    """
    given = tools
    if isinstance(tools, str):
        try:
            given = json_of(tools) if tools.strip() else None
        except ValueError:
            given = tools
    if given is None:
        return ()
    is_list = isinstance(given, Sequence) and not isinstance(given, str)
    if not is_list or not all(isinstance(tool, Mapping) for tool in given):
        raise ValueError(f"'tools' is {_short(tools)}; it must be a list of functions")
    return tuple(given)


def is_learned(message: Message) -> bool:
    """Return whether a message is an answer to learn."""
    return message["role"] == "assistant" and message.get("weight", 1) != 0


def without_weights(messages: Sequence[Message]) -> list[Message]:
    """Return the messages without the key that chat templates do not have."""
    return [{k: v for k, v in message.items() if k != "weight"} for message in messages]


def with_text_arguments(messages: Sequence[Message]) -> list[Message]:
    """Return the messages with the arguments of tool calls as JSON text, as some templates read."""

    def as_text(call: Mapping[str, Any]) -> dict[str, Any]:
        function = dict(call["function"])
        function["arguments"] = json.dumps(function["arguments"], ensure_ascii=False)
        return {**call, "function": function}

    return [
        message | {"tool_calls": [as_text(call) for call in message["tool_calls"]]}
        if "tool_calls" in message
        else message
        for message in messages
    ]


def _weight(weight: Any, role: str) -> int:
    """Return 0 or 1, whether an answer is learned (the key of OpenAI's fine-tuning files)."""
    if not is_real(weight) or weight not in (0, 1):
        raise ValueError(f"'weight' is {_short(weight)}; it must be 0 or 1")
    if role != "assistant" and weight:
        raise ValueError(f"'weight' of {role} is 1; only the assistant's messages are learned")
    return int(weight)


def _calls(calls: Any) -> list[dict[str, Any]]:
    """Return tool calls with their arguments as objects, as when they are served."""
    try:
        return [_call(call) for call in calls]
    except (AttributeError, KeyError, TypeError, ValueError):
        raise ValueError(
            f"'tool_calls' is {_short(calls)}; it must hold functions whose arguments are JSON"
        ) from None


def _call(call: Mapping[str, Any]) -> dict[str, Any]:
    function = dict(call["function"])
    arguments = function.get("arguments") or "{}"
    function["arguments"] = json_of(arguments) if isinstance(arguments, str) else arguments
    if not isinstance(function["name"], str) or not isinstance(function["arguments"], Mapping):
        raise TypeError
    return {**call, "function": function}


def _short(value: Any) -> str:
    return shown(value, 60)

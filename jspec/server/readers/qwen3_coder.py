"""Calls of Qwen3-Coder: tags of functions and parameters.

``<tool_call><function=NAME><parameter=KEY>value</parameter></function></tool_call>``; the tool's
schema says which values are JSON.
"""

import ast
import json
import re
import warnings
from collections.abc import Mapping
from typing import Any

from jspec.server.readers.calls import CallReader, Steps, dropped

_BEGIN, _END = "<tool_call>", "</tool_call>"
_FUNCTION, _END_FUNCTION = "<function=", "</function>"
_PARAMETER, _END_PARAMETER = "<parameter=", "</parameter>"
# Types of JSON by those of Python; a quoted text is no text of a parameter that may be text.
_NAMES = {bool: {"boolean"}, int: {"integer", "number"}, float: {"number"}, type(None): {"null"}}
_NAMES |= {list: {"array"}, dict: {"object"}, str: set()}


class Qwen3Coder(CallReader):
    """Reads tags; texts of parameters that are strings go on as they come."""

    @staticmethod
    def is_shown_by(template: str) -> bool:
        """Return whether a template has the tags of functions and parameters."""
        return _FUNCTION in template and _PARAMETER in template

    def _read(self) -> Steps:
        while mark := (yield from self._until([_BEGIN, _FUNCTION], self._add_content)):
            held, name = [mark], []
            if mark == _BEGIN and (yield from self._begins_with(_FUNCTION, held.append)):
                mark = self._take(_FUNCTION)
                held.append(mark)
            if mark == _FUNCTION:
                end = yield from self._until([">", "\n"], name.append)
                held += [*name, end]
                if end == ">" and (called := "".join(name).strip()):
                    self._begin_call(called)
                    yield from self._arguments(self._schemas.get(called, {}))
                    if (yield from self._begins_with(_END, self._add_content)):
                        self._take(_END)
                    continue
            self._add_content("".join(held))

    def _arguments(self, schema: Mapping[str, Any]) -> Steps:
        """Read the parameters of a function, and its end."""
        ends = [_PARAMETER, _END_FUNCTION, _END]
        self._add_arguments("{")
        mark, separator = (yield from self._until(ends, dropped)), ""
        while mark == _PARAMETER:
            key: list[str] = []
            if not (yield from self._until([">"], key.append)):
                return
            name = "".join(key).strip()
            self._add_arguments(f"{separator}{json.dumps(name, ensure_ascii=False)}: ")
            separator = ", "
            types = _types(_property(schema, name), schema)
            is_text = types == {"string"}
            mark = yield from (self._string() if is_text else self._literal(types))
            if mark == _END_PARAMETER:
                mark = yield from self._until(ends, dropped)
        if mark:  # a text that was cut has arguments that are cut
            self._add_arguments("}")

    def _string(self) -> Steps:
        """Read a text, without the line break at both ends; return the mark after it."""
        state = {"is_first": True, "held": ""}

        def take(text: str) -> None:
            text = state["held"] + text
            if state["is_first"] and text:
                text, state["is_first"] = text.removeprefix("\n"), False
            state["held"] = "\n" if text.endswith("\n") else ""
            text = text.removesuffix("\n")
            self._add_arguments(json.dumps(text, ensure_ascii=False)[1:-1])

        self._add_arguments('"')
        mark = yield from self._until([_END_PARAMETER, _PARAMETER, _END_FUNCTION], take)
        if mark:
            self._add_arguments('"')
        return mark

    def _literal(self, types: set[str]) -> Steps:
        """Read a value that may be no text; return the mark after it."""
        parts: list[str] = []
        mark = yield from self._until([_END_PARAMETER, _PARAMETER, _END_FUNCTION], parts.append)
        if mark:
            text = "".join(parts).removeprefix("\n").removesuffix("\n")
            self._add_arguments(_as_json(text, types))
        return mark


def _property(schema: Mapping[str, Any], name: str) -> Any:
    properties = schema.get("properties")
    return properties.get(name, {}) if isinstance(properties, Mapping) else {}


def _types(schema: Any, root: Mapping[str, Any], depth: int = 0) -> set[str]:
    """Return the types that a schema allows; text if it names none."""
    if not isinstance(schema, Mapping) or depth > 9:
        return {"string"}
    given = schema.get("type")
    if isinstance(given, str):
        return {given}
    if isinstance(given, list):
        return {each for each in given if isinstance(each, str)}
    for name in ("anyOf", "oneOf", "allOf"):
        if isinstance(schema.get(name), list) and schema[name]:
            return set().union(*(_types(each, root, depth + 1) for each in schema[name]))
    match = re.fullmatch(r"#/(\$defs|definitions)/([^/]+)", str(schema.get("$ref", "")))
    if match and isinstance(root.get(match[1]), Mapping):
        return _types(root[match[1]].get(match[2]), root, depth + 1)
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    if isinstance(values, list) and not all(isinstance(value, str) for value in values):
        return {"any"}
    return {"object"} if "properties" in schema else {"string"}


def _as_json(text: str, types: set[str]) -> str:
    """Return the JSON of a value: JSON or a literal of Python of such a type, or else text."""
    for read in (json.loads, ast.literal_eval):
        try:
            with warnings.catch_warnings(action="ignore"):  # Python warns of unknown escapes
                value = read(text.strip())
            if "string" not in types or not types.isdisjoint(_NAMES[type(value)]):
                return json.dumps(value, ensure_ascii=False, allow_nan=False)
        except (ValueError, TypeError, KeyError, SyntaxError, RecursionError, MemoryError):
            continue
    return json.dumps(text, ensure_ascii=False)

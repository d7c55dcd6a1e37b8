"""The base of readers: calls of tools in a growing text."""

import dataclasses
import json
import re
import secrets
import string
from collections.abc import Callable, Collection, Generator, Iterable, Mapping, Sequence
from typing import Any

from jspec.server.readers.marks import first

_MARK = re.compile(r'\\.|["{}\[\]]', re.DOTALL)  # what ends strings and values of JSON
_STRIDE = 1000  # characters that are read at a time
ALPHANUMERIC = string.ascii_letters + string.digits
Steps = Generator[None, None, Any]  # it yields where it needs more text


@dataclasses.dataclass
class Delta:
    """A new part of a call: the first one has its name and id, the others pieces of arguments."""

    index: int  # index of the call in its text
    arguments: str = ""  # a piece of JSON
    name: str | None = None
    id: str | None = None

    def body(self) -> dict[str, Any]:
        """Return it as in an event."""
        if self.name is None:
            return {"index": self.index, "function": {"arguments": self.arguments}}
        function = {"name": self.name, "arguments": self.arguments}
        return {"index": self.index, "id": self.id, "type": "function", "function": function}


@dataclasses.dataclass
class Call:
    """A call of a tool; ``arguments`` are JSON, unless the text was cut or the model erred."""

    name: str
    id: str
    arguments: str = ""

    def body(self) -> dict[str, Any]:
        """Return it as in a message."""
        function = {"name": self.name, "arguments": self.arguments}
        return {"id": self.id, "type": "function", "function": function}


def joined(deltas: Iterable[Delta]) -> list[Call]:
    """Return the calls that all deltas of a text make."""
    calls: list[Call] = []
    for delta in deltas:
        if delta.name is not None:
            calls.append(Call(delta.name, delta.id))
        calls[delta.index].arguments += delta.arguments
    return calls


class CallReader:
    """Splits a growing text into content and calls, which do not depend on where it is cut.

    A reader is one method: ``_read`` takes the text from ``_rest`` in steps, and yields where it
    needs more. What may still become a call is held back. White space around calls is no content.

    Args:
      schemas: JSON schemas of the parameters of the request's tools, by name.
    """

    def __init__(self, schemas: Mapping[str, Mapping[str, Any]] | None = None):
        self._schemas = schemas or {}
        self._rest, self._is_end = "", False
        self._content: list[str] = []
        self._deltas: list[Delta] = []
        self._num_calls = 0
        self._space: str | None = ""  # held back before and after calls; None inside content
        self._steps = self._read()

    @staticmethod
    def is_shown_by(template: str) -> bool:
        """Return whether a chat template shows the model this form of calls."""
        raise NotImplementedError

    def feed(self, text: str, is_end: bool) -> tuple[str, list[Delta]]:
        """Take more of the text; return what is new of its content and its calls."""
        self._content, self._deltas = [], []
        for begin in range(0, max(len(text), 1), _STRIDE):
            self._rest += text[begin : begin + _STRIDE]
            self._is_end = is_end and begin + _STRIDE >= len(text)
            next(self._steps, None)
        if is_end and not self._num_calls:
            self._content.append(self._space or "")
        return "".join(self._content), self._deltas

    def _read(self) -> Steps:
        raise NotImplementedError

    # ------------------------------------------------------------------------------------- output

    def _add_content(self, text: str) -> None:
        """Add content."""
        if self._space is not None:
            text = self._space + text
            self._space = text if not text or text.isspace() else None
        if self._space is None:
            self._content.append(text)

    def _begin_call(self, name: str, id: str | None = None) -> None:
        """Begin a call."""
        self._deltas.append(Delta(self._num_calls, name=name, id=id or self._new_id()))
        self._num_calls += 1
        self._space = ""

    def _add_arguments(self, text: str) -> None:
        """Add to the arguments of the last call."""
        last = self._deltas[-1] if self._deltas else None
        if last is not None and last.name is None:
            last.arguments += text
        elif text:
            self._deltas.append(Delta(self._num_calls - 1, text))

    @staticmethod
    def _new_id() -> str:
        return f"call_{secrets.token_hex(12)}"

    # ------------------------------------------------------------------------------------- input

    def _until(self, marks: Sequence[str], take: Callable[[str], None]) -> Steps:
        """Pass the text before the first of some marks on as it comes; return the mark.

        The mark is taken too. Return "" at the end of the text.
        """
        while True:
            at, mark = first(self._rest, marks, self._is_end)
            take(self._rest[:at])
            self._rest = self._rest[at + len(mark) :]
            if mark or self._is_end:
                return mark
            yield

    def _everything(self, take: Callable[[str], None]) -> Steps:
        """Pass the whole rest of the text on as it comes."""
        return self._until((), take)

    def _begins_with(self, prefix: str, space: Callable[[str], None]) -> Steps:
        """Return whether the text goes on with a prefix; white space before it is passed on.

        The prefix is left where it is.
        """
        while True:
            stripped = self._rest.lstrip()
            space(self._rest[: len(self._rest) - len(stripped)])
            self._rest = stripped
            if self._is_end or len(stripped) >= len(prefix) or not prefix.startswith(stripped):
                return stripped.startswith(prefix)
            yield

    def _token(self, held: list[str]) -> Steps:
        """Return the next of: a whole string of JSON, or one other character; "" at the end.

        White space is skipped. What was taken is added to ``held``.
        """
        is_string = yield from self._begins_with('"', held.append)
        parts = [self._take(self._rest[:1])]
        while is_string:
            inner = re.match(r'(?:[^"\\]|\\.)*', self._rest, re.DOTALL)[0]
            parts.append(self._take(inner))
            if self._rest.startswith('"') or self._is_end:
                parts.append(self._take(self._rest[:1]))
                break
            yield
        held.append("".join(parts))
        return held[-1]

    def _value(self, take: Callable[[str], None]) -> Steps:
        """Pass an object or a list of JSON on as it comes; return whether it is complete."""
        depth, is_string = 0, False
        while True:
            end = 0
            for match in _MARK.finditer(self._rest):
                mark, end = match[0], match.end()
                if mark == '"':
                    is_string = not is_string
                elif not is_string and mark[0] != "\\":
                    depth += 1 if mark in "{[" else -1
                if depth == 0:
                    take(self._rest[:end])
                    self._rest = self._rest[end:]
                    return True
            is_escape = self._rest.endswith("\\", end) and not self._is_end
            at = len(self._rest) - is_escape
            take(self._rest[:at])
            self._rest = self._rest[at:]
            if self._is_end:
                return False
            yield

    def _object(self, keys: Collection[str], held: list[str]) -> Steps:
        """Take ``{"name": ..., "arguments": {...}}`` as a call; return whether it is one.

        Arguments go on as they come, as soon as the name is there. Before that, the text is added
        to ``held``. Arguments may be JSON in a string, and missing ones are none.

        Args:
          keys: names that the arguments may have.
          held: receives what was taken, until the call has begun.
        """
        name: str | None = None
        early: list[str] | None = None  # arguments before the name
        count = self._num_calls
        if not (yield from self._begins_with("{", held.append)):
            return False
        held.append(self._take("{"))
        while (token := (yield from self._token(held))) != "}":
            if token == ",":
                continue
            key = _loaded(token)
            if not isinstance(key, str) or (yield from self._token(held)) != ":":
                return self._num_calls > count
            is_object = yield from self._begins_with("{", held.append)
            if key in keys and self._num_calls == count and early is None:
                if is_object and name is not None:
                    self._begin_call(name)
                    if not (yield from self._value(self._add_arguments)):
                        return True
                    continue
                early = []
                if not (yield from self._held_arguments(is_object, early, held)):
                    return False
            else:
                value = yield from self._skipped(held)
                name = value if key == "name" and name is None else name
                if not isinstance(name, str) and key == "name":
                    return self._num_calls > count
            if name is not None and early and self._num_calls == count:
                self._begin_call(name)
                self._add_arguments("".join(early))
        if self._num_calls == count and isinstance(name, str):
            self._begin_call(name)
            self._add_arguments("".join(early or ["{}"]))
        return self._num_calls > count

    def _held_arguments(self, is_object: bool, early: list[str], held: list[str]) -> Steps:
        """Take arguments that cannot go on yet; return whether they are an object."""
        if is_object:
            complete = yield from self._value(early.append)
            held.extend(early)
            return complete
        text = _loaded((yield from self._token(held)))
        early.append(text if isinstance(text, str) else "")
        return isinstance(text, str) and isinstance(_loaded(text), dict)

    def _skipped(self, held: list[str]) -> Steps:
        """Take a value of JSON; return it, or None if it is none."""
        if self._rest[:1] in ("{", "["):
            taken: list[str] = []
            yield from self._value(taken.append)
            held.extend(taken)
            return _loaded("".join(taken))
        taken = []
        while not (yield from self._stands_before(",}]", taken)):
            if not (yield from self._token(taken)):
                break
        held.extend(taken)
        return _loaded("".join(taken))

    def _stands_before(self, marks: str, held: list[str]) -> Steps:
        """Return whether the next character is one of some; white space before it is taken."""
        yield from self._begins_with(marks[0], held.append)
        return bool(self._rest) and self._rest[0] in marks

    def _take(self, text: str) -> str:
        """Take a text that stands here."""
        self._rest = self._rest[len(text) :]
        return text


def dropped(text: str) -> None:
    """Take text that is neither content nor a call."""
    del text


def _loaded(text: str) -> Any:
    """Return the value of JSON; None if it is none."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None

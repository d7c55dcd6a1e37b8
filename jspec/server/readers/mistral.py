"""Calls of Mistral: ``[TOOL_CALLS][{"name": ..., "arguments": {...}}]``.

Newer models write ``[TOOL_CALLS]name[ARGS]{...}`` for each call, some with ``[CALL_ID]id`` before
the arguments.
"""

import re
import secrets

from jspec.server.readers.calls import ALPHANUMERIC, CallReader, Steps

_BEGIN, _ID, _ARGS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"
_KEYS = ("arguments", "parameters")


class Mistral(CallReader):
    """Reads all forms; a text may mix content and calls."""

    @staticmethod
    def is_shown_by(template: str) -> bool:
        """Return whether a template has the tag."""
        return _BEGIN in template

    @staticmethod
    def _new_id() -> str:
        """Return an id that chat templates of Mistral accept: nine letters and digits."""
        return "".join(secrets.choice(ALPHANUMERIC) for _ in range(9))

    def _read(self) -> Steps:
        while (yield from self._until([_BEGIN], self._add_content)):
            held = [_BEGIN]
            if (yield from self._begins_with("[", held.append)):
                held.append(self._take("["))
                yield from self._list(held)
            elif self._rest.startswith("{"):
                if not (yield from self._object(_KEYS, held)):
                    self._add_content("".join(held))
            else:
                yield from self._named(held)

    def _list(self, held: list[str]) -> Steps:
        """Read the calls of a list, after its bracket."""
        while (yield from self._object(_KEYS, held)):
            held = []
            if (yield from self._token(held)) != ",":
                if held[-1] == "]":
                    return
                break
        self._add_content("".join(held))

    def _named(self, held: list[str]) -> Steps:
        """Read the name of a call and its arguments."""
        name: list[str] = []
        id: list[str] = []
        mark = yield from self._until([_ID, _ARGS, "{", "\n"], name.append)
        held += [*name, mark]
        if mark == _ID:
            mark = yield from self._until([_ARGS, "{", "\n"], id.append)
            held += [*id, mark]
        if mark == "{":
            self._rest, held[-1] = mark + self._rest, ""
        is_name = mark and re.fullmatch(r"[\w.:/-]+", "".join(name).strip())
        if is_name and (yield from self._begins_with("{", held.append)):
            self._begin_call("".join(name).strip(), "".join(id).strip() or None)
            yield from self._value(self._add_arguments)
        else:
            self._add_content("".join(held))

"""Calls in Python: a text that is ``[f(a=1), g(b="x")]``, of Llama 3.2 and 4."""

import ast
import json
import re
import warnings
from typing import Any

from jspec.server.readers.calls import CallReader, Steps

_NAMES = {"true": True, "false": False, "null": None}  # JSON's names, because models write them too
_SPELLED = {"\n": "\\n", "\r": "\\r", "\t": "\\t", "\0": "\\0"}
_FIRST = re.compile(r"[A-Za-z_][\w.]*\s*\(")


class Pythonic(CallReader):
    """Reads texts that are a list of calls with literals; all other texts are content.

    A call goes on once it is complete: its arguments are no JSON before.
    """

    @staticmethod
    def is_shown_by(template: str) -> bool:
        """Return whether a template has the example of Llama's."""
        return "func_name1(params_name1" in template

    def _read(self) -> Steps:
        held: list[str] = []
        if (yield from self._begins_with("[", held.append)):
            held.append(self._take("["))
            while (yield from self._call(held)):
                held = []
                if not (yield from self._begins_with(",", held.append)):
                    if self._rest.startswith("]"):
                        self._take("]")
                        held = []
                    break
                held.append(self._take(","))
        self._add_content("".join(held))
        yield from self._everything(self._add_content)

    def _call(self, held: list[str]) -> Steps:
        """Take a call; return whether it is one. Otherwise its text is added to ``held``."""
        yield from self._begins_with("[", held.append)
        source, depth, quote = "", 0, ""
        while True:
            while not self._rest and not self._is_end:
                yield
            char = self._take(self._rest[:2] if self._rest[:1] == "\\" else self._rest[:1])
            if char == "\\" and not self._is_end:  # its second half is still to come
                self._rest = char
                yield
                continue
            held.append(char)
            source += _SPELLED.get(char, char) if quote else char
            if quote:
                quote = "" if char == quote else quote
            elif char in ("'", '"'):
                quote = char
            elif char and char in "([{":
                depth += 1
                if depth == 1 and not _FIRST.fullmatch(source):
                    return False
            elif char and char in ")]}":
                depth -= 1
                if depth <= 0:
                    return depth == 0 and self._is_call(source)
            if not char or (not depth and not re.match(r"[\w.\s]", char)):
                return False

    def _is_call(self, source: str) -> bool:
        """Begin and end the call that a source is; return whether it is one."""
        try:
            with warnings.catch_warnings(action="ignore"):  # Python warns of unknown escapes
                call = ast.parse(source.strip(), mode="eval").body
            if not isinstance(call, ast.Call) or call.args:
                return False
            given = {each.arg: _literal(each.value) for each in call.keywords}
            if None in given:  # **keywords
                return False
            arguments = json.dumps(given, ensure_ascii=False, allow_nan=False)
        except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
            return False
        self._begin_call(ast.unparse(call.func))
        self._add_arguments(arguments)
        return True


def _literal(node: ast.expr) -> Any:
    """Return the value of a literal; raise ValueError for anything else."""
    match node:
        case ast.Name(id=name) if name in _NAMES:
            return _NAMES[name]
        case ast.List(elts=items) | ast.Tuple(elts=items):
            return [_literal(item) for item in items]
        case ast.Dict(keys=keys, values=values):
            pairs = zip(keys, values, strict=True)
            return {_literal(key): _literal(value) for key, value in pairs}
    return ast.literal_eval(node)

"""Calls of DeepSeek-V3 and R1: a name and arguments in a fence, between special tokens.

A call is the word "function", a token, the name, and the arguments in a fence of JSON. Bars and
joints of the tokens are not those of ASCII.
"""

from jspec.server.readers.calls import CallReader, Steps, dropped

_BAR, _JOINT = "\uff5c", "\u2581"
_token = lambda *words: f"<{_BAR}{_JOINT.join(words)}{_BAR}>"
_BEGIN_ALL, _END_ALL = _token("tool", "calls", "begin"), _token("tool", "calls", "end")
_BEGIN, _END = _token("tool", "call", "begin"), _token("tool", "call", "end")
_BEFORE_NAME, _FENCE = _token("tool", "sep"), "```json"


class DeepSeekV3(CallReader):
    """Reads calls between special tokens; the text around them is content."""

    @staticmethod
    def is_shown_by(template: str) -> bool:
        """Return whether a template has the tokens and the fence, which V3.1 lacks."""
        return _BEGIN in template and _FENCE in template

    def _read(self) -> Steps:
        while mark := (yield from self._until([_BEGIN_ALL, _BEGIN, _END_ALL], self._add_content)):
            if mark == _BEGIN:
                yield from self._call([mark])

    def _call(self, held: list[str]) -> Steps:
        held.append((yield from self._until([_BEFORE_NAME, _END], held.append)))
        if held[-1] == _BEFORE_NAME:
            start = len(held)
            held.append((yield from self._until(["\n", _END], held.append)))
            name = "".join(held[start:-1]).strip()
            if held[-1] == "\n" and (yield from self._begins_with(_FENCE, held.append)):
                held.append(self._take(_FENCE))
                if (yield from self._begins_with("{", held.append)):
                    self._begin_call(name)
                    yield from self._value(self._add_arguments)
                    yield from self._until([_END], dropped)
                    return
        self._add_content("".join(held))

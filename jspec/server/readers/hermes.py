"""Calls of Hermes and Qwen: ``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``."""

from jspec.server.readers.calls import CallReader, Steps

_BEGIN, _END = "<tool_call>", "</tool_call>"


class Hermes(CallReader):
    """Reads objects between tags. What stands there and is no call is content."""

    @staticmethod
    def is_shown_by(template: str) -> bool:
        """Return whether a template has the tag."""
        return _BEGIN in template

    def _read(self) -> Steps:
        mark = yield from self._until([_BEGIN], self._add_content)
        while mark:
            held, after = [_BEGIN], []
            if (yield from self._object(("arguments", "parameters"), held)):
                mark = yield from self._until([_END, _BEGIN], after.append)
                held = [] if mark else after  # without an end, what follows is content
            else:
                mark = ""
            self._add_content("".join(held))
            if mark != _BEGIN:
                mark = yield from self._until([_BEGIN], self._add_content)

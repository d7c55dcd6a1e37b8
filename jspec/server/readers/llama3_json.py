"""Calls of Llama 3: a text that is ``{"name": ..., "parameters": {...}}``, or several with "; "."""

from jspec.server.readers.calls import CallReader, Steps

_TAG = "<|python_tag|>"


class Llama3Json(CallReader):
    """Reads texts that begin with a call; all other texts are content."""

    @staticmethod
    def is_shown_by(template: str) -> bool:
        """Return whether a template has the tag, or asks for parameters."""
        return _TAG in template or '"parameters"' in template

    def _read(self) -> Steps:
        held: list[str] = []
        if (yield from self._begins_with(_TAG, held.append)):
            held.append(self._take(_TAG))
        while (yield from self._begins_with("{", held.append)):
            if not (yield from self._object(("parameters", "arguments"), held)):
                break
            held = []
            if not (yield from self._begins_with(";", held.append)):
                break
            held.append(self._take(";"))
        self._add_content("".join(held))
        yield from self._everything(self._add_content)

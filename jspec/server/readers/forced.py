"""Calls that a grammar forces: its texts are arguments, or a list of calls."""

from jspec.server.readers.calls import CallReader, Steps, dropped


class Named(CallReader):
    """Reads a text that is the arguments of one function."""

    def __init__(self, name: str):
        super().__init__()
        self._name = name

    def _read(self) -> Steps:
        while not (self._rest or self._is_end):
            yield
        self._begin_call(self._name)
        yield from self._everything(self._add_arguments)


class Required(CallReader):
    """Reads a text that is a list of calls: ``[{"name": ..., "parameters": {...}}, ...]``."""

    def _read(self) -> Steps:
        token = yield from self._token([])
        while token in ("[", ",") and (yield from self._object(("parameters",), [])):
            token = yield from self._token([])
        yield from self._everything(dropped)

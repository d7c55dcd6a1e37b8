"""The parts of an answer: reasoning, content, and calls of tools."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from jspec.server.readers import ReasoningReader
from jspec.server.readers.calls import Call, Delta, joined
from jspec.server.streams import Piece
from jspec.server.tool_calls import Use


@dataclasses.dataclass
class Parts:
    """The parts of a text that are new since the last ones; of a whole text, all."""

    reasoning: str
    content: str
    deltas: list[Delta]  # deltas of calls
    finish_reason: str | None

    @property
    def calls(self) -> list[Call]:
        """The calls of a whole text."""
        return joined(self.deltas)


class PartReader:
    """Splits one growing text into its parts.

    Reasoning comes first; calls are read in the text after it.

    Args:
      use: of tools, by the request.
      reasoning_reader: makes a reader of reasoning; None: the texts have none.
      is_parallel: whether the text may have several calls; later ones are dropped otherwise.
      shows_reasoning: whether reasoning is part of the answer.
    """

    def __init__(
        self,
        use: Use,
        reasoning_reader: Callable[[], ReasoningReader] | None,
        *,
        is_parallel: bool,
        shows_reasoning: bool,
    ):
        self._finish_reason = use.finish_reason
        self._calls = use.reader and use.reader()
        self._reasoning = reasoning_reader and reasoning_reader()
        self._is_parallel, self._shows_reasoning = is_parallel, shows_reasoning
        self._has_calls = False

    def feed(self, piece: Piece) -> Parts:
        """Take the next piece of the text; return what is new."""
        reason, is_end = piece.finish_reason, piece.finish_reason is not None
        thought, content = "", piece.text
        if self._reasoning is not None:
            thought, content = self._reasoning.feed(content, is_end)
        deltas: list[Delta] = []
        if self._calls is not None:
            content, deltas = self._calls.feed(content, is_end)
        if not self._is_parallel:
            deltas = [delta for delta in deltas if delta.index == 0]
        self._has_calls |= bool(deltas)
        if reason == "stop" and self._has_calls:
            reason = self._finish_reason
        return Parts(thought if self._shows_reasoning else "", content, deltas, reason)

    def num_reasoning_tokens(self, token_ids: Sequence[int], tokenizer: Any) -> int:
        """Return how many of the tokens of the text so far are reasoning."""
        return 0 if self._reasoning is None else self._reasoning.count(token_ids, tokenizer)

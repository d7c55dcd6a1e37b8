"""The base of readers: reasoning before the answer in a growing text."""

import bisect
from collections.abc import Mapping, Sequence
from typing import Any

from jspec.server.readers.marks import first


class ReasoningReader:
    """Splits a growing text into reasoning and the rest, which do not depend on where it is cut.

    Args:
      is_open: whether the text begins with reasoning. Otherwise it has some if it begins with the
        mark of it.
    """

    begin = "<think>"
    end = "</think>"
    implied_ends: tuple[str, ...] = ()  # texts that end reasoning too, and belong to the rest

    def __init__(self, is_open: bool):
        self._is_open, self._is_first = is_open, True
        self._rest = ""
        self._has_reasoned = False
        self._begin_mark = self._end_mark = ""  # those that the text had

    @classmethod
    def begins_after(cls, prompt: str, variables: Mapping[str, Any]) -> bool:
        """Return whether the text after a prompt begins with reasoning.

        A chat template may have begun reasoning at the end of the prompt, or ended it there.
        ``variables`` are those of the template.
        """
        del variables
        return not prompt.rstrip().endswith(cls.end)

    def feed(self, text: str, is_end: bool) -> tuple[str, str]:
        """Take more of the text; return what is new of the reasoning and of the rest."""
        self._rest += text
        if self._is_first and not self._passed_begin(is_end):
            return "", ""
        reasoning = ""
        if self._is_open:
            at, self._end_mark = first(self._rest, (self.end, *self.implied_ends), is_end)
            reasoning = self._rest[:at]
            self._rest = self._rest[at:].removeprefix(self.end)
            self._is_open = not self._end_mark
            self._has_reasoned |= at > 0
        if self._is_open:
            return reasoning, ""
        rest, self._rest = self._rest, ""
        return reasoning, rest

    def _passed_begin(self, is_end: bool) -> bool:
        """Take the mark that begins reasoning; return False while it may still come."""
        text = self._rest.lstrip()
        if self.begin.startswith(text) and text != self.begin and not is_end:
            return False
        self._is_first = False
        if text.startswith(self.begin):
            self._rest, self._is_open = text[len(self.begin) :], True
            self._begin_mark = self.begin
        return True

    def count(self, token_ids: Sequence[int], tokenizer: Any) -> int:
        """Return the number of tokens of reasoning in the text so far, without its marks."""
        if not self._has_reasoned:
            return 0
        size_of = lambda mark: len(tokenizer.encode(mark, add_special_tokens=False)) if mark else 0
        count = len(token_ids)
        if self._end_mark:
            count = bisect.bisect_left(
                range(count),
                True,
                key=lambda size: self._end_mark in tokenizer.decode(token_ids[:size]),
            )
        return max(count - size_of(self._begin_mark) - size_of(self._end_mark), 0)

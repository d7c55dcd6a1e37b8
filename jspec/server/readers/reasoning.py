"""The base of readers: reasoning before the answer in a growing text."""

import bisect
from collections.abc import Mapping, Sequence
from typing import Any

from jspec.api import detokenizer


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
        self._has_mark = self._has_reasoned = False

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
        at, after = len(self._rest), len(self._rest)
        if self._is_open:
            marks = (self.end, *self.implied_ends)
            matches = [(at, mark) for mark in marks if (at := self._rest.find(mark)) >= 0]
            if matches:
                at, mark = min(matches)
                after = at + len(self.end) if mark == self.end else at
                self._is_open = False
            elif not is_end:
                at = after = at - detokenizer.held_back(self._rest, marks)
            reasoning, self._rest = self._rest[:at], self._rest[after:]
            self._has_reasoned |= bool(reasoning)
        else:
            reasoning = ""
        rest = "" if self._is_open else self._rest
        self._rest = self._rest[len(rest) :]
        return reasoning, rest

    def _passed_begin(self, is_end: bool) -> bool:
        """Take the mark that begins reasoning; return False while it may still come."""
        text = self._rest.lstrip()
        if self.begin.startswith(text) and text != self.begin and not is_end:
            return False
        self._is_first = False
        if text.startswith(self.begin):
            self._rest, self._is_open, self._has_mark = text[len(self.begin) :], True, True
        return True

    def count(self, token_ids: Sequence[int], tokenizer: Any) -> int:
        """Return the number of tokens of reasoning in the text so far, without its marks."""
        if not self._has_reasoned:
            return 0
        marks = (self.end, *self.implied_ends)

        def is_over(count: int) -> bool:
            text = tokenizer.decode(token_ids[:count], skip_special_tokens=False)
            return any(mark in text for mark in marks)

        num_tokens = len(token_ids)
        size_of = lambda mark: len(tokenizer.encode(mark, add_special_tokens=False))
        over = (
            num_tokens
            if self._is_open
            else bisect.bisect_left(range(num_tokens), True, key=is_over)
        )
        taken = size_of(self.end) if not self._is_open else 0
        taken += size_of(self.begin) if self._has_mark else 0
        return max(over - taken, 0)

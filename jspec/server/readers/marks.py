"""Search for marks in a growing text."""

from collections.abc import Sequence

from jspec.api import detokenizer


def first(text: str, marks: Sequence[str], is_end: bool) -> tuple[int, str]:
    """Return the place of the first mark, and the mark.

    Without one it is the end of the text that no mark may begin in, and "".

    >>> first("a<b>c</b>", ["</b>", "<b>"], False), first("a</", ["</b>"], False)
    ((1, '<b>'), (1, ''))
    """
    offsets = {mark: text.find(mark) for mark in marks}
    there = [(at, mark) for mark, at in offsets.items() if at >= 0]
    if there:
        return min(there)
    return len(text) - (0 if is_end else detokenizer.held_back(text, marks)), ""

"""How tokens and texts are shown to people: nothing unseen, and no codes of terminals."""

import unicodedata
from collections.abc import Callable
from typing import Any

_BROKEN = "\ufffd"  # what a decoder writes for bytes that are no character by themselves
_MARKS = {"\n": "↵", "\t": "⇥", "\r": "␍"}
_KEPT = "\n\t\u200c\u200d"  # the last two join letters, and parts of pictures


def label(tokenizer: Any, token: int) -> str:
    """A token's own text on one line, spaces at its edges marked; its id if there is no text.

    A token that is part of a character has no text of its own, and is shown as its vocabulary
    spells it.
    """
    if tokenizer is None:
        return str(token)
    text = tokenizer.decode([token], clean_up_tokenization_spaces=False)
    if _BROKEN in text or not text:
        text = tokenizer.convert_ids_to_tokens(token) or str(token)
    return spaced(text)


def spaced(text: str) -> str:
    """One line in which white space and what cannot be printed are seen.

    >>> spaced(" a b\\n"), spaced("\\x1b[2J")
    ('␣a b↵', '\\\\x1b[2J')
    """
    inner = text.strip(" ")
    left = len(text) - len(text.lstrip(" "))
    right = len(text) - len(inner) - left if inner else 0
    marked = "".join(_MARKS.get(char, char) for char in inner)
    return "␣" * left + _escaped(marked, lambda _: False) + "␣" * right


def printed(text: str) -> str:
    """The text with its white space, all else that cannot be printed escaped.

    >>> printed("a\\n\\x00b\\u202e")
    'a\\n\\\\x00b\\\\u202e'
    """
    return _escaped(text, lambda char: char in _KEPT or unicodedata.category(char) == "Zs")


def _escaped(text: str, kept: Callable[[str], bool]) -> str:
    """The text, with what cannot be printed as Python writes it, but for what is ``kept``."""
    return "".join(
        char
        if char.isprintable() or kept(char)
        else char.encode("unicode_escape", "surrogatepass").decode()
        for char in text
    )

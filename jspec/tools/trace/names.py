"""Printable forms of tokens and texts, without control codes or invisible characters."""

import unicodedata
from collections.abc import Callable
from typing import Any

_BROKEN = "\ufffd"  # decoders write it for bytes that are no character by themselves
_MARKS = {"\n": "↵", "\t": "⇥", "\r": "␍"}
_UNESCAPED = "\n\t\u200c\u200d"  # the last two join letters, and parts of emojis


def label(tokenizer: Any, token: int) -> str:
    """Return a token's text on one line, with its outer spaces marked; its id without a tokenizer.

    A token that is part of a character has no text of its own, and is spelled as in the vocabulary.
    """
    if tokenizer is None:
        return str(token)
    text = tokenizer.decode([token], clean_up_tokenization_spaces=False)
    if _BROKEN in text or not text:
        text = tokenizer.convert_ids_to_tokens(token) or str(token)
    return spaced(text)


def spaced(text: str) -> str:
    """Return one line with visible white space and escaped control characters.

    >>> spaced(" a b\\n"), spaced("\\x1b[2J")
    ('␣a b↵', '\\\\x1b[2J')
    """
    inner = text.strip(" ")
    left = len(text) - len(text.lstrip(" "))
    right = len(text) - len(inner) - left if inner else 0
    marked = "".join(_MARKS.get(char, char) for char in inner)
    return "␣" * left + _escaped(marked, lambda _: False) + "␣" * right


def printed(text: str) -> str:
    """Return the text with its white space and escaped control characters.

    >>> printed("a\\n\\x00b\\u202e")
    'a\\n\\\\x00b\\\\u202e'
    """
    return _escaped(text, lambda char: char in _UNESCAPED or unicodedata.category(char) == "Zs")


def _escaped(text: str, is_safe: Callable[[str], bool]) -> str:
    """Return the text with Python's escapes for characters that are neither printable nor safe."""
    return "".join(
        char
        if char.isprintable() or is_safe(char)
        else char.encode("unicode_escape", "surrogatepass").decode()
        for char in text
    )

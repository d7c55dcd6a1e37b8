"""From token ids to text: incrementally, and cut at stop strings.

A row's text is a fold over its tokens, one at a time, so it does not depend on how many of them a
slice of rounds happened to bring.
"""

from collections.abc import Iterable, Sequence
from typing import Any

_CONTEXT = 6  # tokens of the prompt that the first of the answer is decoded after
_BROKEN = "\ufffd"  # what a decoder writes for bytes that are no character (yet)


class Detokenizer:
    """Decodes one token at a time; text once given never changes.

    Tokens may be parts of characters, and some decoders (SentencePiece) treat the first token of a
    text unlike the others. So each token is decoded behind those that gave the text before it, and
    a broken character at the end waits for more::

        ids     ... a  b  c  d  e              decode(c d)       is text given already
                      prefix  read  end        decode(c d e)     is that text and what e adds
    """

    def __init__(self, tokenizer: Any, prompt: Sequence[int], skip_special_tokens: bool = True):
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._ids = [int(token) for token in prompt[-_CONTEXT:]]
        self._prefix, self._read = 0, len(self._ids)
        self._given = self._decode()

    def feed(self, token: int) -> str:
        """Takes in a token and returns the text that became certain by it."""
        self._ids.append(int(token))
        text = self._decode()
        certain = text.rstrip(_BROKEN)  # a token may be whole characters and the start of another
        piece = certain[len(self._given) :]
        if not piece:
            return ""
        self._given = certain
        if certain == text:
            self._prefix, self._read = self._read, len(self._ids)
            self._given = self._decode()
        return piece

    def flush(self) -> str:
        """The text of a broken character that no further token will complete."""
        return self._decode()[len(self._given) :]

    def _decode(self) -> str:
        return self._tokenizer.decode(
            self._ids[self._prefix :],
            skip_special_tokens=self._skip_special_tokens,
            clean_up_tokenization_spaces=False,  # it would change text already given
        )


def find_stop(text: str, start: int, stops: Iterable[str]) -> tuple[int, int, str] | None:
    """The first stop string to be complete in ``text``, if it ends after ``start``.

    Of two that end together, the longer one. Returns (begin, end, stop string).

    >>> find_stop("one two", 0, ["wo", "two", "on"])
    (0, 2, 'on')
    >>> find_stop("one two", 3, ["wo", "two", "on"])
    (4, 7, 'two')
    """
    found = []
    for stop in stops:
        begin = text.find(stop, max(start - len(stop) + 1, 0))
        if begin >= 0:
            found.append((begin + len(stop), begin, stop))
    if not found:
        return None
    end, begin, stop = min(found)
    return begin, end, stop


def held_back(text: str, stops: Iterable[str]) -> int:
    """How many characters at the end of ``text`` may yet turn out to begin a stop string.

    >>> held_back("one tw", ["two", "w"])
    2
    """
    return max(
        (size for stop in stops for size in range(1, len(stop)) if text.endswith(stop[:size])),
        default=0,
    )

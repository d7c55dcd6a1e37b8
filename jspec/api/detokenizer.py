"""Incremental detokenization, and search for stop strings.

A text is a fold over its tokens, one at a time, so it does not depend on how many tokens arrive
together.
"""

import functools
import itertools
from collections.abc import Iterable, Sequence
from typing import Any

_CONTEXT = 6  # tokens of the prompt before the first decoded token
_BROKEN = "\ufffd"  # a decoder's replacement for bytes that are no character (yet)
_MOST_UNSURE = 3  # bytes at the end of a text that later ones may still complete (UTF-8 has 4)
_LONGEST_WINDOW = 64  # tokens that are decoded together; then the window moves
_SHORTEST_WINDOW = 16  # tokens of a window that has moved: they hold the unsure bytes, and context


class Detokenizer:
    """A decoder of one token at a time; text once returned never changes.

    All pieces and ``flush`` together are what decoding the prompt and the tokens adds to decoding
    the prompt. Tokens may be parts of characters, and some decoders (SentencePiece) treat the first
    token of a text differently. So each token is decoded after the tokens of the text before it,
    and a broken character at the end waits for more tokens::

        ids     ... a  b  c  d  e              decode(c d)       is text returned already
                      prefix  read  end        decode(c d e)     is that text and the text of e

    Tokens that are single bytes wait until one comes that is not: of a run of them with a broken
    character, decoders replace every byte.

    A token costs the decoding of a window of bounded length, however long the text is: special
    tokens that are left out are not decoded, and a window whose text stays broken moves.
    """

    def __init__(self, tokenizer: Any, prompt: Sequence[int], skip_special_tokens: bool = True):
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._bytes = _byte_tokens(tokenizer)
        self._left_out = _special_tokens(tokenizer) if skip_special_tokens else frozenset()
        first = max(len(prompt) - _CONTEXT, 0)
        while first and int(prompt[first - 1]) in self._bytes:
            first -= 1
        self._ids = [int(token) for token in prompt[first:]]
        self._prefix, self._read = 0, len(self._ids)
        self._given = self._decode()

    def feed(self, token: int) -> str:
        """Add a token and return the text that it completes."""
        if int(token) in self._left_out:
            return ""
        self._ids.append(int(token))
        if int(token) in self._bytes:
            return ""
        text = self._decode()
        # A token may be whole characters and the start of another. Bytes before it stay broken.
        num_broken = len(text) - len(text.rstrip(_BROKEN))
        unsure = min(num_broken, _MOST_UNSURE)
        certain = text[: len(text) - unsure]
        piece = self._new(certain)
        if piece:
            self._given = certain
        if piece and not num_broken:
            self._prefix, self._read = self._read, len(self._ids)
            self._given = self._decode()
        elif len(self._ids) - self._prefix > _LONGEST_WINDOW:
            self._move(text, unsure)
        return piece

    def _move(self, text: str, unsure: int) -> None:
        """Shorten the window, whose ``text`` ends with some ``unsure`` characters."""
        if not unsure:  # the last tokens added nothing
            del self._ids[self._read :]
            return
        begin = self._prefix
        self._prefix = len(self._ids) - _SHORTEST_WINDOW
        window = self._decode()
        if window.endswith(text[len(text) - unsure :]):
            self._given, self._read = window[: len(window) - unsure], len(self._ids)
        else:
            self._prefix = begin

    def flush(self) -> str:
        """Return the text of the bytes at the end."""
        return self._new(self._decode())

    def _new(self, text: str) -> str:
        """Return the end of ``text`` that was not given; its start may complete the prompt's."""
        pairs = zip(text, self._given, strict=False)
        return text[sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs)) :]

    def _decode(self) -> str:
        return self._tokenizer.decode(
            self._ids[self._prefix :],
            skip_special_tokens=self._skip_special_tokens,
            clean_up_tokenization_spaces=False,  # it would change text already given
        )


@functools.lru_cache(maxsize=4)
def _byte_tokens(tokenizer: Any) -> frozenset[int]:
    """Return the ids of a SentencePiece vocabulary's tokens for single bytes."""
    if not hasattr(tokenizer, "get_added_vocab"):  # no tokenizer of transformers
        return frozenset()
    ids = tokenizer.convert_tokens_to_ids([f"<0x{byte:02X}>" for byte in range(256)])
    return frozenset(ids) - {tokenizer.unk_token_id, None}


def _special_tokens(tokenizer: Any) -> frozenset[int]:
    """Return the ids that decoders leave out of a text on request."""
    if not hasattr(tokenizer, "added_tokens_decoder"):  # no tokenizer of transformers
        return frozenset()
    added = tokenizer.added_tokens_decoder.items()
    return frozenset(token for token, entry in added if entry.special)


class StopStrings:
    """Finds stop strings in a text that grows by pieces.

    A piece costs its own length for each stop string that it begins or continues, however long the
    text and the strings are (Knuth, Morris and Pratt, 1977)::

        text so far    ... a b c a b          "abcabd" is open with 5 characters
        next piece     d                      now it is whole
                       c                      2 remain: "ab" begins it too, and "c" follows

    >>> stops = StopStrings(["wo", "two", "on"])
    >>> stops.feed("one two"), stops.feed(" two")
    ((2, 'on'), (4, 'two'))
    """

    def __init__(self, stops: Iterable[str]):
        self._by_first: dict[str, list[str]] = {}  # the stop strings that begin with a character
        for stop in dict.fromkeys(stops):
            self._by_first.setdefault(stop[0], []).append(stop)
        self._firsts = frozenset(self._by_first)
        self._open: dict[str, int] = {}  # characters of each stop string at the end of the text

    def feed(self, piece: str, *, may_end: bool = True) -> tuple[int, str] | None:
        """Add a piece; return the end of the first match in it and the stop string, or None.

        Of two matches that end together, the longer one counts. The text ends with a match, and
        what follows in the piece is not read; matches count only if the text ``may_end``.
        """
        if not self._open and self._firsts.isdisjoint(piece):
            return None
        for end, character in enumerate(piece, 1):
            whole = self._advance(character) if self._open or character in self._firsts else []
            if whole and may_end:
                return end, max(whole, key=len)
        return None

    def _advance(self, character: str) -> list[str]:
        """Add a character; return the stop strings that it completes."""
        before, self._open, whole = self._open, {}, []
        begun = (stop for stop in self._by_first.get(character, ()) if stop not in before)
        for stop in (*before, *begun):
            size, borders = before.get(stop, 0), _borders(stop)
            while size and stop[size] != character:
                size = borders[size]
            size += stop[size] == character
            if size == len(stop):
                whole.append(stop)
                size = borders[size]
            if size:
                self._open[stop] = size
        return whole

    @property
    def held(self) -> int:
        """The number of characters at the end of the text that may begin a stop string."""
        return max(self._open.values(), default=0)


@functools.lru_cache(maxsize=256)
def _borders(text: str) -> tuple[int, ...]:
    """Return the longest proper prefix of ``text[:n]`` that also ends it, for n = 0, 1, ...

    >>> _borders("ababc")
    (0, 0, 0, 1, 2, 0)
    """
    borders, size = [0, 0], 0
    for character in text[1:]:
        while size and text[size] != character:
            size = borders[size]
        size += text[size] == character
        borders.append(size)
    return tuple(borders)


def held_back(text: str, stops: Iterable[str]) -> int:
    """Return the number of characters at the end of ``text`` that may begin a stop string.

    >>> held_back("one tw", ["two", "w"])
    2
    """
    stops = tuple(stops)
    longest = max(map(len, stops), default=1)
    watched = StopStrings(stops)
    watched.feed(text[max(len(text) - longest + 1, 0) :], may_end=False)
    return watched.held

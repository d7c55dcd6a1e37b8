"""Incremental detokenization, and search for stop strings.

A text is a fold over its tokens, one at a time, so it does not depend on how many tokens arrive
together.
"""

import itertools
from collections.abc import Iterable, Sequence
from typing import Any

_CONTEXT = 6  # tokens of the prompt before the first decoded token
_BROKEN = "\ufffd"  # a decoder's replacement for bytes that are no character (yet)


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
    """

    def __init__(self, tokenizer: Any, prompt: Sequence[int], skip_special_tokens: bool = True):
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._bytes = _byte_tokens(tokenizer)
        first = max(len(prompt) - _CONTEXT, 0)
        while first and int(prompt[first - 1]) in self._bytes:
            first -= 1
        self._ids = [int(token) for token in prompt[first:]]
        self._prefix, self._read = 0, len(self._ids)
        self._given = self._decode()

    def feed(self, token: int) -> str:
        """Add a token and return the text that it completes."""
        self._ids.append(int(token))
        if int(token) in self._bytes:
            return ""
        text = self._decode()
        certain = text.rstrip(_BROKEN)  # a token may be whole characters and the start of another
        piece = self._new(certain)
        if not piece:
            return ""
        self._given = certain
        if certain == text:
            self._prefix, self._read = self._read, len(self._ids)
            self._given = self._decode()
        return piece

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


def _byte_tokens(tokenizer: Any) -> frozenset[int]:
    """Return the ids of a SentencePiece vocabulary's tokens for single bytes."""
    if not hasattr(tokenizer, "get_added_vocab"):  # no tokenizer of transformers
        return frozenset()
    ids = tokenizer.convert_tokens_to_ids([f"<0x{byte:02X}>" for byte in range(256)])
    return frozenset(ids) - {tokenizer.unk_token_id, None}


def find_stop(text: str, start: int, stops: Iterable[str]) -> tuple[int, int, str] | None:
    """Return (begin, end, stop string) of the first match that ends after ``start``, or None.

    Of two matches that end together, the longer one counts.

    >>> find_stop("one two", 0, ["wo", "two", "on"])
    (0, 2, 'on')
    >>> find_stop("one two", 3, ["wo", "two", "on"])
    (4, 7, 'two')
    """
    matches = []
    for stop in stops:
        begin = text.find(stop, max(start - len(stop) + 1, 0))
        if begin >= 0:
            matches.append((begin + len(stop), begin, stop))
    if not matches:
        return None
    end, begin, stop = min(matches)
    return begin, end, stop


def held_back(text: str, stops: Iterable[str]) -> int:
    """Return the number of characters at the end of ``text`` that may begin a stop string.

    >>> held_back("one tw", ["two", "w"])
    2
    """
    return max(
        (size for stop in stops for size in range(1, len(stop)) if text.endswith(stop[:size])),
        default=0,
    )

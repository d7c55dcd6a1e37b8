"""Grammars that the host follows, by ``llguidance``: for texts that no automaton of ours describes.

A grammar of any depth has no automaton that fits the device. The host then computes what each
drafted node allows, between the draft and its verification, and the round has its exact masks.
Where a grammar leaves a single continuation, llguidance allows its usual tokens alone.
"""

import contextlib
import dataclasses
import functools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import llguidance
import numpy as np
from llguidance.numpy import fill_next_token_bitmask

from jspec.grammar import automata, limits, sources, workers
from jspec.grammar.automata import token_bytes
from jspec.util.messages import shown
from jspec.util.results import Results

_WORD = 32  # tokens of a word of a mask


@dataclasses.dataclass(frozen=True, eq=False)
class FollowedGrammar:
    """A grammar over the tokens of a vocabulary."""

    begun: llguidance.LLMatcher  # before any token; to be copied
    ends: frozenset[int]  # tokens that end a text
    vocab_size: int


def num_words(vocab_size: int) -> int:
    """Return the width W of a mask."""
    return -(-vocab_size // _WORD)


def source_of(outputs: Mapping[str, Any]) -> str:
    """Return the grammar of a ``structured_outputs`` setting of one key, in llguidance's form.

    Raises:
      ValueError: llguidance does not take it.
    """
    ((kind, value),) = outputs.items()
    try:
        text = json.dumps([kind, value])
    except (ValueError, TypeError, RecursionError) as error:
        raise ValueError(sources.refused(kind, value, error)) from None

    def make(is_read: Callable[[], bool]) -> str:
        arguments = dict(kind=kind, value=value, seconds=limits.FOLLOWED_SECONDS)
        with _in_memory(kind, value):
            return workers.run("source", is_read, **arguments)[0]

    with _in_time(kind, value):
        return _SOURCES.get(text, make, lambda source: len(text) + len(source))


_SOURCES, _STOP_REASONS = Results(32 << 20), Results(32 << 20)


@contextlib.contextmanager
def _in_memory(kind: str, value: Any) -> Iterator[None]:
    """Refuse a grammar that is too large; ``Results`` caches a ValueError, and no other error."""
    try:
        yield
    except MemoryError:
        reason = "it needs more than memory or time allow"
        raise ValueError(sources.refused(kind, value, reason)) from None


@contextlib.contextmanager
def _in_time(kind: str, value: Any) -> Iterator[None]:
    """Refuse a grammar that a busy machine did not compile; it may be sent again."""
    try:
        yield
    except TimeoutError as error:
        raise ValueError(sources.refused(kind, value, error)) from None


class _Spelled:
    """A tokenizer as llguidance reads one: the spelling of every token."""

    def __init__(self, tokenizer: Any, ends: frozenset[int], vocab_size: int):
        self._tokenizer, self.bos_token_id, self.eos_token_id = tokenizer, None, min(ends)
        self.tokens = [b"<%d>" % token for token in range(vocab_size)]
        special = set(range(vocab_size))
        for spelling, ids in token_bytes(tokenizer, vocab_size, ends).items():
            special -= set(ids)
            for token in ids:
                self.tokens[token] = spelling
        self.special_token_ids = sorted(special)

    def __call__(self, text: str) -> list[int]:
        if not isinstance(text, str):  # bytes, which llguidance tries once
            raise TypeError(f"text={text!r} must be a str.")
        return self._tokenizer.encode(text, add_special_tokens=False)


@functools.lru_cache(maxsize=4)
def _tokenizer(tokenizer: Any, ends: frozenset[int], vocab_size: int) -> llguidance.LLTokenizer:
    spelled = llguidance.TokenizerWrapper(_Spelled(tokenizer, ends, vocab_size))
    return llguidance.LLTokenizer(spelled, n_vocab=vocab_size, eos_token=sorted(ends))


def followed(
    outputs: Mapping[str, Any], tokenizer: Any, ends: frozenset[int], vocab_size: int
) -> FollowedGrammar:
    """Return the grammar of a setting over the tokens of a tokenizer.

    Args:
      outputs: as of ``source_of``.
      tokenizer: of transformers.
      ends: tokens that end a text, allowed where the grammar does.
      vocab_size: of the target.

    Raises:
      ValueError: llguidance does not take the grammar, or nothing ends a text.
    """
    source = source_of(outputs)
    ends = frozenset(end for end in ends if end < vocab_size)
    if not ends:
        raise ValueError(
            f"structured_outputs={shown(outputs)} needs a token that ends the text: the model has "
            "none, so give stop_token_ids."
        )
    ((kind, value),) = outputs.items()
    vocabulary = automata.vocabulary_of(tokenizer, ends, vocab_size)

    def make(is_read: Callable[[], bool]) -> str | None:
        arguments = dict(vocabulary=vocabulary, seconds=limits.FOLLOWED_SECONDS)
        with _in_memory(kind, value):
            return workers.run("followed", is_read, source=source, **arguments)[0]

    # Some grammars take hours or all memory. So a child process tries each first.
    with _in_time(kind, value):
        key = source, tokenizer, ends, vocab_size
        reason = _STOP_REASONS.get(key, make, lambda _: len(source))
    if reason is not None:
        raise ValueError(sources.refused(kind, value, f"it allows nothing ({reason})"))
    words = _tokenizer(tokenizer, ends, vocab_size)
    begun = llguidance.LLMatcher(words, source, limits=sources.parser_limits())
    begun.compute_bitmask()  # The first one is slow, and no other request waits for it here.
    return FollowedGrammar(begun, ends, vocab_size)


class Follower:
    """Follows one text through its grammar."""

    def __init__(self, grammar: FollowedGrammar):
        self._grammar = grammar
        self._matcher = grammar.begun.deep_copy()
        self._read = 0  # tokens of the text

    def masks(
        self, text: Sequence[int], tokens: np.ndarray, parents: np.ndarray, valid: np.ndarray
    ) -> np.ndarray:
        """Return the tokens that the grammar allows after each node: bits, uint32 [N, W].

        Nodes that cannot be accepted allow everything.

        Args:
          text: all tokens that were generated, the root of the draft included.
          tokens: int32 [N], of the draft.
          parents: int32 [N].
          valid: bool [N].

        Raises:
          ValueError: the grammar gave up, or the text does not follow it.
        """
        matcher = self._matcher
        new = [int(token) for token in text[self._read :]]
        if not matcher.is_stopped():
            matcher.consume_tokens(new)
        self._read = len(text)
        if matcher.is_error():
            raise ValueError(f"the grammar cannot be followed further: {matcher.stop_reason()}.")
        allowed = np.full((len(tokens), num_words(self._grammar.vocab_size)), -1, np.int32)
        for node in np.flatnonzero(valid):
            branch = _branch(tokens, parents, node)
            count = matcher.try_consume_tokens(branch)
            if count == len(branch):
                self._fill(allowed, node)
            matcher.rollback(count)
        return allowed.view(np.uint32)

    def _fill(self, allowed: np.ndarray, node: int) -> None:
        """Write the mask of the matcher's present state; a complete text may only end."""
        if not self._matcher.is_stopped():
            fill_next_token_bitmask(self._matcher, allowed, int(node))
            return
        allowed[node] = 0
        bits = allowed[node].view(np.uint32)
        for end in self._grammar.ends:
            bits[end // _WORD] |= np.uint32(1 << end % _WORD)


def _branch(tokens: np.ndarray, parents: np.ndarray, node: int) -> list[int]:
    """Return the tokens from below the root to a node."""
    branch = []
    while node > 0:
        branch.append(int(tokens[node]))
        node = parents[node]
    return branch[::-1]

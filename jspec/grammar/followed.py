"""Grammars that the host follows, by ``llguidance``: for texts that no automaton of ours describes.

A grammar of any depth has no automaton that fits the device. The host then computes what each
drafted node allows, between the draft and its verification, and the round has its exact masks.
Where a grammar leaves a single continuation, llguidance allows its usual tokens alone.
"""

import dataclasses
import functools
import json
from collections.abc import Mapping, Sequence
from typing import Any

import llguidance
import numpy as np
from llguidance.numpy import fill_next_token_bitmask

from jspec.grammar.automata import token_bytes
from jspec.util.messages import shown

_MALFORMED = ValueError, TypeError, KeyError, AttributeError, AssertionError, RecursionError
_WORD = 32  # tokens of a word of a mask
# JSON as the automata have it: a space at most between its symbols, and oneOf as anyOf.
_AS_OURS = {"whitespace_pattern": "[ ]?", "coerce_one_of": True}


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
    matcher = llguidance.LLMatcher
    try:
        if kind == "json":
            source = matcher.grammar_from_json_schema(_text_of(value), overrides=_AS_OURS)
        elif kind == "json_object":
            source = matcher.grammar_from_json_schema('{"type": "object"}', overrides=_AS_OURS)
        elif kind == "regex":
            source = matcher.grammar_from_regex(value)
        elif kind == "choice":
            source = matcher.grammar_from_lark("start: " + " | ".join(map(json.dumps, value)))
        elif kind == "grammar":
            source = llguidance.grammar_from("grammar", value)
        else:
            source = _of_tags(json.loads(_text_of(value)))
    except _MALFORMED as error:
        raise ValueError(_refused(outputs, error)) from None
    error = matcher.validate_grammar(source, None)
    if error:
        raise ValueError(_refused(outputs, error))
    return source


def _text_of(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _of_tags(given: Mapping[str, Any]) -> str:
    """Return the grammar of a ``structural_tag`` as vLLM has it: texts with marked structures."""
    tags = []
    for structure in given["structures"]:
        begin = structure["begin"]
        trigger = next(filter(begin.startswith, given["triggers"]), None)
        if trigger is None:
            raise ValueError(f"begin={shown(begin)} starts with none of the triggers")
        options = dict(trigger=trigger, begin=begin, end=structure["end"])
        tags.append(llguidance.StructTag(grammar=structure["schema"], **options))
    if not tags:
        raise ValueError("it holds no structure")
    return llguidance.StructTag.to_grammar(tags, assume_special=False)


def _refused(outputs: Mapping[str, Any], error: Any) -> str:
    reason = " ".join(str(error).split())[:300]
    return f"structured_outputs={shown(outputs)} cannot be followed: {reason}"


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
    begun = llguidance.LLMatcher(_tokenizer(tokenizer, ends, vocab_size), source)
    begun.compute_bitmask()  # the first one is slow, and nobody waits for it here
    if begun.is_error() or begun.is_stopped():
        raise ValueError(_refused(outputs, f"it allows nothing ({begun.stop_reason()})"))
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

"""Structured output on the host: regular expressions and JSON schemas to automata over tokens.

``outlines-core`` builds the automata: over the bytes of every token, so that a token may end in the
middle of what the grammar names, and characters may be spread over several tokens.
"""

import dataclasses
import functools
import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from itertools import repeat
from typing import Any

import numpy as np

from jspec.automaton import FREE, Automaton
from jspec.buckets import bucket
from jspec.naming import shown

_KINDS = ("json", "regex", "choice", "json_object")
# Closes every text, so that none matches before its end: where one does, and one that goes on does
# later, the index of outlines-core loses ways between the two.
_END = b"\x00"
_SYMBOLS = set(r"\.+*?()|[]{}^$#&-~")


@dataclasses.dataclass(frozen=True, eq=False)
class Grammar:
    """An automaton over token ids; states are 0 to S - 1, each with transitions in order of ids.

    Attributes:
      first: [S + 1], where each state's transitions begin.
      tokens: [E] ids.
      following: [E] states.
      start: the state before anything is said.
      listed: for each state the ids that it allows, or those that it forbids if they are fewer.
      forbids: [S] bool, which of the two.
    """

    first: np.ndarray
    tokens: np.ndarray
    following: np.ndarray
    start: int
    listed: tuple[np.ndarray, ...]
    forbids: np.ndarray


def pattern_of(asked: Mapping[str, Any] | Any) -> str:
    """The regular expression of a ``structured_outputs``.

    Args:
      asked: {"json": schema, as a dict or text}, {"regex": text}, {"choice": [texts]} or
        {"json_object": True}; or an object with one such attribute, as vLLM's
        ``StructuredOutputsParams``.

    Raises:
      ValueError: it is none of these, or the schema cannot be read.
    """
    if not isinstance(asked, Mapping):
        asked = vars(asked) if hasattr(asked, "__dict__") else {"?": asked}
    given = {key: value for key, value in asked.items() if value not in (None, False)}
    if len(given) != 1 or not given.keys() <= set(_KINDS):
        raise ValueError(
            f"structured_outputs={shown(asked)} must hold one of {', '.join(_KINDS)}; other kinds "
            "are not supported."
        )
    ((kind, value),) = given.items()
    if kind == "regex" and isinstance(value, str) and value:
        return value
    if kind == "choice" and _are_texts(value):
        return "|".join(map(_literally, value))
    if kind == "json_object" and value is True:
        return _of_schema({"type": "object"})
    if kind == "json" and isinstance(value, str | Mapping):
        return _of_schema(value)
    raise ValueError(
        f"structured_outputs={{{kind!r}: {shown(value)}}} must be a schema (json), a text that is "
        "not empty (regex), a list of such texts (choice), or True (json_object)."
    )


def _are_texts(value: Any) -> bool:
    listed = isinstance(value, Sequence) and not isinstance(value, str)
    return listed and len(value) > 0 and all(isinstance(each, str) and each for each in value)


def _literally(text: str) -> str:
    return "".join(f"\\{char}" if char in _SYMBOLS else char for char in text)


def _of_schema(schema: str | Mapping) -> str:
    from outlines_core import json_schema

    try:
        text = schema if isinstance(schema, str) else json.dumps(schema)
        return json_schema.build_regex_from_schema(text)
    except (ValueError, TypeError, OverflowError, RecursionError) as error:
        reason = " ".join(str(error).split())[:300]
        raise ValueError(f"the JSON schema cannot be followed: {reason}") from None


# Some short patterns stand for automata beyond bounds: another process finds out, within bounds.
_PROBE = """
import sys
try:
    import resource
    resource.setrlimit(resource.RLIMIT_AS, (2 << 30, 2 << 30))
except ImportError:
    pass
from outlines_core import Index, Vocabulary
single = Vocabulary(256, {bytes([byte]): [byte] for byte in range(256)})
try:
    print(len(Index(sys.stdin.read(), single).get_transitions()))
except ValueError as error:
    print(" ".join(str(error).split())[:300])
"""
_PROBE_SECONDS, _MOST_STATES = 20, 50_000


def _check_size(pattern: str) -> None:
    """Raises ValueError if a pattern cannot be read, or its automaton is too large to use."""
    try:
        probe = subprocess.run(
            [sys.executable, "-c", _PROBE], input=pattern, capture_output=True, encoding="utf-8",
            timeout=_PROBE_SECONDS, check=False,
        )  # fmt: skip
        found = probe.stdout.strip()
    except subprocess.TimeoutExpired:
        found = ""
    if found and not found.isdigit():
        raise ValueError(f"structured_outputs cannot be compiled: {found}")
    if not found or int(found) > _MOST_STATES:
        size = f"{found} states" if found else "more than memory or time allow"
        raise ValueError(
            f"structured_outputs cannot be compiled: its automaton has {size}, and may have at "
            f"most {_MOST_STATES}; bound what repeats, or make the pattern simpler."
        )


@functools.lru_cache(maxsize=64)
def compiled(pattern: str, tokenizer: Any, ends: frozenset[int], vocab_size: int) -> Grammar:
    """The automaton of texts that match ``pattern`` and then end.

    Such texts hold no NUL character.

    Args:
      pattern: a regular expression over the whole text, in the syntax of Rust's ``regex``.
      tokenizer: whose tokens spell the text.
      ends: tokens that end it, allowed where the pattern is complete.
      vocab_size: V.

    Raises:
      ValueError: there is no token to end with, the pattern cannot be read or stands for too large
        an automaton, or no tokens spell it.
    """
    from outlines_core import Index, Vocabulary

    if not ends:
        raise ValueError(
            "structured_outputs needs a token that ends the text, and the model names none; give "
            "stop_token_ids."
        )
    closed = f"(?:{pattern}){_END.decode()}"
    _check_size(closed)
    spelled = token_bytes(tokenizer, vocab_size, ends)
    spelled = {text: ids for text, ids in spelled.items() if _END not in text}
    complete, eos = vocab_size, vocab_size + 1  # ids that no token has
    try:
        vocabulary = Vocabulary(eos, spelled | {_END: [complete]})
        index = Index(closed, vocabulary)
    except ValueError as error:
        reason = " ".join(str(error).split())[:300]
        raise ValueError(f"structured_outputs cannot be compiled: {reason}") from None
    transitions, final = index.get_transitions(), index.get_final_states()
    number = {state: place for place, state in enumerate(sorted(transitions.keys() - final))}
    ended, rows = len(number), []
    for state in number:
        row = {token: number[to] for token, to in transitions[state].items() if token != complete}
        row |= dict.fromkeys(ends, ended) if complete in transitions[state] else {}
        rows.append(sorted(row.items()))
    rows.append([(token, ended) for token in sorted(ends)])  # where ends are ignored
    first = np.cumsum([0, *map(len, rows)])
    pairs = np.array([pair for row in rows for pair in row], np.int32).reshape(-1, 2)
    forbids = 2 * np.diff(first) > vocab_size
    return Grammar(
        first.astype(np.int32), pairs[:, 0], pairs[:, 1], number[index.get_initial_state()],
        tuple(map(_listed, np.split(pairs[:, 0], first[1:-1]), forbids, repeat(vocab_size))),
        forbids,
    )  # fmt: skip


def _listed(allowed: np.ndarray, forbids: bool, vocab_size: int) -> np.ndarray:
    if not forbids:
        return allowed
    others = np.ones(vocab_size, bool)
    others[allowed] = False
    return np.flatnonzero(others).astype(np.int32)


def token_bytes(
    tokenizer: Any, vocab_size: int, without: frozenset[int] = frozenset()
) -> dict[bytes, list[int]]:
    """The bytes that each token writes, and the ids that write them; special tokens write none."""
    skipped = {*tokenizer.all_special_ids, *without}
    skipped |= {id for id, token in tokenizer.added_tokens_decoder.items() if token.special}
    backend = getattr(tokenizer, "backend_tokenizer", None)
    decoder = None if backend is None else json.loads(backend.to_str())["decoder"]
    spell = _byte_level if "ByteLevel" in json.dumps(decoder) else _with_metaspace
    found: dict[bytes, list[int]] = {}
    for token, id in tokenizer.get_vocab().items():
        if id < vocab_size and id not in skipped and (spelled := spell(token)):
            found.setdefault(spelled, []).append(id)
    return found


@functools.cache
def _alphabet() -> dict[str, int]:
    """GPT-2's printable characters for the 256 bytes."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = (byte for byte in range(256) if byte not in printable)
    return {chr(byte): byte for byte in printable} | {
        chr(256 + place): byte for place, byte in enumerate(others)
    }


def _byte_level(token: str) -> bytes:
    alphabet = _alphabet()
    if all(char in alphabet for char in token):
        return bytes(alphabet[char] for char in token)
    return token.encode()  # a token that was added


def _with_metaspace(token: str) -> bytes:
    if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
        return bytes([int(token[3:5], 16)])
    return token.replace("\u2581", " ").encode()


def joined(grammars: Sequence[Grammar | None], size: int) -> Automaton:
    """The automaton of a batch of ``size`` rows, those without a grammar being free."""
    unique = list(dict.fromkeys(grammar for grammar in grammars if grammar is not None))
    first, tokens, following = [np.zeros(1, np.int32)], [], []
    listed, forbids, begin = [np.empty(0, np.int32)], [True], {}
    states = transitions = 0
    for grammar in unique:
        begin[grammar] = states + 1 + grammar.start
        first.append(grammar.first[:-1] + transitions)
        tokens.append(grammar.tokens)
        following.append(grammar.following + states + 1)
        listed += grammar.listed
        forbids += grammar.forbids.tolist()
        states += grammar.first.size - 1
        transitions += grammar.tokens.size
    rows = np.diff(np.append(np.concatenate(first), transitions))
    lengths = [part.size for part in listed]
    start = [FREE if grammar is None else begin[grammar] for grammar in grammars]
    count = bucket(states + 1)
    grown = lambda parts, length, fill: np.pad(
        np.concatenate(parts), (0, length - sum(map(len, parts))), constant_values=fill
    ).astype(np.int32)
    return Automaton(
        first=grown([*first], count + 1, transitions),
        tokens=grown(tokens, bucket(transitions), -1),
        following=grown(following, bucket(transitions), FREE),
        first_listed=grown([np.cumsum([0, *lengths])], count + 1, sum(lengths)),
        listed=grown(listed, bucket(sum(lengths)), -1),
        forbids=np.pad(np.array(forbids), (0, count - len(forbids))),
        start=np.array(start + [FREE] * (size - len(start)), np.int32),
        longest=bucket(max(lengths), 1),
        steps=bucket(int(rows.max()), 1).bit_length(),
    )

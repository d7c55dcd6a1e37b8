"""Automata over tokens for structured output: regular expressions, choices and JSON schemas.

``outlines-core`` builds them on the host, over the bytes of every token. So a token may end in the
middle of a grammar symbol, and a character may span several tokens.
"""

import dataclasses
import functools
import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jspec.core.token_fsm import FREE, Automaton
from jspec.grammar import schemas
from jspec.util.buckets import bucket
from jspec.util.messages import shown

KINDS = ("json", "regex", "choice", "json_object")
# Ends every text, so that no text matches before its end. Otherwise outlines-core's index drops
# paths between a match and a longer match.
_END = b"\x00"
_SYMBOLS = set(r"\.+*?()|[]{}^$#&-~")


@dataclasses.dataclass(frozen=True, eq=False)
class Grammar:
    """An automaton over token ids with states 0 to S - 1 and E transitions, sorted by token id."""

    first: np.ndarray  # int32 [S + 1], index of each state's first transition
    tokens: np.ndarray  # int32 [E]
    following: np.ndarray  # int32 [E], next states
    start: int
    listed: tuple[np.ndarray, ...]  # ids that each state allows, or forbids if they are fewer
    forbids: np.ndarray  # bool [S], whether ``listed`` holds forbidden ids


def pattern_of(outputs: Mapping[str, Any] | Any) -> str:
    """Return the regular expression of a ``structured_outputs`` setting; raise ValueError.

    It is {"json": schema (dict or text)}, {"regex": text}, {"choice": [texts]} or
    {"json_object": True}, or an object with one such attribute, like vLLM's
    ``StructuredOutputsParams``.
    """
    if not isinstance(outputs, Mapping) and hasattr(outputs, "__dict__"):
        outputs = vars(outputs)
    if not isinstance(outputs, Mapping):
        raise ValueError(
            f"structured_outputs={shown(outputs)} must be a dict with one of {', '.join(KINDS)}."
        )
    kinds = {key: value for key, value in outputs.items() if value not in (None, False)}
    if len(kinds) != 1 or not kinds.keys() <= set(KINDS):
        raise ValueError(
            f"structured_outputs={shown(outputs)} must hold one of {', '.join(KINDS)}; other kinds "
            "are not supported."
        )
    ((kind, value),) = kinds.items()
    is_list = isinstance(value, Sequence) and not isinstance(value, str) and len(value) > 0
    if kind == "regex" and isinstance(value, str) and value:
        return _encodable(value)
    if kind == "choice" and is_list and all(isinstance(text, str) and text for text in value):
        return _encodable("|".join(map(_literally, value)))
    if kind == "json_object" and value is True:
        return _of_schema({"type": "object"})
    if kind == "json" and isinstance(value, str | Mapping):
        return _of_schema(value)
    raise ValueError(
        f"structured_outputs={{{kind!r}: {shown(value)}}} must be a schema (json), a text that is "
        "not empty (regex), a list of such texts (choice), or True (json_object)."
    )


def _encodable(pattern: str) -> str:
    try:
        pattern.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"structured_outputs holds half a character: {error}.") from None
    return pattern


def _literally(text: str) -> str:
    return "".join(f"\\{char}" if char in _SYMBOLS else char for char in text)


def _of_schema(schema: str | Mapping) -> str:
    try:
        text = schema if isinstance(schema, str) else json.dumps(schema)
        schemas.check(text)
        pattern = _pattern_of_schema(_encodable(text))
        if pattern in ("", "()"):
            raise ValueError("it allows nothing")
        return pattern
    except (ValueError, TypeError, KeyError, OverflowError, RecursionError) as error:
        reason = " ".join(str(error).split())[:300]
        raise ValueError(f"the JSON schema cannot be followed: {reason}") from None


# A schema of a hundred levels expands to a pattern beyond memory, and outlines-core then aborts the
# process. So a child process expands it.
_SCHEMA_READER = """
import sys
try:
    import resource
    resource.setrlimit(resource.RLIMIT_AS, (1 << 30,) * 2)
except ImportError:
    pass
from outlines_core import json_schema
try:
    reply = "+" + json_schema.build_regex_from_schema(sys.stdin.buffer.read().decode())
except (ValueError, TypeError, OverflowError) as error:
    reply = "-" + str(error)[:300]
sys.stdout.buffer.write(reply.encode())
"""


@functools.lru_cache(maxsize=64)
def _pattern_of_schema(text: str) -> str:
    reply = _run(_SCHEMA_READER, text.encode()).decode()
    if not reply.startswith("+"):
        raise ValueError(reply[1:] or "it needs more than memory or time allow; nest it less")
    return reply[1:]


def _run(script: str, stdin: bytes) -> bytes:
    """Return the output of a script in a separate process; empty if it times out or dies."""
    options = dict(input=stdin, capture_output=True, timeout=_SECONDS, check=False)
    try:
        return subprocess.run([sys.executable, "-c", script], **options).stdout
    except subprocess.TimeoutExpired:
        return b""


# Some short patterns have huge automata. So a child process builds them within bounds: first over
# single bytes, which is fast, then over the tokens. It prints a line of JSON, then uint32 arrays:
# the number of transitions of each state, their tokens, and their next states.
_COMPILER = """
import json, sys
from array import array
task = json.loads(sys.stdin.buffer.read())
try:
    import resource
    resource.setrlimit(resource.RLIMIT_AS, (task["memory"],) * 2)
except ImportError:
    pass
from outlines_core import Index, Vocabulary

def over(words, eos):
    return Index(task["pattern"], Vocabulary(eos, words))

try:
    states = len(over({bytes([byte]): [byte] for byte in range(256)}, 256).get_transitions())
    if states > task["most_states"]:
        sys.exit(print(json.dumps({"states": states})))
    index = over({text.encode("latin-1"): ids for text, ids in task["words"]}, task["eos"])
except ValueError as error:
    sys.exit(print(json.dumps({"error": " ".join(str(error).split())[:300]})))
rows = index.get_transitions()
if sum(map(len, rows.values())) > task["most_transitions"]:
    sys.exit(print(json.dumps({"transitions": sum(map(len, rows.values()))})))
print(json.dumps({"start": index.get_initial_state(), "states": list(rows),
                  "final": list(index.get_final_states())}), flush=True)
for part in (map(len, rows.values()), (x for row in rows.values() for x in row),
             (x for row in rows.values() for x in row.values())):
    array("I", part).tofile(sys.stdout.buffer)
"""
_SECONDS, _MEMORY = 60, 6 << 30
_MOST_STATES, _MOST_TRANSITIONS = 50_000, 1 << 24


def _index(pattern: str, words: Mapping[bytes, list[int]], eos: int) -> tuple[dict, np.ndarray]:
    """Return the automaton of a pattern over tokens, in the format of ``_COMPILER``."""
    task = {"pattern": pattern, "eos": eos, "memory": _MEMORY, "most_states": _MOST_STATES}
    task["most_transitions"] = _MOST_TRANSITIONS
    task["words"] = [(text.decode("latin-1"), ids) for text, ids in words.items()]
    line, _, arrays = _run(_COMPILER, json.dumps(task).encode()).partition(b"\n")
    header = json.loads(line) if line else {}
    if "error" in header:
        raise ValueError(f"structured_outputs cannot be compiled: {header['error']}")
    if "start" not in header:
        counted = [f"{count} {what}" for what, count in header.items()]
        raise ValueError(
            "structured_outputs cannot be compiled: its automaton has "
            f"{counted[0] if counted else 'more than memory or time allow'}, and may have at most "
            f"{_MOST_STATES} states and {_MOST_TRANSITIONS} transitions; bound repetitions, or "
            "simplify the pattern."
        )
    return header, np.frombuffer(arrays, np.uint32)


@functools.lru_cache(maxsize=64)
def compiled(pattern: str, tokenizer: Any, ends: frozenset[int], vocab_size: int) -> Grammar:
    """Return the automaton of the texts without NUL that match ``pattern`` and then end.

    ``pattern`` is in the syntax of Rust's ``regex``; ``ends`` are allowed after a full match.

    Raises:
      ValueError: there is no token to end with, the pattern is invalid, no tokens spell it, or its
        automaton is too large.
    """
    ends = frozenset(token for token in ends if token < vocab_size)  # others are never sampled
    if not ends:
        raise ValueError(
            "structured_outputs needs a token that ends the text, and the model names none; give "
            "stop_token_ids."
        )
    spelled = token_bytes(tokenizer, vocab_size, ends)
    spelled = {text: ids for text, ids in spelled.items() if _END not in text}
    complete, eos = vocab_size, vocab_size + 1  # unused ids
    header, arrays = _index(f"(?:{pattern}){_END.decode()}", spelled | {_END: [complete]}, eos)
    return _over_tokens(header, arrays, complete, np.array(sorted(ends)), vocab_size)


def _over_tokens(
    header: dict, arrays: np.ndarray, complete: int, ends: np.ndarray, vocab_size: int
) -> Grammar:
    """Return the grammar of the output of ``_COMPILER``, with states numbered from 0.

    A text is complete if ``complete`` leads to a final state. Elsewhere ``complete`` is a NUL
    inside the text, which ``.`` and ``[^a]`` match.
    """
    states = np.array(header["states"], np.int64)
    counts, (tokens, following) = arrays[: len(states)], arrays[len(states) :].reshape(2, -1)
    owner = np.repeat(states, counts)
    final = np.array(header["final"], np.int64)
    number = np.sort(states[~np.isin(states, final)])
    end_state = len(number)
    closes = owner[(tokens == complete) & np.isin(following, final)]
    closes = np.searchsorted(number, np.unique(closes[~np.isin(closes, final)]))
    inner = (tokens < complete) & ~np.isin(owner, final)
    closes = np.append(closes, end_state)  # for requests that ignore end tokens
    to_end = np.full(len(ends) * len(closes), end_state)
    parts = (
        np.append(np.searchsorted(number, owner[inner]), np.repeat(closes, len(ends))),
        np.append(tokens[inner], np.tile(ends, len(closes))),
        np.append(np.searchsorted(number, following[inner]), to_end),
    )
    order = np.lexsort(parts[1::-1])
    owner, tokens, following = (part[order].astype(np.int32) for part in parts)
    first = np.searchsorted(owner, np.arange(end_state + 2)).astype(np.int32)
    forbids = 2 * np.diff(first) > vocab_size
    start = int(np.searchsorted(number, header["start"]))
    vocabulary = np.arange(vocab_size, dtype=np.int32)
    listed = tuple(
        vocabulary[~np.isin(vocabulary, allowed)] if most else allowed
        for allowed, most in zip(np.split(tokens, first[1:-1]), forbids, strict=True)
    )
    return Grammar(first, tokens, following, start, listed, forbids)


def token_bytes(
    tokenizer: Any, vocab_size: int, without: frozenset[int] = frozenset()
) -> dict[bytes, list[int]]:
    """Return the ids of the tokens that spell each byte string, without special tokens."""
    skipped = {*tokenizer.all_special_ids, *without}
    skipped |= {id for id, token in tokenizer.added_tokens_decoder.items() if token.special}
    backend = getattr(tokenizer, "backend_tokenizer", None)
    decoder = None if backend is None else json.loads(backend.to_str())["decoder"]
    spell = _byte_level if "ByteLevel" in json.dumps(decoder) else _with_metaspace
    ids_of: dict[bytes, list[int]] = {}
    for token, id in tokenizer.get_vocab().items():
        if id < vocab_size and id not in skipped and (spelled := spell(token)):
            ids_of.setdefault(spelled, []).append(id)
    return ids_of


@functools.cache
def _alphabet() -> dict[str, int]:
    """Return GPT-2's map from 256 printable characters to bytes."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    chars = [*printable, *range(256, 256 + len(others))]
    return dict(zip(map(chr, chars), [*printable, *others], strict=True))


def _byte_level(token: str) -> bytes:
    alphabet = _alphabet()
    if all(char in alphabet for char in token):
        return bytes(alphabet[char] for char in token)
    return token.encode()  # an added token


def _with_metaspace(token: str) -> bytes:
    if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
        return bytes([int(token[3:5], 16)])
    return token.replace("\u2581", " ").encode()


def joined(grammars: Sequence[Grammar | None], size: int) -> Automaton:
    """Return the automaton of a batch of ``size`` rows; rows without a grammar are free."""
    unique = list(dict.fromkeys(grammar for grammar in grammars if grammar is not None))
    none = np.empty(0, np.int32)
    first, tokens, following = [np.zeros(1, np.int32)], [none], [none]
    listed, forbids, begin = [none], [True], {}
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

    def padded(parts: list[np.ndarray], length: int, fill: int) -> np.ndarray:
        values = np.concatenate(parts).astype(np.int32)
        return np.pad(values, (0, length - len(values)), constant_values=fill)

    return Automaton(
        first=padded(first, count + 1, transitions),
        tokens=padded(tokens, bucket(transitions), -1),
        following=padded(following, bucket(transitions), FREE),
        first_listed=padded([np.cumsum([0, *lengths])], count + 1, sum(lengths)),
        listed=padded(listed, bucket(sum(lengths)), -1),
        forbids=np.pad(np.array(forbids), (0, count - len(forbids))),
        start=np.array(start + [FREE] * (size - len(start)), np.int32),
        longest=bucket(max(lengths), 1),
        steps=bucket(int(rows.max()), 1).bit_length(),
    )

"""Automata over tokens for structured output: regular expressions, choices and JSON schemas.

``outlines-core`` builds them on the host, over the bytes of every token. So a token may end in the
middle of a grammar symbol, and a character may span several tokens.
"""

import dataclasses
import functools
import json
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from jspec.core import token_fsm
from jspec.core.token_fsm import FREE, Automaton
from jspec.grammar import schemas
from jspec.util.buckets import bucket
from jspec.util.messages import shown

KINDS = ("json", "regex", "choice", "json_object", "grammar", "structural_tag")
AUTOMATIC = frozenset(KINDS[:4])  # of which automata are made
# Ends every text, so that no text matches before its end. Otherwise outlines-core's index drops
# paths between a match and a longer match. It begins every text too: the library also builds the
# automaton of a search, in which a match may begin at every quote inside a string.
_END = b"\x00"
_SYMBOLS = set(r"\.+*?()|[]{}^$#&-~")


# Of a device's automaton: widths of its states, transitions and listed tokens, of the longest list,
# and the steps of a search.
Sizes = tuple[int, int, int, int, int]


@dataclasses.dataclass(frozen=True, eq=False)
class Grammar:
    """An automaton over token ids with states 0 to S - 1 and E transitions, sorted by token id."""

    first: np.ndarray  # int32 [S + 1], index of each state's first transition
    tokens: np.ndarray  # int32 [E]
    following: np.ndarray  # int32 [E], next states
    start: int
    listed: tuple[np.ndarray, ...]  # ids that each state allows, or forbids if they are fewer
    forbids: np.ndarray  # bool [S], whether ``listed`` holds forbidden ids

    @functools.cached_property
    def sizes(self) -> Sizes:
        """The sizes of the device's automaton if this is the only grammar."""
        longest = max((part.size for part in self.listed), default=0)
        counts = self.first.size - 1, self.tokens.size, sum(part.size for part in self.listed)
        return _sizes(*counts, longest, int(np.diff(self.first).max(initial=0)))


def setting_of(outputs: Mapping[str, Any] | Any) -> dict[str, Any]:
    """Return a ``structured_outputs`` setting as a dict of one key; raise ValueError.

    It is {"json": schema (dict or text)}, {"regex": text}, {"choice": [texts]},
    {"json_object": True}, {"grammar": EBNF or Lark} or {"structural_tag": JSON}, or an object with
    one such attribute, like vLLM's ``StructuredOutputsParams``.
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
    if not _FORMS[kind](value):
        raise ValueError(
            f"structured_outputs={{{kind!r}: {shown(value)}}} must be a schema (json), a text that "
            "is not empty (regex, grammar), a list of such texts (choice), True (json_object), or "
            "JSON (structural_tag)."
        )
    return kinds


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and value != ""


def _are_texts(value: Any) -> bool:
    is_list = isinstance(value, Sequence) and not isinstance(value, str)
    return is_list and len(value) > 0 and all(map(_is_text, value))


_FORMS: dict[str, Callable[[Any], bool]] = {
    "json": lambda value: isinstance(value, str | Mapping),
    "regex": _is_text,
    "choice": _are_texts,
    "json_object": lambda value: value is True,
    "grammar": _is_text,
    "structural_tag": lambda value: isinstance(value, str | Mapping),
}


def pattern_of(outputs: Mapping[str, Any] | Any) -> str:
    """Return the regular expression of a setting of ``AUTOMATIC``, as of ``setting_of``.

    Raises:
      ValueError: it is malformed, or no regular expression describes it.
    """
    ((kind, value),) = setting_of(outputs).items()
    if kind == "regex":
        return _encodable(value)
    if kind == "choice":
        return _encodable("|".join(map(_literally, value)))
    return _of_schema({"type": "object"} if kind == "json_object" else value)


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
        parsed = json.loads(schema) if isinstance(schema, str) else schema
        schemas.check(parsed)
        pattern = _pattern_of_schema(_encodable(json.dumps(schemas.spelled(parsed))))
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


# Some short patterns have huge automata. So a child process builds them within bounds, over single
# bytes. It prints a line of JSON, then uint32 arrays: the number of transitions of each state,
# their bytes, and their next states.
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

try:
    index = Index(task["pattern"], Vocabulary(256, {bytes([byte]): [byte] for byte in range(256)}))
except ValueError as error:
    sys.exit(print(json.dumps({"error": " ".join(str(error).split())[:300]})))
rows = index.get_transitions()
if len(rows) > task["most_states"]:
    sys.exit(print(json.dumps({"states": len(rows)})))
print(json.dumps({"start": index.get_initial_state(), "states": list(rows),
                  "final": list(index.get_final_states())}), flush=True)
for part in (map(len, rows.values()), (x for row in rows.values() for x in row),
             (x for row in rows.values() for x in row.values())):
    array("I", part).tofile(sys.stdout.buffer)
"""
_SECONDS, _MEMORY = 60, 6 << 30
_MOST_STATES, _MOST_TRANSITIONS = 50_000, 1 << 24
_CHUNK = 1 << 22  # pairs of a state and a token that are walked together
_DEAD = -1


def _over_bytes(pattern: str) -> tuple[np.ndarray, int]:
    """Return the automaton of a pattern over bytes, int32 [S, 256] next states, and its start.

    ``_DEAD`` is no next state. The byte ``_END`` leads from complete texts to ``S``.
    """
    ended = f"{_END.decode()}(?:{pattern}){_END.decode()}"
    task = {"pattern": ended, "memory": _MEMORY, "most_states": _MOST_STATES}
    line, _, arrays = _run(_COMPILER, json.dumps(task).encode()).partition(b"\n")
    header = json.loads(line) if line else {}
    if "error" in header:
        raise ValueError(f"structured_outputs cannot be compiled: {header['error']}")
    if "start" not in header:
        raise _too_large(
            f"{header['states']} states" if header else "more than memory or time allow"
        )
    states = np.array(header["states"], np.int64)
    numbers = np.frombuffer(arrays, np.uint32)
    counts, (read, following) = numbers[: len(states)], numbers[len(states) :].reshape(2, -1)
    final = np.array(header["final"], np.int64)
    known = np.sort(states[~np.isin(states, final)])
    number = lambda ids: np.where(np.isin(ids, final), len(known), np.searchsorted(known, ids))
    owner = np.repeat(states, counts)
    inner = ~np.isin(owner, final) & (read < 256)
    table = np.full((len(known), 256), _DEAD, np.int32)
    table[number(owner[inner]), read[inner]] = number(following[inner])
    start = int(table[number(np.array([header["start"]]))[0], _END[0]])
    # Elsewhere than at the ends, the pattern's "." and "[^a]" match NUL too.
    table[:, _END[0]] = np.where(table[:, _END[0]] == len(known), len(known), _DEAD)
    return table, start


def _too_large(counted: str) -> ValueError:
    return ValueError(
        f"structured_outputs cannot be compiled: its automaton has {counted}, and may have at most "
        f"{_MOST_STATES} states and {_MOST_TRANSITIONS} transitions; bound repetitions, or "
        "simplify the pattern."
    )


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
    words = _Words.of({text: ids for text, ids in spelled.items() if _END not in text})
    table, start = _over_bytes(pattern)
    closes = table[:, _END[0]] == len(table)
    owner, tokens, following = _transitions(table, start, words)
    live = _leading_to(closes, owner, following)
    if not live[start]:
        raise ValueError(
            "structured_outputs cannot be compiled: no tokens of the vocabulary spell a text that "
            "matches."
        )
    both = live[owner] & live[following]
    edges = owner[both], tokens[both], following[both]
    return _numbered(*edges, live, closes & live, start, np.array(sorted(ends)), vocab_size)


@dataclasses.dataclass(frozen=True)
class _Words:
    """Byte strings of the vocabulary, W of them: padded uint8 [W, L], lengths, and their ids."""

    padded: np.ndarray
    lengths: np.ndarray
    ids: list[list[int]]

    @classmethod
    def of(cls, spelled: Mapping[bytes, list[int]]) -> "_Words":
        texts = sorted(spelled)
        lengths = np.array([len(text) for text in texts], np.int64)
        padded = np.zeros((len(texts), lengths.max(initial=1)), np.uint8)
        for row, text in zip(padded, texts, strict=True):
            row[: len(text)] = np.frombuffer(text, np.uint8)
        return cls(padded, lengths, [spelled[text] for text in texts])


def _transitions(
    table: np.ndarray, start: int, words: _Words
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return (state, token, next state) of every token in every state that tokens reach."""
    reached, frontier = np.zeros(len(table) + 1, bool), np.array([start])
    reached[start] = True
    parts, total = [], 0
    while len(frontier):
        chunk, rest = np.split(frontier, [max(_CHUNK // len(words.lengths), 1)])
        owner, word, following = _walk(table, chunk, words)
        parts.append((owner, word, following))
        total += len(owner)
        if total > _MOST_TRANSITIONS:
            raise _too_large(f"more than {_MOST_TRANSITIONS} transitions")
        new = np.unique(following)
        new = new[~reached[new]]
        reached[new] = True
        frontier = np.append(rest, new)
    owner, word, following = (np.concatenate(part) for part in zip(*parts, strict=True))
    counts = np.array([len(ids) for ids in words.ids])[word]
    tokens = np.array([id for ids in words.ids for id in ids])
    offsets = np.cumsum([0, *map(len, words.ids)])[word]
    within = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    spread = lambda values: np.repeat(values, counts)
    return spread(owner), tokens[spread(offsets) + within], spread(following)


def _walk(
    table: np.ndarray, states: np.ndarray, words: _Words
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return (state, word, next state) of the words that each of ``states`` can read whole."""
    owner = np.repeat(states, len(words.lengths))
    word = np.tile(np.arange(len(words.lengths)), len(states))
    now, results = owner, []
    for position in range(words.padded.shape[1]):
        now = table[now, words.padded[word, position]]
        alive = now != _DEAD
        owner, word, now = owner[alive], word[alive], now[alive]
        ends = words.lengths[word] == position + 1
        results.append((owner[ends], word[ends], now[ends]))
        owner, word, now = owner[~ends], word[~ends], now[~ends]
        if not len(owner):
            break
    return tuple(np.concatenate(part) for part in zip(*results, strict=True))


def _leading_to(closes: np.ndarray, owner: np.ndarray, following: np.ndarray) -> np.ndarray:
    """Return the states from which tokens lead to one that closes: bool [S]."""
    edges = np.divmod(np.unique(owner.astype(np.int64) * len(closes) + following), len(closes))
    live = closes.copy()
    while True:
        more = live.copy()
        more[edges[0][live[edges[1]]]] = True
        if (more == live).all():
            return live
        live = more


def _numbered(
    owner: np.ndarray,
    tokens: np.ndarray,
    following: np.ndarray,
    live: np.ndarray,
    closes: np.ndarray,
    start: int,
    ends: np.ndarray,
    vocab_size: int,
) -> Grammar:
    """Return the grammar of transitions between live states, which are numbered from 0.

    The last state is that after the end, for requests that ignore end tokens.
    """
    number = np.cumsum(live) - 1
    end_state = int(live.sum())
    closing = np.append(number[closes], end_state)
    to_end = np.full(len(ends) * len(closing), end_state)
    parts = (
        np.append(number[owner], np.repeat(closing, len(ends))),
        np.append(tokens, np.tile(ends, len(closing))),
        np.append(number[following], to_end),
    )
    order = np.lexsort(parts[1::-1])
    owner, tokens, following = (part[order].astype(np.int32) for part in parts)
    first = np.searchsorted(owner, np.arange(end_state + 2)).astype(np.int32)
    forbids = 2 * np.diff(first) > vocab_size
    vocabulary = np.arange(vocab_size, dtype=np.int32)
    listed = tuple(
        np.delete(vocabulary, allowed) if most else allowed
        for allowed, most in zip(np.split(tokens, first[1:-1]), forbids, strict=True)
    )
    return Grammar(first, tokens, following, int(number[start]), listed, forbids)


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


def joined(
    grammars: Sequence[Grammar | None],
    known: Sequence[Grammar] = (),
    generated: Sequence[Sequence[int]] = (),
    least: Sizes | None = None,
) -> Automaton:
    """Return the automaton of a batch, of the sizes ``least`` or above; other rows are free.

    The states of ``known`` grammars come first, in this order: a batch that knows the same ones
    numbers them alike. The first rows start behind the tokens that they have ``generated``.
    """
    unique = tuple(dict.fromkeys((*known, *(each for each in grammars if each is not None))))
    automaton, begin = _united(unique, least)
    start = [FREE if grammar is None else begin[grammar] for grammar in grammars]
    for row, tokens in enumerate(generated):
        start[row] = _after(automaton, start[row], tokens)
    return automaton.replace(start=np.array(start, np.int32))


def _after(automaton: Automaton, state: int, tokens: Sequence[int]) -> int:
    """Return the state after tokens, on the host."""
    for token in tokens:
        if state == FREE:
            break
        begin, end = automaton.first[state : state + 2]
        index = begin + np.searchsorted(automaton.tokens[begin:end], token)
        is_allowed = index < end and automaton.tokens[index] == token
        state = int(automaton.following[index]) if is_allowed else FREE
    return state


@functools.lru_cache(maxsize=8)
def _united(
    grammars: tuple[Grammar, ...], least: Sizes | None
) -> tuple[Automaton, dict[Grammar, int]]:
    """Return the automaton of different grammars, without rows, and their first states."""
    none = np.empty(0, np.int32)
    first, tokens, following = [np.zeros(1, np.int32)], [none], [none]
    listed, forbids, begin = [none], [True], {}
    states = transitions = 0
    for grammar in grammars:
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
    sizes = _sizes(states, transitions, sum(lengths), max(lengths), int(rows.max()))
    count, size, total, longest, steps = sizes if least is None else map(max, sizes, least)

    def padded(parts: list[np.ndarray], length: int, fill: int) -> np.ndarray:
        values = np.concatenate(parts).astype(np.int32)
        return np.pad(values, (0, length - len(values)), constant_values=fill)

    automaton = Automaton(
        first=padded(first, count + 1, transitions),
        tokens=padded(tokens, size, -1),
        following=padded(following, size, FREE),
        first_listed=padded([np.cumsum([0, *lengths])], count + 1, sum(lengths)),
        listed=padded(listed, total, -1),
        forbids=np.pad(np.array(forbids), (0, count - len(forbids))),
        start=none,
        longest=longest,
        steps=steps,
    )
    return automaton, begin


def _sizes(states: int, transitions: int, listed: int, longest: int, most: int) -> Sizes:
    """Return coarse widths, so that most grammars of a vocabulary share their programs."""
    width = functools.partial(bucket, factor=4)
    widths = width(states + 1), width(transitions), width(listed), width(longest, 1)
    return *widths, token_fsm.num_steps(most)

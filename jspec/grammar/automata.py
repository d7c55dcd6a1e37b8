"""Automata over tokens for structured output: regular expressions, choices and JSON schemas.

``outlines-core`` builds them on the host, over the bytes of every token. So a token may end in the
middle of a grammar symbol, and a character may span several tokens.
"""

import contextlib
import dataclasses
import functools
import itertools
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from jspec.core import token_fsm
from jspec.core.token_fsm import FREE, Automaton
from jspec.grammar import limits, sources, workers
from jspec.grammar.tables import Most, Vocabulary
from jspec.util.messages import shown
from jspec.util.results import Results
from jspec.util.values import bucket

KINDS = ("json", "regex", "choice", "json_object", "grammar", "structural_tag")
AUTOMATIC = frozenset(KINDS[:4])  # kinds that become automata
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

    @classmethod
    def of(cls, arrays: Mapping[str, np.ndarray]) -> "Grammar":
        """Return the grammar of the arrays of ``tables.compiled``."""
        listed = np.split(arrays["listed"], np.cumsum(arrays["lengths"])[:-1])
        return cls(
            first=arrays["first"],
            tokens=arrays["tokens"],
            following=arrays["following"],
            start=int(arrays["start"][0]),
            listed=tuple(listed),
            forbids=arrays["forbids"],
        )

    @property
    def nbytes(self) -> int:
        """Bytes of memory, with those of the objects of the lists."""
        arrays = self.first.nbytes + self.tokens.nbytes + self.following.nbytes
        return arrays + sum(part.nbytes + 128 for part in self.listed)

    @functools.cached_property
    def counts(self) -> Sizes:
        """The numbers of states, transitions and listed tokens, the longest list and state."""
        lengths = [part.size for part in self.listed]
        longest, most = max(lengths, default=0), int(np.diff(self.first).max(initial=0))
        return self.first.size - 1, self.tokens.size, sum(lengths), longest, most


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
    limits.check(kind, value)
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
    vocabulary = vocabulary_of(tokenizer, ends, vocab_size)

    most = Most(limits.MOST_STATES, limits.MOST_TRANSITIONS)

    def make(is_read: Callable[[], bool]) -> Grammar:
        try:
            _, arrays = workers.run(
                "compiled",
                is_read,
                vocabulary=vocabulary,
                pattern=pattern,
                most=dataclasses.astuple(most),
            )
        except MemoryError:
            raise most.exceeded("more than memory or time allow") from None
        return Grammar.of(arrays)

    with _in_time():
        key = pattern, tokenizer, ends, vocab_size, most
        return _COMPILED.get(key, make, lambda grammar: grammar.nbytes)


_MOST_BYTES = 512 << 20  # bytes of the cached automata; one of the largest takes 200 MB
_COMPILED, _PATTERNS = Results(_MOST_BYTES), Results(32 << 20)


@contextlib.contextmanager
def _in_time() -> Iterator[None]:
    try:
        yield
    except TimeoutError as error:
        raise ValueError(f"structured_outputs cannot be compiled now: {error}.") from None


def _of_schema(schema: str | Mapping) -> str:
    """Return the pattern of a JSON schema; a child process expands it."""
    refused = "the JSON schema cannot be followed"
    try:
        text = _encodable(sources.text_of(schema))
    except (ValueError, TypeError, RecursionError) as error:
        reason = " ".join(str(error).split())[:300]
        raise ValueError(f"{refused}: {reason}") from None

    def make(is_read: Callable[[], bool]) -> str:
        try:
            return workers.run("pattern", is_read, schema=text)[0]
        except MemoryError:
            raise ValueError(
                f"{refused}: it needs more than memory or time allow; nest it less"
            ) from None

    with _in_time():
        return _PATTERNS.get(text, make, lambda pattern: len(text) + len(pattern))


@functools.lru_cache(maxsize=4)
def vocabulary_of(tokenizer: Any, ends: frozenset[int], vocab_size: int) -> Vocabulary:
    """Return the vocabulary of a tokenizer, for a child process."""
    return Vocabulary.of(token_bytes(tokenizer, vocab_size, ends), ends, vocab_size)


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
    first: Sequence[Grammar] = (),
    generated: Sequence[Sequence[int]] = (),
    least: Sizes | None = None,
) -> Automaton:
    """Return the automaton of a batch, of the sizes ``least`` or above; other rows are free.

    The states of the grammars ``first`` come first, in this order. Pass those of the last batch, so
    that their states keep their numbers. The first rows start behind the tokens that they have
    ``generated``.
    """
    unique = tuple(dict.fromkeys((*first, *(each for each in grammars if each is not None))))
    automaton, begin = _united(unique, least)
    start = [FREE if grammar is None else begin[grammar] for grammar in grammars]
    for row, tokens in enumerate(generated):
        start[row] = _after(automaton, start[row], tokens)
    return automaton.replace(start=np.array(start, np.int32))


def sizes_of(grammars: Iterable[Grammar]) -> Sizes:
    """Return the sizes of the automaton of different grammars."""
    counts = list(zip(*(grammar.counts for grammar in grammars), strict=True))
    return _sizes(*map(sum, counts[:3]), *map(max, counts[3:]))


def first_states(grammars: Sequence[Grammar]) -> dict[Grammar, int]:
    """Return the number of each grammar's state 0 in the automaton of different grammars."""
    ends = itertools.accumulate((each.counts[0] for each in grammars), initial=FREE + 1)
    return dict(zip(grammars, ends, strict=False))


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

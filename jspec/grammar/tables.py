"""The work of compiling a pattern to an automaton over tokens, for a child process: no JAX.

``outlines-core`` builds the automaton over bytes, and the words of the vocabulary are walked over
it. So a token may end in the middle of a grammar symbol, and a character may span several tokens.
"""

import dataclasses
from array import array
from collections.abc import Mapping

import numpy as np
import outlines_core

# Ends every text, so that no text matches before its end. Otherwise outlines-core's index drops
# paths between a match and a longer match. It begins every text too: the library also builds the
# automaton of a search, in which a match may begin at every quote inside a string.
_END = b"\x00"
_CHUNK = 1 << 22  # pairs of a state and a token that are walked together
_DEAD = -1


@dataclasses.dataclass(frozen=True, eq=False)
class Vocabulary:
    """The byte strings that tokens spell, W of them."""

    text: np.ndarray  # uint8, all of them one after another
    lengths: np.ndarray  # int32 [W]
    counts: np.ndarray  # int32 [W], the number of tokens that spell each
    ids: np.ndarray  # int32, the tokens of the first, of the second, ...
    ends: np.ndarray  # int32, tokens that end a text
    size: int

    @classmethod
    def of(cls, ids_of: Mapping[bytes, list[int]], ends: frozenset[int], size: int) -> "Vocabulary":
        """Return the vocabulary of the ids that spell each byte string."""
        texts = sorted(ids_of)
        return cls(
            text=np.frombuffer(b"".join(texts), np.uint8),
            lengths=np.array([len(text) for text in texts], np.int32),
            counts=np.array([len(ids_of[text]) for text in texts], np.int32),
            ids=np.array([id for text in texts for id in ids_of[text]], np.int32),
            ends=np.array(sorted(ends), np.int32),
            size=size,
        )


@dataclasses.dataclass(frozen=True)
class Most:
    """The largest automaton."""

    states: int
    transitions: int

    def exceeded(self, counted: str) -> ValueError:
        """Return the error of an automaton that is not built."""
        return ValueError(
            f"structured_outputs cannot be compiled: its automaton has {counted}, and may have at "
            f"most {self.states} states and {self.transitions} transitions; bound repetitions, or "
            "simplify the pattern."
        )


def compiled(pattern: str, vocabulary: Vocabulary, most: Most) -> dict[str, np.ndarray]:
    """Return the arrays of ``automata.Grammar`` for a pattern.

    Raises:
      ValueError: the pattern is invalid, no tokens spell it, or its automaton is too large.
    """
    words = _Words.of(vocabulary)
    table, start = _over_bytes(pattern, most)
    closes = table[:, _END[0]] == len(table)
    owner, tokens, following = _transitions(table, start, words, most)
    live = _leading_to(closes, owner, following)
    if not live[start]:
        raise ValueError(
            "structured_outputs cannot be compiled: no tokens of the vocabulary spell a text that "
            "matches."
        )
    both = live[owner] & live[following]
    return _numbered(
        owner[both],
        tokens[both],
        following[both],
        live,
        closes & live,
        start,
        vocabulary.ends,
        vocabulary.size,
    )


def _over_bytes(pattern: str, most: Most) -> tuple[np.ndarray, int]:
    """Return the automaton of a pattern over bytes, int32 [S, 256] next states, and its start.

    ``_DEAD`` is no next state. The byte ``_END`` leads from complete texts to ``S``.
    """
    bytes_alone = outlines_core.Vocabulary(256, {bytes([byte]): [byte] for byte in range(256)})
    try:
        index = outlines_core.Index(f"{_END.decode()}(?:{pattern}){_END.decode()}", bytes_alone)
    except ValueError as error:
        reason = " ".join(str(error).split())[:300]
        raise ValueError(f"structured_outputs cannot be compiled: {reason}") from None
    rows = index.get_transitions()
    if len(rows) > most.states:
        raise most.exceeded(f"{len(rows)} states")
    numbers = lambda values: np.array(array("I", values), np.int64)
    states, counts = numbers(rows), numbers(map(len, rows.values()))
    read = numbers(byte for row in rows.values() for byte in row)
    following = numbers(state for row in rows.values() for state in row.values())
    final = np.array(list(index.get_final_states()), np.int64)
    inner_states = np.sort(states[~np.isin(states, final)])
    size = len(inner_states)
    number = lambda ids: np.where(np.isin(ids, final), size, np.searchsorted(inner_states, ids))
    owner = np.repeat(states, counts)
    inner = ~np.isin(owner, final) & (read < 256)
    table = np.full((size, 256), _DEAD, np.int32)
    table[number(owner[inner]), read[inner]] = number(following[inner])
    start = int(table[number(np.array([index.get_initial_state()]))[0], _END[0]])
    # Elsewhere than at the ends, the pattern's "." and "[^a]" match NUL too.
    table[:, _END[0]] = np.where(table[:, _END[0]] == size, size, _DEAD)
    return table, start


@dataclasses.dataclass(frozen=True)
class _Words:
    """Byte strings of the vocabulary, W of them: padded uint8 [W, L], lengths, and their ids."""

    padded: np.ndarray
    lengths: np.ndarray
    ids: np.ndarray
    counts: np.ndarray  # number of ids of each word

    @classmethod
    def of(cls, vocabulary: Vocabulary) -> "_Words":
        """Return the words without ``_END``."""
        lengths = vocabulary.lengths
        padded = np.zeros((len(lengths), lengths.max(initial=1)), np.uint8)
        inside = np.arange(padded.shape[1]) < lengths[:, None]
        padded[inside] = vocabulary.text
        has_no_end = ~((padded == _END[0]) & inside).any(1)
        ids = vocabulary.ids[np.repeat(has_no_end, vocabulary.counts)]
        return cls(
            padded[has_no_end],
            lengths[has_no_end].astype(np.int64),
            ids,
            vocabulary.counts[has_no_end].astype(np.int64),
        )


def _transitions(
    table: np.ndarray, start: int, words: _Words, most: Most
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return (state, token, next state) of every token in every state that tokens reach."""
    reached, frontier = np.zeros(len(table) + 1, bool), np.array([start])
    reached[start] = True
    parts, total = [], 0
    while len(frontier):
        chunk, rest = np.split(frontier, [max(_CHUNK // max(len(words.lengths), 1), 1)])
        owner, word, following = _walk(table, chunk, words)
        parts.append((owner, word, following))
        total += len(owner)
        if total > most.transitions:
            raise most.exceeded(f"more than {most.transitions} transitions")
        new = np.unique(following)
        new = new[~reached[new]]
        reached[new] = True
        frontier = np.append(rest, new)
    owner, word, following = (np.concatenate(part) for part in zip(*parts, strict=True))
    counts = words.counts[word]
    offsets = (np.cumsum(words.counts) - words.counts)[word]
    within = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    spread = lambda values: np.repeat(values, counts)
    return spread(owner), words.ids[spread(offsets) + within], spread(following)


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
) -> dict[str, np.ndarray]:
    """Return the arrays of a grammar of transitions between live states, numbered from 0.

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
    listed = [
        np.delete(vocabulary, allowed) if most else allowed
        for allowed, most in zip(np.split(tokens, first[1:-1]), forbids, strict=True)
    ]
    return {
        "first": first,
        "tokens": tokens,
        "following": following,
        "start": number[[start]].astype(np.int32),
        "listed": np.concatenate(listed),
        "lengths": np.array([part.size for part in listed], np.int32),
        "forbids": forbids,
    }

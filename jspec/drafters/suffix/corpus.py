"""The texts of suffix decoding on the device: every row's own, and the responses of the past.

    tokens    .. | -1 a b c a b | -1 b c d | ..     a request is its response behind a separator
    starts            ^            ^                where requests begin; the oldest goes first

Past responses stand in a ring. Their places count all tokens ever stored.
"""

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import lax

from jspec.core.types import Array, History
from jspec.drafters.suffix import index as suffix_index
from jspec.drafters.suffix.growth import NOTHING, Occurrences
from jspec.drafters.suffix.index import BEFORE, Index

_CHUNK = 32  # tokens taken in at once


@struct.dataclass
class OwnText:
    """Every row's index of its own history, prompt included."""

    index: Index  # of each row: [B, G, C] arrays
    joined: Array  # [B] int32, places that are in the index: 1 to ``joined``


@struct.dataclass
class Corpus:
    """Responses of the latest requests, C slots in a ring. No batch axis."""

    tokens: Array  # [C] int32, NOTHING in front of every request
    index: Index
    starts: Array  # [R] int32, separators; request i stands at i % R
    oldest: Array  # [] int32, number of the oldest request that is kept
    newest: Array  # [] int32, number of the next request
    end: Array  # [] int32, tokens ever stored, separators included
    max_tokens: int = struct.field(pytree_node=False)  # kept at most, at most C

    @property
    def begin(self) -> Array:
        """The separator of the oldest request."""
        start = self.starts[self.oldest % self.starts.shape[0]]
        return jnp.where(self.oldest == self.newest, self.end, start)

    def at(self, place: Array) -> Array:
        """The tokens at ``place``; NOTHING at the end."""
        return jnp.where(
            self.end - place > 0, self.tokens[place & (self.tokens.shape[0] - 1)], NOTHING
        )


def no_texts(batch: int, capacity: int, groups: tuple[int, ...]) -> OwnText:
    """Indices for ``batch`` rows of up to ``capacity`` tokens, nothing in them."""
    one = suffix_index.empty(capacity, groups)
    index = jax.tree.map(lambda x: jnp.zeros((batch, *x.shape), x.dtype), one)
    return OwnText(index, jnp.zeros((batch,), jnp.int32))


def no_responses(max_requests: int, max_tokens: int, groups: tuple[int, ...]) -> Corpus:
    """A corpus without requests.

    Args:
      max_requests: kept at most.
      max_tokens: kept at most, a separator for each request included.
      groups: match lengths at which places are looked up, ascending.
    """
    index = suffix_index.empty(max_tokens, groups)
    none = lambda: jnp.zeros((), jnp.int32)
    tokens = jnp.full(index.near.shape[1:], NOTHING, jnp.int32)
    starts = jnp.zeros((max_requests,), jnp.int32)
    return Corpus(tokens, index, starts, none(), none(), none(), max_tokens)


def last_tokens(history: History, count: int) -> Array:
    """The last tokens of every row, the last one first: [B, count]."""
    return jax.vmap(_before, (0, 0, None))(history.tokens, history.length, count)


def _before(row: Array, place: Array, count: int) -> Array:
    """The tokens of a row before ``place`` [...], the last one first: [..., count]."""
    source = place[..., None] - 1 - jnp.arange(count)
    return jnp.where(source >= 0, row.at[source].get(mode="clip"), BEFORE)


def in_history(
    own: OwnText, history: History, last: Array, wanted: int, follow: int
) -> tuple[Array, Occurrences]:
    """Where the rows' last tokens stood in their own texts; the end is a place like any other.

    Args:
      own: holds all places of ``history``.
      history: the rows.
      last: int32 [B, n], from ``last_tokens``.
      wanted: M, places a group.
      follow: F, tokens behind a place.

    Returns:
      The places [B, 1, G, M] and the occurrences, in S = 1 text.
    """

    def one(index: Index, row: Array, length: Array, last: Array) -> tuple[Array, Occurrences]:
        read = lambda place: row.at[place].get(mode="clip")
        at = lambda place: jnp.where((place >= 0) & (place < length), read(place), NOTHING)
        return suffix_index.find(index, at, last, jnp.int32(0), length, wanted, follow)

    found = jax.vmap(one)(own.index, history.tokens, history.length, last)
    return jax.tree.map(lambda x: x[:, None], found)


def in_corpus(corpus: Corpus, last: Array, wanted: int, follow: int) -> Occurrences:
    """The same in past responses."""
    one = lambda last: suffix_index.find(
        corpus.index, corpus.at, last, corpus.begin, corpus.end, wanted, follow
    )
    return jax.tree.map(lambda x: x[:, None], jax.vmap(one)(last)[1])


def with_response(
    past: Occurrences, own: Occurrences, place: Array, start: Array, groups: tuple[int, ...]
) -> Occurrences:
    """``past`` behind what is found in the response that a row has given so far.

    Args:
      past: in past responses.
      own: at ``place`` [B, 1, G, M] of the rows' own texts.
      place: the latest first, and so those in the response before those in the prompt.
      start: int32 [B], where responses start.
      groups: tokens before a place, at least.
    """
    given = place - start[:, None, None, None]  # tokens of the response before the place
    own = own.replace(matched=jnp.minimum(own.matched, given))
    wanted = place.shape[-1]
    count = (given >= np.array(groups)[:, None]).sum(-1, keepdims=True)
    nth = jnp.arange(wanted)
    source = jnp.where(nth < count, nth, wanted + nth - count)

    def merge(own: Array, past: Array) -> Array:
        both = jnp.concatenate([own, past], 3)
        return jnp.take_along_axis(both, source.reshape(*source.shape, *[1] * (both.ndim - 4)), 3)

    return jax.tree.map(merge, own, past)


def take_in(own: OwnText, history: History) -> OwnText:
    """Brings the rows' indices up to their lengths: a prompt at first, then a round's tokens."""

    def one(index: Index, row: Array, length: Array, joined: Array) -> Index:
        place = joined + 1 + jnp.arange(_CHUNK)
        before = _before(row, place, index.groups[-1])
        return suffix_index.join(index, place, before, place <= length, jnp.int32(0))

    def chunk(own: OwnText) -> OwnText:
        index = jax.vmap(one)(own.index, history.tokens, history.length, own.joined)
        return OwnText(index, jnp.minimum(own.joined + _CHUNK, history.length))

    return lax.while_loop(lambda own: (own.joined < history.length).any(), chunk, own)


def store(corpus: Corpus, history: History, start: Array, rows: Array) -> Corpus:
    """Adds the responses of ``rows`` as requests; the oldest make room, each as a whole.

    A response longer than the corpus leaves its last tokens.

    Args:
      corpus: is written in place where the caller donates it.
      history: whose tokens from ``start`` [B] on are the responses. Empty ones are not stored.
      start: int32 [B].
      rows: bool [B].
    """
    count = jnp.minimum(jnp.where(rows, history.length - start, 0), corpus.max_tokens - 1)
    parts = jnp.where(count > 0, (count + _CHUNK) // _CHUNK, 0)  # of the separator and the tokens
    upto = jnp.cumsum(parts)

    def add(index: Array, corpus: Corpus) -> Corpus:
        row = (upto <= index).sum(dtype=jnp.int32)
        part = index - (upto[row] - parts[row])
        corpus = _open(corpus, count[row] + 1, part == 0)
        return _append(corpus, history.tokens[row], history.length[row], count[row], part)

    # No cond: one that returned the corpus would copy it.
    return lax.fori_loop(0, upto[-1], add, corpus)


def responses(corpus: Corpus) -> list[list[int]]:
    """The responses that are kept, the oldest first, on the host."""
    host = jax.device_get(corpus)
    numbers = np.arange(host.oldest, host.newest) % host.starts.shape[0]
    starts = host.starts[numbers]
    sizes = np.diff(np.append(starts, host.end))  # wraps around as places do
    slots = host.tokens.shape[0]
    return [
        host.tokens[(start + 1 + np.arange(size - 1)) % slots].tolist()
        for start, size in zip(starts, sizes[: len(starts)], strict=True)
    ]


def extend(corpus: Corpus, texts: Sequence[Sequence[int]]) -> Corpus:
    """Adds ``texts`` (token ids) as responses, the oldest first. Consumes ``corpus``.

    Raises:
      ValueError: a token id is negative.
    """
    for text in texts:
        if min(text, default=0) < 0:
            raise ValueError(f"token id {min(text)} is negative.")
        size = 1 << max(len(text), _CHUNK).bit_length()  # few programs for texts of all sizes
        row = np.zeros((1, size), np.int32)
        row[0, : len(text)] = text
        corpus = _store_one(corpus, row, np.int32(len(text)))
    return corpus


@functools.partial(jax.jit, donate_argnums=0)
def _store_one(corpus: Corpus, row: Array, length: Array) -> Corpus:
    zero = jnp.zeros((1,), jnp.int32)
    return store(corpus, History(row, length[None]), zero, jnp.ones((1,), bool))


def _open(corpus: Corpus, size: Array, new: Array) -> Corpus:
    """If ``new``: evicts until a request of ``size`` slots has room, and notes its start."""
    keep = corpus.starts.shape[0]

    def crowded(oldest: Array) -> Array:
        used = corpus.end + size - corpus.starts[oldest % keep]
        full = (corpus.newest - oldest >= keep) | (used > corpus.max_tokens)
        return new & (oldest != corpus.newest) & full

    oldest = lax.while_loop(crowded, lambda oldest: oldest + 1, corpus.oldest)
    # True, but so the write below depends on the reads above, and XLA needs no copy to order them.
    new &= oldest <= corpus.newest
    slot = jnp.where(new, corpus.newest % keep, keep)
    return corpus.replace(
        starts=corpus.starts.at[slot].set(corpus.end, mode="drop"),
        oldest=oldest,
        newest=corpus.newest + new,
    )


def _append(corpus: Corpus, row: Array, length: Array, count: Array, part: Array) -> Corpus:
    """Writes chunk ``part`` of a request: a separator and the last ``count`` tokens of ``row``."""
    slots = corpus.tokens.shape[0]
    step = jnp.arange(_CHUNK, dtype=jnp.int32)
    nth = part * _CHUNK + step  # of the request; 0 is the separator
    exists = nth <= count
    before = _before(row, length - count + nth, corpus.index.groups[-1])
    before = jnp.where(nth[:, None] > jnp.arange(before.shape[1]), before, BEFORE)
    written = corpus.end + step
    tokens = jnp.where(nth > 0, before[:, 0], NOTHING)
    slot = jnp.where(exists, written & (slots - 1), slots)
    return corpus.replace(
        tokens=corpus.tokens.at[slot].set(tokens, mode="drop"),
        index=suffix_index.join(corpus.index, written + 1, before, exists, corpus.begin),
        end=corpus.end + exists.sum(dtype=jnp.int32),
    )

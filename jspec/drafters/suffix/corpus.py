"""The texts of suffix decoding on the device: each row's own, and the responses of the past.

    tokens    .. | -1 a b c a b | -1 b c d | ..     a request is a separator and its response
    starts            ^            ^                first slots of requests; the oldest goes first

Past responses lie in a ring. Their positions count all tokens ever stored.
"""

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import lax

from jspec.core.types import Array, History
from jspec.drafters.suffix import index as suffix_index
from jspec.drafters.suffix.growth import END, Occurrences
from jspec.drafters.suffix.index import BEFORE, Index

_CHUNK = 32  # tokens that are indexed at once


@struct.dataclass
class OwnText:
    """The index of each row's own history, prompt included."""

    index: Index  # arrays [B, G, C], an index for each row
    indexed: Array  # [B] int32, positions in the index: 1 to ``indexed``


@struct.dataclass
class Corpus:
    """Responses of the latest requests, C slots in a ring. No batch axis."""

    tokens: Array  # [C] int32, END as the separator before every request
    index: Index
    starts: Array  # [R] int32, positions of separators; request i is at i % R
    oldest: Array  # [] int32, number of the oldest request in the ring
    newest: Array  # [] int32, number of the next request
    end: Array  # [] int32, tokens ever stored, separators included
    max_tokens: int = struct.field(pytree_node=False)  # most tokens in the ring, at most C

    @property
    def begin(self) -> Array:
        """The separator of the oldest request."""
        start = self.starts[self.oldest % self.starts.shape[0]]
        return jnp.where(self.oldest == self.newest, self.end, start)

    def at(self, position: Array) -> Array:
        """Return the tokens at ``position``; END at the end."""
        slot = position & (self.tokens.shape[0] - 1)
        return jnp.where(self.end - position > 0, self.tokens[slot], END)


def no_texts(batch: int, capacity: int, groups: tuple[int, ...]) -> OwnText:
    """Return empty indices of ``batch`` rows of up to ``capacity`` tokens."""
    row = suffix_index.empty(capacity, groups)
    index = jax.tree.map(lambda x: jnp.zeros((batch, *x.shape), x.dtype), row)
    return OwnText(index, jnp.zeros((batch,), jnp.int32))


def no_responses(max_requests: int, max_tokens: int, groups: tuple[int, ...]) -> Corpus:
    """Return an empty corpus of up to ``max_tokens`` tokens, with a separator for each request."""
    index = suffix_index.empty(max_tokens, groups)
    zero = lambda: jnp.zeros((), jnp.int32)
    tokens = jnp.full(index.near.shape[1:], END, jnp.int32)
    starts = jnp.zeros((max_requests,), jnp.int32)
    return Corpus(tokens, index, starts, zero(), zero(), zero(), max_tokens)


def last_tokens(history: History, count: int) -> Array:
    """Return the last tokens of every row, the last one first: [B, count]."""
    return jax.vmap(_before, (0, 0, None))(history.tokens, history.length, count)


def _before(row: Array, position: Array, count: int) -> Array:
    """Return the tokens of a row before ``position`` [...], the last one first: [..., count]."""
    source = position[..., None] - 1 - jnp.arange(count)
    return jnp.where(source >= 0, row.at[source].get(mode="clip"), BEFORE)


def in_history(
    own_text: OwnText, history: History, last: Array, count: int, follow: int
) -> tuple[Array, Occurrences]:
    """Find the rows' ``last`` tokens [B, n] in their own texts, which are all indexed.

    Return M = ``count`` positions [B, 1, G, M] and the occurrences in S = 1 text, each with the
    F = ``follow`` tokens after it.
    """

    def find(index: Index, row: Array, length: Array, last: Array) -> tuple[Array, Occurrences]:
        def at(position: Array) -> Array:
            inside = (position >= 0) & (position < length)
            return jnp.where(inside, row.at[position].get(mode="clip"), END)

        return suffix_index.find(index, at, last, jnp.int32(0), length, count, follow)

    rows = jax.vmap(find)(own_text.index, history.tokens, history.length, last)
    return jax.tree.map(lambda x: x[:, None], rows)


def in_corpus(corpus: Corpus, last: Array, count: int, follow: int) -> Occurrences:
    """Find the rows' last tokens in past responses; arguments as for ``in_history``."""

    def find(last: Array) -> tuple[Array, Occurrences]:
        return suffix_index.find(
            corpus.index, corpus.at, last, corpus.begin, corpus.end, count, follow
        )

    return jax.tree.map(lambda x: x[:, None], jax.vmap(find)(last)[1])


def with_response(
    past: Occurrences, own_text: Occurrences, positions: Array, start: Array, groups: tuple
) -> Occurrences:
    """Return the occurrences in the response that a row has so far, followed by ``past`` ones.

    ``own_text`` are those at ``positions`` [B, 1, G, M], the latest first, so those in the
    response, which begins at ``start`` [B], precede those in the prompt.
    """
    available = positions - start[:, None, None, None]  # tokens of the response before a position
    own_text = own_text.replace(matched=jnp.minimum(own_text.matched, available))
    size = positions.shape[-1]
    count = (available >= np.array(groups)[:, None]).sum(-1, keepdims=True)
    nth = jnp.arange(size)
    source = jnp.where(nth < count, nth, size + nth - count)

    def merge(own_text: Array, past: Array) -> Array:
        both = jnp.concatenate([own_text, past], 3)
        return jnp.take_along_axis(both, source.reshape(*source.shape, *[1] * (both.ndim - 4)), 3)

    return jax.tree.map(merge, own_text, past)


def index_history(own_text: OwnText, history: History) -> OwnText:
    """Index the rows up to their lengths: a prompt at first, then the tokens of a round."""

    def append(index: Index, row: Array, length: Array, indexed: Array) -> Index:
        positions = indexed + 1 + jnp.arange(_CHUNK)
        before = _before(row, positions, index.groups[-1])
        return suffix_index.append(index, positions, before, positions <= length, jnp.int32(0))

    def chunk(own_text: OwnText) -> OwnText:
        index = jax.vmap(append)(own_text.index, history.tokens, history.length, own_text.indexed)
        return OwnText(index, jnp.minimum(own_text.indexed + _CHUNK, history.length))

    return lax.while_loop(
        lambda own_text: (own_text.indexed < history.length).any(), chunk, own_text
    )


def store(corpus: Corpus, history: History, start: Array, rows: Array) -> Corpus:
    """Store the responses of ``rows`` (bool [B]) as requests, evicting the oldest requests.

    Responses are the tokens of ``history`` from ``start`` [B] on. Empty ones are not stored, and of
    one longer than the corpus the last tokens are. A donated corpus is written in place.
    """
    count = jnp.minimum(jnp.where(rows, history.length - start, 0), corpus.max_tokens - 1)
    # The separator takes a slot before the tokens.
    chunks = jnp.where(count > 0, (count + _CHUNK) // _CHUNK, 0)
    upto = jnp.cumsum(chunks)

    def add(index: Array, corpus: Corpus) -> Corpus:
        row = (upto <= index).sum(dtype=jnp.int32)
        chunk = index - (upto[row] - chunks[row])
        corpus = _open(corpus, count[row] + 1, chunk == 0)
        return _append(corpus, history.tokens[row], history.length[row], count[row], chunk)

    # A loop and no cond, whose branches would copy the corpus.
    return lax.fori_loop(0, upto[-1], add, corpus)


def _open(corpus: Corpus, size: Array, new: Array) -> Corpus:
    """If ``new``, evict requests until one of ``size`` slots has room, and record its start."""
    capacity = corpus.starts.shape[0]

    def is_full(oldest: Array) -> Array:
        used = corpus.end + size - corpus.starts[oldest % capacity]
        full = (corpus.newest - oldest >= capacity) | (used > corpus.max_tokens)
        return new & (oldest != corpus.newest) & full

    oldest = lax.while_loop(is_full, lambda oldest: oldest + 1, corpus.oldest)
    # Always true, but so the write below depends on the reads above, and XLA makes no copy.
    new &= oldest <= corpus.newest
    slot = jnp.where(new, corpus.newest % capacity, capacity)
    return corpus.replace(
        starts=corpus.starts.at[slot].set(corpus.end, mode="drop"),
        oldest=oldest,
        newest=corpus.newest + new,
    )


def _append(corpus: Corpus, row: Array, length: Array, count: Array, chunk: Array) -> Corpus:
    """Write a chunk of a request: a separator and the last ``count`` tokens of ``row``."""
    slots = corpus.tokens.shape[0]
    step = jnp.arange(_CHUNK, dtype=jnp.int32)
    nth = chunk * _CHUNK + step  # index in the request; 0 is the separator
    exists = nth <= count
    before = _before(row, length - count + nth, corpus.index.groups[-1])
    before = jnp.where(nth[:, None] > jnp.arange(before.shape[1]), before, BEFORE)
    positions = corpus.end + step
    tokens = jnp.where(nth > 0, before[:, 0], END)
    slot = jnp.where(exists, positions & (slots - 1), slots)
    return corpus.replace(
        tokens=corpus.tokens.at[slot].set(tokens, mode="drop"),
        index=suffix_index.append(corpus.index, positions + 1, before, exists, corpus.begin),
        end=corpus.end + exists.sum(dtype=jnp.int32),
    )

"""Snapshots: copies of a row's states at ends of pages, where later sequences may begin.

Pages hold keys and values, but not the states of recurrent layers. So the prefill of a text stops
at the last page that another text may share, and the states are kept there, under the digest of the
text so far. Rows also keep a copy of their states behind the last page's end that they passed. A
text that ends leaves it as a snapshot, behind which the next turn of a chat begins. A sequence
begins behind a cached prefix as far as there is a snapshot. The snapshot that was used last stays
longest.
"""

import collections
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jspec.core import entries, paging
from jspec.core.entries import Entry
from jspec.core.kv_cache import KVCache
from jspec.core.types import Array
from jspec.engine.loop import DecodeState
from jspec.util.promotion import standard_promotion

_FIRST = 4  # snapshots that there is memory for at the beginning
_SHARE, _MOST = 8, 1024  # They take an eighth of the memory of a KV cache at most.


class Snapshots:
    """The snapshots of an engine: an index on the host, and their memory on the devices.

    Args:
      caches: shapes of the caches of one row; the target's come first.
      most: snapshots that there may be.
    """

    def __init__(self, caches: Sequence[KVCache], most: int):
        self.most, self._shapes = most, [_states_of(cache) for cache in caches]
        # Whether rows have copies of all states behind the last page's end.
        self.has_copies = all(entry.can_copy for states in self._shapes for entry in states)
        self._slots: collections.OrderedDict[bytes, int] = collections.OrderedDict()
        self._buffers: Any = None

    def __contains__(self, digest: bytes) -> bool:
        return digest in self._slots

    def __len__(self) -> int:
        return len(self._slots)

    def find(self, digest: bytes) -> int:
        """Return the number of a snapshot; it was used last now."""
        self._slots.move_to_end(digest)
        return self._slots[digest]

    def add(self, digest: bytes) -> int | None:
        """Return the number of a new snapshot, in place of the oldest; None if there is one."""
        if digest in self._slots:
            self._slots.move_to_end(digest)
            return None
        full = len(self._slots) >= self.most
        number = self._slots.popitem(last=False)[1] if full else self._first_free()
        self._slots[digest] = number
        return number

    def _first_free(self) -> int:
        taken = set(self._slots.values())
        return next(number for number in range(self.most) if number not in taken)

    def drop(self, digests: Sequence[bytes]) -> None:
        """Drop the snapshots of texts."""
        for digest in digests:
            self._slots.pop(digest, None)

    def clear(self) -> None:
        """Drop all snapshots."""
        self._slots.clear()

    # ------------------------------------------------------------------------------- on the devices

    @property
    def is_lost(self) -> bool:
        """True if a program that failed has consumed the buffers."""
        return any(leaf.is_deleted() for leaf in jax.tree.leaves(self._buffers))

    def free(self) -> None:
        """Free the memory; it comes back with the next snapshot."""
        self._buffers = None

    def save(self, state: DecodeState, row: Any, number: int) -> None:
        """Copy the states of a row of the batch."""
        count = 0 if self._buffers is None else len(jax.tree.leaves(self._buffers)[0])
        if number >= count:
            wanted = max(count, min(_FIRST, self.most))
            while wanted <= number:
                wanted = min(2 * wanted, self.most)
            self._buffers = _extended(self._shapes, self._buffers, wanted)
        self._buffers = _saved(self._buffers, _states(state), row, number)

    def restore(self, state: DecodeState, row: Any, number: int) -> DecodeState:
        """Return the state of a batch with a snapshot in a row; it is consumed."""
        return _restored(state, self._buffers, row, number)


def bytes_of_row(caches: Sequence[KVCache], share: int = 1, draft_share: int = 1) -> int:
    """Return the bytes of a row's states on a device, which a snapshot takes.

    The states of the first cache, the target's, are split among ``share`` devices by heads, the
    others among ``draft_share``.
    """
    leaves = (jax.tree.leaves(_states_of(cache)) for cache in caches)
    target, *others = [sum(leaf.size * leaf.dtype.itemsize for leaf in each) for each in leaves]
    return target // share + sum(others) // draft_share


def most_within(limit: int, row: int) -> int:
    """Return the number of snapshots of ``row`` bytes beside pages, given the bytes of both."""
    return min(limit // _SHARE // row, _MOST) if row else 0


def _states_of(cache: KVCache) -> tuple[Any, ...]:
    """Return the entries of a cache that have no pages, in order; copies of them if it has any."""
    states = (entry for entry in cache.layers if entry is not None and not entry.has_pages)
    return tuple(entry if entry.copy is None else entry.copy for entry in states)


def _states(state: DecodeState) -> list[Any]:
    return [_states_of(cache) for cache in paging.caches_of((state.cache, state.memory))]


def _extended(shapes: Any, buffers: Any, count: int) -> Any:
    """Return memory for ``count`` snapshots, of which the first are those of ``buffers``."""

    def grown(like: Array, old: Array | None = None) -> Array:
        new = jnp.zeros((count, *like.shape[1:]), like.dtype)
        return new if old is None else new.at[: len(old)].set(old)

    trees = (shapes,) if buffers is None else (shapes, buffers)
    return entries.settled(jax.tree.map(grown, *trees))


@functools.partial(jax.jit, donate_argnames="buffers")
@standard_promotion
def _saved(buffers: Any, states: Any, row: Array, number: Array) -> Any:
    def put(buffer: Array, state: Array) -> Array:
        return buffer.at[number].set(state[row])

    return entries.settled(jax.tree.map(put, buffers, states))


@functools.partial(jax.jit, donate_argnames="state")
@standard_promotion
def _restored(state: DecodeState, buffers: Any, row: Array, number: Array) -> DecodeState:
    pending = iter(buffers)

    def put(state: Array, buffer: Array) -> Array:
        return state.at[row].set(buffer[number])

    def begun(entry: Entry, saved: Entry) -> Entry:
        if entry.copy is None:
            return jax.tree.map(put, entry, saved)
        copy = jax.tree.map(put, entry.copy, saved)
        return jax.tree.map(put, entry.replace(copy=None), saved).replace(copy=copy)

    def restored(cache: KVCache) -> KVCache:
        saved = iter(next(pending))
        layers = tuple(
            entry if entry is None or entry.has_pages else begun(entry, next(saved))
            for entry in cache.layers
        )
        return cache.replace(layers=layers)

    cache, memory = paging.over_caches(restored, (state.cache, state.memory))
    return state.replace(cache=cache, memory=memory).settled()

"""Entries of a cache: a layer's record of the committed tokens.

A pass over N nodes reads the entries and writes nothing. It returns new values of the nodes for
each layer. After the verdict the entry appends those of the accepted path itself. Two kinds: ::

    slots    [B, H, S, D]   a value per token, which attention reads; an engine keeps them in pages
    state    [B, ...]       one value for all tokens, as of a recurrent layer; a row of the batch

A state is a subclass of ``Entry`` that defines ``of_nodes`` and ``append``. Its ``of_nodes`` may be
of another class: for a recurrence, what a node adds to the state. Pages hold no states, so a text
begins behind a cached prefix as far as an engine kept a copy (``jspec.engine.snapshots``).
"""

import abc
import dataclasses
import functools
from typing import Any, ClassVar, Self

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax

from jspec import sharding
from jspec.core.narrow import LIMITS, Narrow
from jspec.core.types import Array

# The axis of the nodes in all arrays that a pass returns for them: [B, H, N, ...].
NODE_AXIS = 2


@dataclasses.dataclass(frozen=True)
class Commit:
    """The nodes that every row appends.

    Attributes:
      path: int32 [B, R], indices of nodes, in the order of the text.
      count: int32 [B], how many of them are committed; 0 in rows that stay as they are.
      length: int32 [B], tokens that were committed before.
      table: int32 [B, M], the pages of each row; None for caches without pages.
    """

    path: Array
    count: Array
    length: Array
    table: Array | None = None
    _starts: dict[int, Array] = dataclasses.field(default_factory=dict)
    _places: dict[int, tuple[Array, Array]] = dataclasses.field(default_factory=dict)

    def start(self, capacity: int) -> Array:
        """Return the first slot [B] that each row writes, in buffers of ``capacity`` slots.

        Rows with count 0 write to the end of the buffer. This makes the write address depend on the
        verdict, so XLA schedules the write after every read of the round and copies no cache.
        """
        if capacity not in self._starts:
            end = capacity - self.path.shape[1]
            self._starts[capacity] = jnp.where(self.count > 0, self.length, end)
        return self._starts[capacity]

    def pages_and_slots(self, num_pages: int, page: int) -> tuple[Array, Array]:
        """Return the pages [B, R] of the path's nodes, and their slots in pages of ``page`` tokens.

        Nodes that are not committed have the page ``num_pages``, which does not exist.
        """
        if page not in self._places:
            steps = jnp.arange(self.path.shape[1])
            slots = self.length[:, None] + steps
            ids = jnp.take_along_axis(self.table, lax.div(slots, page), 1, mode="clip")
            ids = jnp.where(steps < self.count[:, None], ids, num_pages)
            self._places[page] = ids, lax.rem(slots, page)
        return self._places[page]


class Entry(abc.ABC):
    """The record of one layer: a pytree of arrays [B, ...]."""

    has_pages: ClassVar[bool] = False  # whether an engine keeps it in pages: it is a ``SlotEntry``
    is_divided: ClassVar[bool] = False  # whether the devices of a mesh have some of its heads each
    can_copy: ClassVar[bool] = False  # whether ``with_copy`` has room for a copy
    copy: ClassVar[Any] = None  # a copy of the state behind the last page's end; None for no copies

    @abc.abstractmethod
    def of_nodes(self, batch: int, count: int) -> Any:
        """Return the shapes of the values of ``count`` nodes, as a pass returns them."""

    @abc.abstractmethod
    def append(self, new: Any, commit: Commit) -> Self:
        """Return the entry behind the committed nodes of ``new``, the values of a pass.

        Rows of count 0 must not change, and no value behind ``commit.count`` may have an effect.
        """

    def with_copy(self) -> Self:
        """Return an empty entry with room for ``copy``, which ``kv_cache.append`` writes."""
        return self

    def stored_as(self, dtype: str) -> Self:
        """Return an empty entry whose slots are stored in ``dtype``; states of rows stay."""
        del dtype
        return self


class SlotEntry(Entry):
    """Buffers [B, H, S, D] with a slot for each token; with a table, pools [P, H, page, D]."""

    has_pages = True
    keeps_dtype = False  # Whether pools have the dtype of these buffers, whatever is asked.

    @property
    def has_split_queries(self) -> bool:
        """True if the devices of a mesh have some of the query heads each."""
        return self.is_divided

    def of_nodes(self, batch: int, count: int) -> Self:
        """See ``Entry``: the nodes have slots too."""

        def shape(like: Array | Narrow) -> Any:
            if isinstance(like, Narrow):
                return like.of_nodes(batch, count)
            sizes = (batch, like.shape[1], count, *like.shape[3:])
            return jax.ShapeDtypeStruct(sizes, like.dtype)

        return jax.tree.map(shape, self, is_leaf=lambda x: isinstance(x, Narrow))

    def append(self, new: Self, commit: Commit) -> Self:
        """See ``Entry``; all R slots are written without pages, and the first ``count`` with."""
        write = functools.partial(_write_slots, commit)
        if commit.table is not None:
            write = functools.partial(_write_pages, commit, is_divided=self.is_divided)

        def put(buffer: Array | Narrow, fresh: Array | Narrow) -> Array | Narrow:
            if isinstance(buffer, Narrow):
                return buffer.append(fresh, commit, write, is_divided=self.is_divided)
            return write(buffer, fresh)

        return jax.tree.map(put, self, new, is_leaf=lambda x: isinstance(x, Narrow))

    def stored_as(self, dtype: str) -> Self:
        """See ``Entry``: a dtype, or a format of ``narrow``, which pools keep.

        What is read from a narrow buffer has the present dtype.
        """

        def empty(like: Array) -> Array | Narrow:
            if dtype in LIMITS:
                return Narrow.zeros(like.shape, dtype, like.dtype)
            return jnp.zeros(like.shape, dtype)

        return jax.tree.map(empty, self.replace(keeps_dtype=True))


@struct.dataclass
class AttentionKV(SlotEntry):
    """The keys and values of one layer."""

    k: Array | Narrow  # [B, Hkv, S, D]
    v: Array | Narrow  # [B, Hkv, S, D]
    is_divided: bool = struct.field(pytree_node=False, default=False)  # see ``Entry``
    keeps_dtype: bool = struct.field(pytree_node=False, default=False)  # see ``SlotEntry``

    @classmethod
    def empty(
        cls,
        batch: int,
        num_heads: int,
        capacity: int,
        head_dim: int,
        dtype: jnp.dtype,
        *,
        is_divided: bool = False,
    ) -> Self:
        """Return ``capacity`` empty slots per row."""
        shape = (batch, num_heads, capacity, head_dim)
        return cls(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype), is_divided)

    def holding(self, k: Array, v: Array) -> Self:
        """Return an entry of k and v [B, Hkv, n, D] in this entry's dtypes."""
        return self.replace(k=stored_like(self.k, k), v=stored_like(self.v, v))


def settled(tree: Any) -> Any:
    """Place a pytree as it lies between programs: divided entries by heads, all else whole.

    Leaves are those of ``sharding.whole``.
    """

    def put(x: Any) -> Any:
        is_divided = isinstance(x, Entry) and x.is_divided
        return sharding.by_heads(x) if is_divided else sharding.whole(x)

    return jax.tree.map(put, tree, is_leaf=lambda x: isinstance(x, Entry))


def stored_like(buffer: Array | Narrow, x: Array) -> Array | Narrow:
    """Return x as the buffer stores it, but bits of bfloat16 as numbers."""
    if isinstance(buffer, Narrow):
        return Narrow.of(x, buffer.format, buffer.dtype)
    return x.astype(dtype_of(buffer))


def dtype_of(buffer: Array) -> jnp.dtype:
    """Return the dtype of the numbers in a buffer; uint16 holds the bits of bfloat16."""
    return jnp.dtype(jnp.bfloat16) if buffer.dtype == jnp.uint16 else buffer.dtype


def numbers(buffer: Array | Narrow) -> Array:
    """Return a buffer as it is, or the numbers of a narrow one."""
    return buffer.numbers() if isinstance(buffer, Narrow) else buffer


def _write_slots(commit: Commit, buffer: Array, fresh: Array) -> Array:
    """Write the path's slots of ``fresh`` [B, H, N, D]: one ``dynamic_update_slice`` per row.

    If devices have a row each, the head's index is spelled out. From windows of all heads, XLA for
    TPU would lay out a cache of one row by slots, and copy it for attention. With more rows windows
    leave more in fast memory.
    """
    is_one_each = sharding.num_row_shards(fresh) == fresh.shape[0] > 1
    heads = jnp.arange(fresh.shape[1])[:, None] if is_one_each else slice(None)

    @jax.vmap
    def write(buffer: Array, fresh: Array, path: Array, start: Array) -> Array:
        fresh = fresh.at[heads, path].get(mode="promise_in_bounds").astype(buffer.dtype)
        return lax.dynamic_update_slice_in_dim(buffer, fresh, start, axis=1)

    return write(buffer, fresh, commit.path, commit.start(buffer.shape[2]))


def _write_pages(commit: Commit, pool: Array, fresh: Array, *, is_divided: bool) -> Array:
    """Write the committed slots of ``fresh`` [B, H, N, D]: one scatter of [D] windows.

    The head's index is spelled out. As a window or a batch of heads, XLA for TPU would copy the
    pool. XLA cannot split such a scatter without an exchange, so each device writes its own heads.
    """
    ids, slots = commit.pages_and_slots(pool.shape[0], pool.shape[2])
    fresh = fresh.astype(dtype_of(pool))
    if fresh.dtype != pool.dtype:
        fresh = lax.bitcast_convert_type(fresh, pool.dtype)
    path = commit.path[:, None, :, None]
    fresh = jnp.take_along_axis(fresh, path, NODE_AXIS, mode="promise_in_bounds")

    def write(pool: Array, fresh: Array, ids: Array, slots: Array) -> Array:
        index = ids[:, None], jnp.arange(pool.shape[1])[:, None], slots[:, None]
        return pool.at[index].set(fresh, mode="drop")

    write = sharding.over_heads(write, is_split=is_divided)
    return write(pool, fresh, ids, slots)

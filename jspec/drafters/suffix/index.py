"""An index of earlier occurrences of a row's last tokens: lists of positions by hash.

    text      a b c a b c d         a position is the start of a continuation: "a b c" precedes
    position  0 1 2 3 4 5 6         position 3, and "a" follows

A position is found by the hash of the k tokens before it, for every k of ``groups``. The positions
of a bucket form a list: ``latest`` holds its newest position, ``near`` the one before each, ``far``
the eighth before. So the M latest positions take M / 8 + 7 dependent reads for a text of any
length, where a comparison reads all of it. Matches are
verified token by token, so a hash collision costs one of the M positions and nothing else.

Positions wrap around at 2**32, and only their differences are compared. A text lies in a ring, so
positions up to some ``begin`` may be overwritten and are never followed.
"""

from collections.abc import Callable

import jax.numpy as jnp
import numpy as np
from flax import struct

from jspec.core.types import Array
from jspec.drafters.suffix.growth import END, Occurrences

BEFORE = -2  # in place of tokens before the start of a text: equals nothing
_HOPS = 8  # positions between a position and its ``far``


@struct.dataclass
class Index:
    """Lists of the positions of one text, in G groups and C slots; C is a power of two."""

    latest: Array  # [G, C] int32, the newest position of every bucket
    near: Array  # [G, C] int32, the position before it in its list
    far: Array  # [G, C] int32, the eighth position before
    groups: tuple[int, ...] = struct.field(pytree_node=False)  # ascending


def empty(size: int, groups: tuple[int, ...]) -> Index:
    """Return an index with room for ``size`` positions; 0 is no position."""
    slots = 1 << max(size - 1, 1).bit_length()
    table = lambda: jnp.zeros((len(groups), slots), jnp.int32)
    return Index(table(), table(), table(), groups)


def append(index: Index, positions: Array, before: Array, exists: Array, begin: Array) -> Index:
    """Append positions to the lists of their buckets, in order.

    Args:
      index: of one text.
      positions: int32 [n], ascending by one.
      before: int32 [n, k], the tokens before each, the last one first; BEFORE past the start.
      exists: bool [n].
      begin: int32 [], positions up to it are overwritten.
    """
    slots, order = index.near.shape[1], np.arange(positions.shape[0])
    group = np.arange(len(index.groups))[:, None]
    has_enough = before[:, np.array(index.groups) - 1].T != BEFORE
    joins = exists & has_enough  # [G, n]
    bucket = _buckets(index, before)
    same_list = (bucket[:, :, None] == bucket[:, None, :]) & joins[:, :, None] & joins[:, None, :]
    earlier = jnp.where(same_list & (order[:, None] > order), order, -1).max(-1)
    is_last = joins & ~(same_list & (order[:, None] < order)).any(-1)
    last = jnp.where(earlier >= 0, positions[jnp.maximum(earlier, 0)], index.latest[group, bucket])
    # Always true, but so the write below depends on the read above, and XLA makes no copy.
    is_last &= last != positions
    slot = jnp.where(joins, positions & (slots - 1), slots)
    near = index.near.at[group, slot].set(last, mode="drop")
    far, valid = last, last - begin > 0
    for _ in range(_HOPS - 1):
        following = near[group, far & (slots - 1)]
        valid &= (following - begin > 0) & (far - following > 0)
        far = following
    far = jnp.where(valid, far, positions)  # none: a position never precedes itself
    latest = jnp.where(is_last, bucket, slots)
    return index.replace(
        latest=index.latest.at[group, latest].set(positions, mode="drop"),
        near=near,
        far=index.far.at[group, slot].set(far, mode="drop"),
    )


def find(
    index: Index, at: Callable, last: Array, begin: Array, end: Array, count: int, follow: int
) -> tuple[Array, Occurrences]:
    """Return the latest positions [G, M] that a row's last tokens precede, and the occurrences.

    The occurrences have no axes B and S.

    Args:
      at: reads the text at any positions; END past its end.
      last: int32 [n], a row's last tokens, the last one first; BEFORE past its start.
      begin: int32 [], positions up to it are overwritten.
      end: int32 [], the last position.
      count: M, positions a group.
      follow: F, tokens after a position.
    """
    positions, exists = _walk(index, _buckets(index, last[None])[:, 0], begin, end, count)
    before = at(positions[..., None] - 1 - jnp.arange(last.shape[0]))
    equal = (before == last).astype(jnp.int32)
    behind = at(positions[..., None] + jnp.arange(follow))
    inside = jnp.cumprod((behind != END).astype(jnp.int32), -1) > 0
    return positions, Occurrences(
        matched=jnp.where(exists, jnp.cumprod(equal, -1).sum(-1), 0),
        follow=jnp.where(inside, behind, END),
    )


def _walk(index: Index, bucket: Array, begin: Array, end: Array, count: int) -> tuple[Array, Array]:
    """Return the positions of each group's bucket [G], the latest first, [G, M], and a mask."""
    group, slots = np.arange(len(index.groups))[:, None], index.near.shape[1]

    def steps(table: Array, position: Array, exists: Array, count: int) -> tuple[Array, Array]:
        """Follow ``table`` from positions [G, n], ``count`` - 1 times: [G, n, count]."""
        walk = [(position, exists)]
        for _ in range(count - 1):
            last, exists = walk[-1]
            position = table[group, last & (slots - 1)]
            walk.append((position, exists & (position - begin > 0) & (last - position > 0)))
        return tuple(jnp.stack(part, -1) for part in zip(*walk, strict=True))

    first = index.latest[group, bucket[:, None]]  # [G, 1]
    exists = (first - begin > 0) & (end - first >= 0)
    anchors, exists = steps(index.far, first, exists, -(-count // _HOPS))
    positions, exists = steps(index.near, anchors[:, 0], exists[:, 0], _HOPS)
    flat = lambda x: x.reshape(x.shape[0], -1)[:, :count]
    return flat(positions), flat(exists)


def _buckets(index: Index, before: Array) -> Array:
    """Return the bucket of the last tokens [n, k] for every group: [G, n]."""
    hashed, buckets = jnp.zeros(before.shape[:1], jnp.uint32), []
    for back in range(index.groups[-1]):
        hashed = (hashed ^ before[:, back].astype(jnp.uint32)) * jnp.uint32(0x9E3779B1)
        hashed ^= hashed >> 15
        if back + 1 in index.groups:
            slot = (hashed ^ (hashed >> 13)) & (index.latest.shape[1] - 1)
            buckets.append(slot.astype(jnp.int32))
    return jnp.stack(buckets)

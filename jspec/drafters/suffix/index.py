"""Where the last tokens of a row stood before: lists of places by hash, on the device.

    text     a b c a b c d         a place is where a continuation starts; before place 3 stands
    place    0 1 2 3 4 5 6         "a b c" and "a" follows

A place is found by hashing the k tokens before it, for every k of ``groups``. The places of a
bucket form a list: ``latest`` holds its newest, ``near`` the one before each, ``far`` the eighth
before. So the M latest take M / 8 + 7 dependent reads whatever the length of the text, where a
comparison reads all of it (``benchmarks/suffix.py`` measures both). What is found is compared token
by token: a hash decides nothing, but foreign places in a bucket count among its M.

Places wrap around at 2**32; only their differences are compared. A text has its places in the slots
of a ring, so those before some ``begin`` may have been overwritten, and never are followed.
"""

from collections.abc import Callable

import jax.numpy as jnp
import numpy as np
from flax import struct

from jspec.core.types import Array
from jspec.drafters.suffix.growth import NOTHING, Occurrences

BEFORE = -2  # in place of tokens before the start of a text: equals nothing
_HOPS = 8  # places between a place and its ``far``


@struct.dataclass
class Index:
    """Lists of the places of one text, in G groups and C slots; C is a power of two."""

    latest: Array  # [G, C] int32, the newest place of every bucket
    near: Array  # [G, C] int32, the place before that of its list
    far: Array  # [G, C] int32, the eighth place before
    groups: tuple[int, ...] = struct.field(pytree_node=False)  # ascending


def empty(size: int, groups: tuple[int, ...]) -> Index:
    """An index for ``size`` places at least, 0 being no place."""
    slots = 1 << max(size - 1, 1).bit_length()
    table = lambda: jnp.zeros((len(groups), slots), jnp.int32)
    return Index(table(), table(), table(), groups)


def join(index: Index, place: Array, before: Array, exists: Array, begin: Array) -> Index:
    """Appends places to the lists of their buckets, in order.

    Args:
      index: of one text.
      place: int32 [n], ascending by one.
      before: int32 [n, k], the tokens before each, the last one first; BEFORE past the start.
      exists: bool [n].
      begin: int32 [], places up to it are forgotten.
    """
    slots, order = index.near.shape[1], np.arange(place.shape[0])
    group = np.arange(len(index.groups))[:, None]
    has_enough = before[:, np.array(index.groups) - 1].T != BEFORE
    joins = exists & has_enough  # [G, n]
    bucket = _buckets(index, before)
    mates = (bucket[:, :, None] == bucket[:, None, :]) & joins[:, :, None] & joins[:, None, :]
    earlier = jnp.where(mates & (order[:, None] > order), order, -1).max(-1)
    is_last = joins & ~(mates & (order[:, None] < order)).any(-1)
    last = jnp.where(earlier >= 0, place[jnp.maximum(earlier, 0)], index.latest[group, bucket])
    # True, but so the write below depends on the read above, and XLA needs no copy to order them.
    is_last &= last != place
    slot = jnp.where(joins, place & (slots - 1), slots)
    near = index.near.at[group, slot].set(last, mode="drop")
    far, found = last, last - begin > 0
    for _ in range(_HOPS - 1):
        following = near[group, far & (slots - 1)]
        found &= (following - begin > 0) & (far - following > 0)
        far = following
    far = jnp.where(found, far, place)  # nowhere: a place never comes before itself
    return index.replace(
        latest=index.latest.at[group, jnp.where(is_last, bucket, slots)].set(place, mode="drop"),
        near=near,
        far=index.far.at[group, slot].set(far, mode="drop"),
    )


def find(
    index: Index,
    at: Callable[[Array], Array],
    last: Array,
    begin: Array,
    end: Array,
    wanted: int,
    follow: int,
) -> tuple[Array, Occurrences]:
    """The latest places [G, M] before which a row's last tokens stand; B and S are left out.

    Args:
      index: of the text.
      at: reads the text at any places; NOTHING where it ends.
      last: int32 [n], a row's last tokens, the last one first; BEFORE past its start.
      begin: int32 [], places up to it are forgotten.
      end: int32 [], the last place.
      wanted: M, places a group.
      follow: F, tokens behind a place.
    """
    place, exists = _walk(index, _buckets(index, last[None])[:, 0], begin, end, wanted)
    before = at(place[..., None] - 1 - jnp.arange(last.shape[0]))
    same = (before == last).astype(jnp.int32)
    behind = at(place[..., None] + jnp.arange(follow))
    goes_on = jnp.cumprod((behind != NOTHING).astype(jnp.int32), -1) > 0
    return place, Occurrences(
        matched=jnp.where(exists, jnp.cumprod(same, -1).sum(-1), 0),
        follow=jnp.where(goes_on, behind, NOTHING),
    )


def _walk(
    index: Index, bucket: Array, begin: Array, end: Array, wanted: int
) -> tuple[Array, Array]:
    """The latest places of each group's bucket [G], the latest first: [G, M], and which exist."""
    group, slots = np.arange(len(index.groups))[:, None], index.near.shape[1]

    def steps(table: Array, place: Array, exists: Array, count: int) -> tuple[Array, Array]:
        """[G, n] places, and behind each what ``table`` leads to: [G, n, count]."""
        found = [(place, exists)]
        for _ in range(count - 1):
            last, exists = found[-1]
            place = table[group, last & (slots - 1)]
            found.append((place, exists & (place - begin > 0) & (last - place > 0)))
        return tuple(jnp.stack(part, -1) for part in zip(*found, strict=True))

    first = index.latest[group, bucket[:, None]]  # [G, 1]
    exists = (first - begin > 0) & (end - first >= 0)
    anchors, exists = steps(index.far, first, exists, -(-wanted // _HOPS))
    place, exists = steps(index.near, anchors[:, 0], exists[:, 0], _HOPS)
    flat = lambda x: x.reshape(x.shape[0], -1)[:, :wanted]
    return flat(place), flat(exists)


def _buckets(index: Index, before: Array) -> Array:
    """The bucket of the last tokens [n, k] for every group: [G, n]."""
    hashed, found = jnp.zeros(before.shape[:1], jnp.uint32), []
    for back in range(index.groups[-1]):
        hashed = (hashed ^ before[:, back].astype(jnp.uint32)) * jnp.uint32(0x9E3779B1)
        hashed ^= hashed >> 15
        if back + 1 in index.groups:
            slot = (hashed ^ (hashed >> 13)) & (index.latest.shape[1] - 1)
            found.append(slot.astype(jnp.int32))
    return jnp.stack(found)

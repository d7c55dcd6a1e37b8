"""Rows of queries, and their softmax over one block of keys after another: shared by XLA's forms.

The running softmax is that of Milakov and Gimelshein (arXiv 1805.02867).
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jspec.core.entries import numbers
from jspec.core.narrow import Narrow

Array = jax.Array
Cache = tuple[Array | Narrow, Array | Narrow]  # keys and values
MASKED = -1e30  # finite, so that a fully masked block gives zeros and not NaN
_WORD = 32


class Rows(NamedTuple):
    """Query heads of one group of keys as rows of one matmul: ``n * G + g`` is node n of head g."""

    queries: Array  # [B, Hkv, N * G, D], scaled, in float32 or wider
    group: int  # G
    soft_cap: float | None

    def scores(self, keys: Array, mask: Array) -> Array:
        """Return masked scores [B, Hkv, R, S] of keys [B, Hkv, S, D], for a mask like them."""
        scores = dot("bhrd,bhsd->bhrs", self.queries, keys)
        if self.soft_cap is not None:
            scores = self.soft_cap * jnp.tanh(scores / self.soft_cap)
        return jnp.where(mask, scores, MASKED)

    def repeat(self, mask: Array) -> Array:
        """Repeat a mask of nodes [B, N, S] for the query heads of a group: [B, 1, N * G, S]."""
        return jnp.repeat(mask, self.group, axis=1)[:, None]

    def spread(self, mask: Array) -> Array:
        """Return a mask [B, N or 1, S] for rows; a single one is broadcast."""
        return self.repeat(mask) if mask.shape[1] > 1 else mask[:, None]


class Softmax(NamedTuple):
    """The softmax of R rows of each key head, over the keys so far."""

    peak: Array  # [B, Hkv, R], the highest score
    total: Array  # [B, Hkv, R], the sum of weights
    mixed: Array  # [B, Hkv, R, D], the weighted sum of values


class Prefix(NamedTuple):
    """The slots of a prefix that some query sees."""

    first: Array
    end: Array
    mask_of: Callable[[Array], Array]  # Maps slots [S] to bool [B, N or 1, S].


def rows_of(q: Array, kv_heads: int, scale: float, soft_cap: float | None) -> Rows:
    """Return scaled queries [B, H, N, D] as rows."""
    batch, heads, nodes, dim = q.shape
    group, dtype = heads // kv_heads, jnp.promote_types(q.dtype, jnp.float32)
    rows = (q.astype(dtype) * scale).reshape(batch, kv_heads, group, nodes, dim)
    return Rows(rows.swapaxes(2, 3).reshape(batch, kv_heads, nodes * group, dim), group, soft_cap)


def result(softmax: Softmax, group: int, sinks: Array | None = None) -> Array:
    """Return the attention [B, H, N, D] of all rows, with ``sinks`` as in the reference."""
    batch, kv_heads, rows, dim = softmax.mixed.shape
    if sinks is not None:
        sinks = jnp.tile(sinks.reshape(1, kv_heads, group), (1, 1, rows // group))
        softmax = with_sinks(softmax, sinks)
    out = (softmax.mixed / softmax.total[..., None]).reshape(batch, kv_heads, -1, group, dim)
    return out.swapaxes(2, 3).reshape(batch, kv_heads * group, rows // group, dim)


def begin(scores: Array, values: Array) -> Softmax:
    """Return the softmax of scores [B, Hkv, R, S] over values [B, Hkv, S, D]."""
    if values.shape[2] == 1:  # every row sees it
        mixed = jnp.broadcast_to(values, (*scores.shape[:-1], values.shape[-1]))
        return Softmax(scores[..., 0], jnp.ones_like(scores[..., 0]), mixed.astype(scores.dtype))
    peak = scores.max(-1)
    weights = jnp.exp(scores - peak[..., None])
    return Softmax(peak, weights.sum(-1), dot("bhrs,bhsd->bhrd", weights, values))


def join(softmax: Softmax, scores: Array, values: Array) -> Softmax:
    """Add scores [B, Hkv, R, S] over values [B, Hkv, S, D] to a softmax."""
    peak, total, mixed = softmax
    new_peak = jnp.maximum(peak, scores.max(-1))
    decay = jnp.exp(peak - new_peak)
    weights = jnp.exp(scores - new_peak[..., None])  # 0 where masked: the peak is a real score
    mixed = mixed * decay[..., None] + dot("bhrs,bhsd->bhrd", weights, values)
    return Softmax(new_peak, total * decay + weights.sum(-1), mixed)


def with_sinks(softmax: Softmax, sinks: Array) -> Softmax:
    """Add a key of score ``sinks``, as of the peak, and of value 0 to a softmax."""
    peak, total, mixed = softmax
    sinks = sinks.astype(peak.dtype)
    new_peak = jnp.maximum(peak, sinks)
    decay = jnp.exp(peak - new_peak)
    total = total * decay + jnp.exp(sinks - new_peak)
    return Softmax(new_peak, total, mixed * decay[..., None])


def prefix_of(length: Array, window: int | None, positions: Array | None) -> Prefix:
    """Return the slots of committed prefixes [B] that queries at ``positions`` [B, N] see."""

    def stored(slots: Array) -> Array:
        return slots < length[:, None, None]

    def within(slots: Array) -> Array:
        return stored(slots) & (slots > positions[:, :, None] - window)

    if window is None:
        return Prefix(jnp.int32(0), length.max(), stored)
    return Prefix(jnp.maximum(positions.min() - window + 1, 0), length.max(), within)


def join_slots(
    softmax: Softmax,
    rows: Rows,
    cache: Cache,
    prefix: Prefix,
    size: int,
    index: Array,
) -> Softmax:
    """Add block ``index`` of a contiguous cache (k, v), ``size`` slots wide, to a softmax."""
    # The last block is pulled back inside the buffer; repeated slots are masked.
    capacity = cache[0].shape[2]
    start = jnp.minimum(index * size, capacity - size)
    slots = start + jnp.arange(size)
    mask = rows.spread(prefix.mask_of(slots) & (slots >= index * size))

    def part(x: Array) -> Array:
        # Slots are axis 2, but the last one of scales (``Narrow``).
        return lax.dynamic_slice_in_dim(x, start, size, axis=x.shape.index(capacity, 2))

    keys, values = map(numbers, jax.tree.map(part, cache))
    return join(softmax, rows.scores(keys, mask), values)


def pages(pool: Array | Narrow, ids: Array) -> Array:
    """Return pages ``ids`` [B, n] side by side, [B, Hkv, n * page, D]; bits as bfloat16."""
    stored = numbers(jax.tree.map(lambda x: stored_pages(x, ids), pool))
    if stored.dtype == jnp.uint16:
        return lax.bitcast_convert_type(stored, jnp.bfloat16)
    return stored


def stored_pages(pool: Array, ids: Array) -> Array:
    """Return pages as ``pages`` does, in the dtype of the pool."""
    if ids.shape[1] == 1:
        return pool.at[ids[:, 0]].get(mode="promise_in_bounds")
    stored = jnp.moveaxis(pool.at[ids].get(mode="promise_in_bounds"), 1, 2)
    return stored.reshape(*stored.shape[:2], -1, stored.shape[-1])


def in_columns(table: Array, count: int) -> Array:
    """Pad a table of pages [B, M] with the null page to a multiple of ``count`` columns."""
    return jnp.pad(table, ((0, 0), (0, -table.shape[1] % count)))


def unpack(words: Array, count: int) -> Array:
    """Return the first ``count`` bits of uint32 words [..., W]: bool [..., count]."""
    bits = (words[..., None] >> jnp.arange(_WORD, dtype=jnp.uint32)) & jnp.uint32(1)
    return bits.reshape(*words.shape[:-1], -1)[..., :count] > 0


def dot(equation: str, rows: Array, stored: Array) -> Array:
    """Multiply with keys or values, accumulating in the dtype of ``rows``."""
    if stored.dtype.itemsize >= 4:
        stored = stored.astype(rows.dtype)
    precision = lax.Precision.HIGHEST if stored.dtype == jnp.float32 else None
    options = dict(precision=precision, preferred_element_type=rows.dtype)
    return jnp.einsum(equation, rows.astype(stored.dtype), stored, **options)

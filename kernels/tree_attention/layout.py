"""Rows, spans of the cache, and the merge of softmaxes: shared by the kernels of all devices.

Query heads of one group of keys become rows of one matmul: row ``g * N + n`` is node n of head g.
The prefix of a batch row is a span of cache blocks. If (batch row, head) pairs are too few for a
device, ``splits`` programs share a span, and their softmaxes are merged afterwards.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jspec.core.narrow import Narrow

Array = jax.Array
MASKED = -1e30  # score of a masked key
SLOT_MULTIPLE = 8  # cache slots: TPUs and GPUs read multiples of it in place
NARROW_MULTIPLE = 32  # the same for numbers of 8 bits
LOWEST = -1e29  # initial peak of a running softmax: masked scores have weight 0 even then
WORD = 32


class Span(NamedTuple):
    """The slots of the cache that each batch row reads; int32 [B] each."""

    first: Array  # first block that some query sees
    count: Array  # blocks from there on
    share: Array  # blocks per split
    length: Array  # later slots are never read
    seen_by_all: Array  # slots from here to ``length`` are in the window of every query


def refusal(
    tree_k: Array,
    cache_k: Array | Narrow | None,
    dtypes: tuple[str, ...],
) -> str | None:
    """Return the reason why no kernel takes the arguments, with the remedy, or None."""
    if cache_k is None or cache_k.shape[2] == 0:
        return "needs a cache: a tree alone is one small softmax"
    if cache_k.dtype.name not in dtypes or tree_k.dtype != cache_k.dtype:
        return (
            f"takes keys and values in {' or '.join(dtypes)}, the tree's like the cache's, not "
            f"{tree_k.dtype.name} beside {cache_k.dtype.name}"
        )
    multiple = NARROW_MULTIPLE if isinstance(cache_k, Narrow) else SLOT_MULTIPLE
    if cache_k.shape[2] % multiple:
        return (
            f"needs a cache of a multiple of {multiple} slots, not {cache_k.shape[2]}, which "
            "would be copied in every call; allocate some more"
        )
    return None


def span(
    length: Array, block: int, splits: int, window: int | None, positions: Array | None
) -> Span:
    """Return the span of every row in blocks of ``block`` slots; a window needs ``positions``."""
    if window is None:
        first = seen_by_all = jnp.zeros_like(length)
    else:
        first = jnp.clip(positions.min(1) - window + 1, 0) // block
        seen_by_all = jnp.clip(positions.max(1) - window + 1, 0)
    end = (length + block - 1) // block
    count = jnp.maximum(end - first, 0)
    first = jnp.where(count > 0, first, 0)  # the window may start past the last committed slot
    return Span(first, count, (count + splits - 1) // splits, length, seen_by_all)


def queries(q: Array, kv_heads: int, scale: float, dtype: jnp.dtype) -> Array:
    """Return scaled rows [B, Hkv, G*N, D] of [B, H, N, D], in the dtype of the keys."""
    batch, heads, nodes, dim = q.shape
    wide = q.astype(jnp.promote_types(q.dtype, jnp.float32)) * scale
    return wide.astype(dtype).reshape(batch, kv_heads, heads // kv_heads * nodes, dim)


def known_bits(ancestors: Array, keys: int) -> Array:
    """Clear the bits past the last key, since keys may be padded."""
    mask = np.full(ancestors.shape[-1], 2**WORD - 1, np.uint32)
    mask[-1] >>= -keys % WORD
    return ancestors & mask


def per_row(values: Array, group: int) -> Array:
    """Repeat values of nodes [B, N, ...] for rows: [B, G*N, ...]."""
    return jnp.tile(values, (1, group, *[1] * (values.ndim - 2)))


def pad_to(x: Array, axis: int, multiple: int) -> Array:
    """Pad ``axis`` with zeros at its end, up to a multiple."""
    padding = [(0, 0)] * x.ndim
    padding[axis] = (0, -x.shape[axis] % multiple)
    return jnp.pad(x, padding)


def merge(
    mixed: Array, log_total: Array, sinks: Array | None = None, nodes: int | None = None
) -> Array:
    """Join softmaxes over C parts of the keys: [B, Hkv, R, D].

    ``mixed`` [B, Hkv, C, R, D] are the results of the parts, ``log_total`` [B, Hkv, C, R] the logs
    of their sums of exponentials, ``MASKED`` for a part without visible keys. The ``sinks`` of the
    reference are one more part, whose result is 0; they need the number of ``nodes``.
    """
    batch, kv_heads, parts, rows = log_total.shape
    if sinks is not None:
        sinks = sinks.astype(log_total.dtype).reshape(1, kv_heads, 1, -1)
        sinks = pad_to(jnp.repeat(sinks, nodes, axis=3), 3, rows)
        sinks = jnp.broadcast_to(sinks, (batch, kv_heads, 1, rows))
        log_total = jnp.concatenate([log_total, sinks], axis=2)
    share = jax.nn.softmax(log_total, axis=2)[:, :, :parts]
    return (mixed * share[..., None]).sum(2)

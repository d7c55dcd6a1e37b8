"""What the kernels of the devices share: rows, spans of the cache, and the merge of two passes.

Query heads of one group of keys become rows of one matmul: row ``g * N + n`` is node n of head g.
The prefix of a batch row is a span of cache blocks; where there are too few (batch row, head)
pairs to fill a device, ``splits`` programs share a span, and their softmaxes are merged after.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

Array = jax.Array
MASKED = -1e30  # score of a key that is not seen
SLOT_MULTIPLE = 8  # slots of a cache that TPUs and GPUs read where it lies
LOWEST = -1e29  # first peak of a running softmax: masked scores weigh exactly 0 even beside it
WORD = 32


class Span(NamedTuple):
    """Which slots of the cache a row of the batch reads; int32 [B] each."""

    first: Array  # first block of the cache that any query sees
    count: Array  # blocks from there on
    share: Array  # blocks that each split takes
    length: Array  # slots past it are never read
    seen_by_all: Array  # slots from here to ``length`` are in the window of every query


def refusal(tree_k: Array, cache_k: Array | None, dtypes: tuple[str, ...]) -> str | None:
    """What neither kernel can do, and the remedy."""
    if cache_k is None or cache_k.shape[2] == 0:
        return "needs a cache: a tree alone is one small softmax"
    if cache_k.dtype.name not in dtypes or tree_k.dtype != cache_k.dtype:
        return (
            f"takes keys and values in {' or '.join(dtypes)}, the tree's like the cache's, not "
            f"{tree_k.dtype.name} beside {cache_k.dtype.name}"
        )
    if cache_k.shape[2] % SLOT_MULTIPLE:
        return (
            f"needs a cache of a multiple of {SLOT_MULTIPLE} slots, not {cache_k.shape[2]}, which "
            "would be copied in every call; allocate some more"
        )
    return None


def span(
    length: Array, block: int, splits: int, window: int | None, positions: Array | None
) -> Span:
    """The span of every row, in blocks of ``block`` slots; ``positions`` [B, N] with a window."""
    if window is None:
        first = seen_by_all = jnp.zeros_like(length)
    else:
        first = jnp.clip(positions.min(1) - window + 1, 0) // block
        seen_by_all = jnp.clip(positions.max(1) - window + 1, 0)
    end = (length + block - 1) // block
    count = jnp.maximum(end - first, 0)
    first = jnp.where(count > 0, first, 0)  # a window past all that is committed starts nowhere
    return Span(first, count, (count + splits - 1) // splits, length, seen_by_all)


def queries(q: Array, kv_heads: int, scale: float, dtype: jnp.dtype) -> Array:
    """[B, H, N, D] to scaled rows [B, Hkv, G*N, D] in the dtype of the keys."""
    batch, heads, nodes, dim = q.shape
    wide = q.astype(jnp.promote_types(q.dtype, jnp.float32)) * scale
    return wide.astype(dtype).reshape(batch, kv_heads, heads // kv_heads * nodes, dim)


def known_bits(ancestors: Array, keys: int) -> Array:
    """The words without the bits past the last key, since keys may be padded."""
    keep = np.full(ancestors.shape[-1], 2**WORD - 1, np.uint32)
    keep[-1] >>= -keys % WORD
    return ancestors & keep


def per_row(values: Array, group: int) -> Array:
    """[B, N, ...] of nodes to [B, G*N, ...] of rows."""
    return jnp.tile(values, (1, group, *[1] * (values.ndim - 2)))


def pad_to(x: Array, axis: int, multiple: int) -> Array:
    """Zeros after the end of ``axis``, up to a multiple."""
    missing = [(0, 0)] * x.ndim
    missing[axis] = (0, -x.shape[axis] % multiple)
    return jnp.pad(x, missing)


def merge(mixed: Array, log_total: Array) -> Array:
    """Joins softmaxes over C parts of the keys: [B, Hkv, R, D].

    ``mixed`` [B, Hkv, C, R, D] are the parts' own results, ``log_total`` [B, Hkv, C, R] the
    logarithms of their sums of exponentials, ``MASKED`` where a part saw no key.
    """
    share = jax.nn.softmax(log_total, axis=2)
    return (mixed * share[..., None]).sum(2)

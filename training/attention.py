"""Attention of training: whole windows at once, in blocks of queries."""

import functools as ft
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from jspec.models.decoder import Attend
from jspec.types import Array

QUERY_BLOCK = 64  # queries of one block
_FAR = -1e30  # a score that no exponential survives; finite, so that empty rows stay numbers


def attend_within(segments: Array | None, windows: tuple[int | None, ...] = ()) -> Attend:
    """Causal attention inside the segments int32 [B, T] of packed windows, for ``decoder.trunk``.

    Args:
      segments: None where each row is one segment.
      windows: sliding window of each layer; () for none.
    """

    def attend(layer: int, q: Array, k: Array, v: Array) -> Array:
        window = windows[layer] if windows else None
        return causal(q, k, v, segments=segments, window=window)

    return attend


def causal(
    q: Array,
    k: Array,
    v: Array,
    *,
    segments: Array | None = None,
    window: int | None = None,
    own: Sequence[tuple[Array, Array]] = (),
) -> Array:
    """Each query over the keys up to its own, and over keys that it alone sees.

    A block of queries meets only the keys up to its end, so nearly half of the square is never
    computed; each block is recomputed in the backward pass instead of being kept.

    Args:
      q: [B, H, T, D].
      k: [B, Hkv, T, D].
      v: [B, Hkv, T, D].
      segments: int32 [B, T]; a query sees only keys of its segment. None: all of them.
      window: how many tokens back a query sees, itself included; None for all.
      own: keys and values [B, Hkv, T, D] each, of which query i sees row i alone: the later steps
        of an unrolled head (training-time test, arXiv 2503.01840, section 3.2).

    Returns:
      [B, H, T, D].
    """
    batch, heads, length, width = q.shape
    kv_heads = k.shape[1]
    q = q.reshape(batch, kv_heads, heads // kv_heads, length, width) * width**-0.5
    blocks = []
    for start in range(0, length, QUERY_BLOCK):
        end = min(start + QUERY_BLOCK, length)
        rows = lambda x, start=start, end=end: x[..., start:end, :]
        first = 0 if window is None else max(start - window + 1, 0)
        labels = None if segments is None else (segments[:, start:end], segments[:, first:end])
        blocks.append(
            _block(
                (start - first, window),
                rows(q),
                k[..., first:end, :],
                v[..., first:end, :],
                labels,
                tuple((rows(key), rows(value)) for key, value in own),
            )
        )
    return jnp.concatenate(blocks, axis=-2).reshape(batch, heads, length, width)


@ft.partial(jax.checkpoint, static_argnums=0)
def _block(place: tuple[int, int | None], q: Array, k: Array, v: Array, labels, own) -> Array:
    """Queries [B, Hkv, G, Q, D], the first of which stands at key ``place[0]``."""
    start, window = place
    batch, kv_heads, groups, queries, width = q.shape
    rows = q.reshape(batch, kv_heads, groups * queries, width)
    scores = jnp.einsum("bhqd,bhkd->bhqk", rows, k)
    scores = scores.reshape(batch, kv_heads, groups, queries, -1)
    behind = start + jnp.arange(queries)[:, None] - jnp.arange(k.shape[2])
    visible = behind >= 0 if window is None else (behind >= 0) & (behind < window)
    if labels is not None:
        visible = visible & (labels[0][:, :, None] == labels[1][:, None, :])[:, None, None]
    scores = jnp.where(visible, scores, _FAR)
    alone = [jnp.einsum("bhgqd,bhqd->bhgq", q, key)[..., None] for key, _ in own]
    top = ft.reduce(jnp.maximum, alone, scores.max(-1, keepdims=True))
    top = jax.lax.stop_gradient(top)
    weights = jnp.exp(scores - top)
    mixed = jnp.einsum("bhqk,bhkd->bhqd", weights.reshape(batch, kv_heads, groups * queries, -1), v)
    mixed, total = mixed.reshape(q.shape), weights.sum(-1, keepdims=True)
    for score, (_, value) in zip(alone, own, strict=True):
        weight = jnp.exp(score - top)
        mixed, total = mixed + weight * value[:, :, None], total + weight
    return mixed / total  # one pass less than softmax

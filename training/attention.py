"""Attention of training: whole windows at once, in blocks of queries."""

import functools as ft
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jspec.core.types import Array
from jspec.models.decoder import Attend

QUERY_BLOCK = 128  # queries of one block
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
        first = 0 if window is None else max(start - window + 1, 0)
        labels = None if segments is None else (segments[:, start:end], segments[:, first:end])
        keys, values = k[..., first:end, :], v[..., first:end, :]
        blocks.append(_block((start - first, window), q[..., start:end, :], keys, values, labels))
    mixed = _Mixed(*(jnp.concatenate(parts, axis=-2) for parts in zip(*blocks, strict=True)))
    if own:
        mixed = _with_own(mixed, q, own)
    return (mixed.values / mixed.total).reshape(batch, heads, length, width)


def anchored(
    q: Array,
    k: Array,
    v: Array,
    anchors: Array,
    ahead: int,
    *,
    segments: Array | None = None,
    window: int | None = None,
    own: Sequence[tuple[Array, Array]] = (),
) -> Array:
    """Queries in any order, each over the keys up to one of its choice, and over its own.

    Args:
      q: [B, H, Q, D].
      k: [B, Hkv, T, D].
      v: [B, Hkv, T, D].
      anchors: int32 [B, Q]: the last key that a query sees.
      ahead: how many tokens behind its anchor a query stands, which counts for the window.
      segments: int32 [B, T]; a query sees only keys of its anchor's segment. None: all of them.
      window: as in ``causal``.
      own: keys and values [B, Hkv, Q, D] each, of which query i sees row i alone.

    Returns:
      [B, H, Q, D].
    """
    batch, heads, count, width = q.shape
    kv_heads = k.shape[1]
    q = q.reshape(batch, kv_heads, heads // kv_heads, count, width) * width**-0.5
    here = None if segments is None else jnp.take_along_axis(segments, anchors, 1)
    blocks = []
    for start in range(0, count, QUERY_BLOCK):
        rows = slice(start, start + QUERY_BLOCK)
        labels = None if segments is None else (here[:, rows], segments)
        block = _anchored_block((ahead, window), q[..., rows, :], k, v, anchors[:, rows], labels)
        blocks.append(block)
    mixed = _Mixed(*(jnp.concatenate(parts, axis=-2) for parts in zip(*blocks, strict=True)))
    mixed = _with_own(mixed, q, own) if own else mixed
    return (mixed.values / mixed.total).reshape(batch, heads, count, width)


class _Mixed(NamedTuple):
    """Values weighed by exp(score - top), which is not divided by the sum of the weights yet."""

    values: Array  # [B, Hkv, G, Q, D]
    total: Array  # [B, Hkv, G, Q, 1], sum of the weights
    top: Array  # [B, Hkv, G, Q, 1]


@ft.partial(jax.checkpoint, static_argnums=0)
def _block(place: tuple[int, int | None], q: Array, k: Array, v: Array, labels) -> _Mixed:
    """Queries [B, Hkv, G, Q, D], the first of which stands at key ``place[0]``."""
    start, window = place
    behind = start + jnp.arange(q.shape[-2])[:, None] - jnp.arange(k.shape[2])
    visible = behind >= 0 if window is None else (behind >= 0) & (behind < window)
    return _mix(q, k, v, visible, labels)


@ft.partial(jax.checkpoint, static_argnums=0)
def _anchored_block(
    place: tuple[int, int | None], q: Array, k: Array, v: Array, anchors: Array, labels
) -> _Mixed:
    """Queries [B, Hkv, G, Q, D], each ``place[0]`` behind its anchor, int32 [B, Q]."""
    ahead, window = place
    behind = (anchors[..., None] - jnp.arange(k.shape[2]))[:, None, None]
    visible = behind >= 0 if window is None else (behind >= 0) & (behind + ahead < window)
    return _mix(q, k, v, visible, labels)


def _mix(q: Array, k: Array, v: Array, visible: Array, labels) -> _Mixed:
    """``visible`` broadcasts to [B, Hkv, G, Q, T]; ``labels`` are segments of queries and keys."""
    batch, kv_heads, groups, queries, width = q.shape
    rows = q.reshape(batch, kv_heads, groups * queries, width)
    scores = jnp.einsum("bhqd,bhkd->bhqk", rows, k)
    scores = scores.reshape(batch, kv_heads, groups, queries, -1)
    if labels is not None:
        visible = visible & (labels[0][:, :, None] == labels[1][:, None, :])[:, None, None]
    scores = jnp.where(visible, scores, _FAR)
    top = jax.lax.stop_gradient(scores.max(-1, keepdims=True))
    weights = jnp.exp(scores - top)
    mixed = jnp.einsum("bhqk,bhkd->bhqd", weights.reshape(batch, kv_heads, groups * queries, -1), v)
    return _Mixed(mixed.reshape(q.shape), weights.sum(-1, keepdims=True), top)


def _with_own(mixed: _Mixed, q: Array, own: Sequence[tuple[Array, Array]]) -> _Mixed:
    """``mixed`` with the keys and values that each query alone sees.

    One query of every group at a time: then a key's gradient is a plain sum of theirs, where a sum
    along an axis of groups takes XLA's CPU backend several times as long.
    """
    one = lambda tree, group: jax.tree.map(lambda x: x[:, :, group], tree)
    groups = [_one_with_own(*one((mixed, q), group), own) for group in range(q.shape[2])]
    return jax.tree.map(lambda *parts: jnp.stack(parts, 2), *groups)


def _one_with_own(mixed: _Mixed, q: Array, own: Sequence[tuple[Array, Array]]) -> _Mixed:
    """The same without the axis G."""
    scores = [(q * key).sum(-1, keepdims=True) for key, _ in own]
    top = jax.lax.stop_gradient(ft.reduce(jnp.maximum, scores, mixed.top))
    before = jnp.exp(mixed.top - top)
    values, total = before * mixed.values, before * mixed.total
    for score, (_, value) in zip(scores, own, strict=True):
        weight = jnp.exp(score - top)
        values, total = values + weight * value, total + weight
    return _Mixed(values, total, top)

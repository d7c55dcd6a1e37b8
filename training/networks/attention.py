"""Attention of training: over whole windows, and of many short blocks over one context."""

import functools as ft
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jspec.core.types import Array
from jspec.models.blocks.attend import Attend

QUERY_BLOCK = 128  # queries whose scores exist at a time, at least
SCORES = 2**20  # scores of a head that exist at a time on an accelerator
MASKED = -1e30  # the exponential of this score is 0; finite, so rows without keys give no NaN


def attend_within(segments: Array | None) -> Attend:
    """Return causal attention inside ``segments`` int32 [B, T], for ``decoder.trunk``.

    None stands for one segment a row.
    """

    def attend(
        layer: int, q: Array, k: Array, v: Array, window: int | None = None, **scores: Any
    ) -> Array:
        del layer
        if k is None:
            raise ValueError(
                "layers that read the keys of another layer cannot run in training; take another "
                "target."
            )
        if "chunked" in scores:
            raise ValueError(
                "layers with chunked attention cannot run in training; take another target."
            )
        return causal(q, k, v, segments=segments, window=window, **scores)

    return attend


def causal(
    q: Array,
    k: Array,
    v: Array,
    *,
    anchors: Array | None = None,
    ahead: int = 0,
    segments: Array | None = None,
    window: int | None = None,
    scale: float | None = None,
    soft_cap: float | None = None,
    sinks: Array | None = None,
    later: Sequence[tuple[Array, Array]] = (),
    num_later: Array | None = None,
) -> Array:
    """Attend with each query to the keys up to its anchor, and to keys that it alone sees.

    Without ``anchors`` query i is anchored at key i, and a block of queries is only compared with
    the keys up to its end. Blocks are recomputed in the backward pass. A CPU holds a small block in
    its cache; accelerators have few large ones, because each adds to what is compiled.

    Args:
      q: [B, H, Q, D].
      k: [B, Hkv, T, D].
      v: [B, Hkv, T, D].
      anchors: int32 [B, Q], the last key that each query sees; None if Q = T and query i sees
        keys 0 to i.
      ahead: distance from the anchor of a query to its own position, which counts for the window.
      segments: int32 [B, T]; a query only sees keys of its anchor's segment. None for one segment.
      window: number of positions back that a query sees, its own included; None for all.
      scale: factor on the scores; None for ``D ** -0.5``.
      soft_cap: scores x become ``soft_cap * tanh(x / soft_cap)``, those of ``later`` excepted.
      sinks: [H], the score of a key of each head that every query sees and whose value is 0.
      later: keys and values [B, Hkv, Q, D] each, of which query i sees only row i: the later steps
        of an unrolled head (training-time test, arXiv 2503.01840, section 3.2).
      num_later: int32 [], how many of ``later`` there are; None for all.

    Returns:
      [B, H, Q, D].
    """
    batch, heads, count, width = q.shape
    kv_heads = k.shape[1]
    q = q.reshape(batch, kv_heads, heads // kv_heads, count, width)
    q = q * (width**-0.5 if scale is None else scale)
    if anchors is None:
        here, every = segments, jnp.arange(count)[None]
    else:
        here = None if segments is None else jnp.take_along_axis(segments, anchors, 1)
        every = anchors
    size = QUERY_BLOCK if _on_cpu() else max(QUERY_BLOCK, SCORES // k.shape[2])
    blocks = []
    for start in range(0, count, size):
        end, first, last = min(start + size, count), 0, k.shape[2]
        if anchors is None:
            first, last = 0 if window is None else max(start - window + 1, 0), end
        rows = q[..., start:end, :]
        keys, values = k[..., first:last, :], v[..., first:last, :]
        labels = None if segments is None else (here[:, start:end], segments[:, first:last])
        at = every[:, start:end] - first
        blocks.append(_block((ahead, window, soft_cap), rows, keys, values, at, labels))
    mixed = _Mixed(*(jnp.concatenate(parts, axis=-2) for parts in zip(*blocks, strict=True)))
    mixed = _with_later(mixed, q, later, num_later) if later else mixed
    mixed = mixed if sinks is None else _with_sinks(mixed, sinks)
    return (mixed.values / mixed.total).reshape(batch, heads, count, width)


class _Mixed(NamedTuple):
    """Values weighted by exp(score - top), not yet divided by the sum of the weights."""

    values: Array  # [B, Hkv, G, Q, D]
    total: Array  # [B, Hkv, G, Q, 1], sum of the weights
    top: Array  # [B, Hkv, G, Q, 1]


@ft.partial(jax.checkpoint, static_argnums=0)
def _block(
    settings: tuple[int, int | None, float | None],
    q: Array,
    k: Array,
    v: Array,
    anchors: Array,
    labels: tuple[Array, Array] | None,
) -> _Mixed:
    """Attend with queries [B, Hkv, G, Q, D], each ``ahead`` behind its anchor, int32 [B or 1, Q].

    ``labels`` are the segments of queries and keys, or None.
    """
    ahead, window, soft_cap = settings
    behind = (anchors[..., None] - jnp.arange(k.shape[2]))[:, None, None]
    visible = behind >= 0 if window is None else (behind >= 0) & (behind + ahead < window)
    batch, kv_heads, groups, queries, width = q.shape
    rows = q.reshape(batch, kv_heads, groups * queries, width)
    scores = jnp.einsum("bhqd,bhkd->bhqk", rows, k)
    scores = scores.reshape(batch, kv_heads, groups, queries, -1)
    if soft_cap is not None:
        scores = soft_cap * jnp.tanh(scores / soft_cap)
    if labels is not None:
        visible = visible & (labels[0][:, :, None] == labels[1][:, None, :])[:, None, None]
    scores = jnp.where(visible, scores, MASKED)
    top = jax.lax.stop_gradient(scores.max(-1, keepdims=True))
    weights = jnp.exp(scores - top)
    mixed = jnp.einsum("bhqk,bhkd->bhqd", weights.reshape(batch, kv_heads, groups * queries, -1), v)
    return _Mixed(mixed.reshape(q.shape), weights.sum(-1, keepdims=True), top)


def _with_sinks(mixed: _Mixed, sinks: Array) -> _Mixed:
    """Add a key of score ``sinks`` [H] and of value 0 to the rows of every head."""
    sinks = sinks.astype(mixed.top.dtype).reshape(1, *mixed.top.shape[1:3], 1, 1)
    top = jax.lax.stop_gradient(jnp.maximum(mixed.top, sinks))
    before = jnp.exp(mixed.top - top)
    return _Mixed(before * mixed.values, before * mixed.total + jnp.exp(sinks - top), top)


def _with_later(
    mixed: _Mixed, q: Array, later: Sequence[tuple[Array, Array]], count: Array | None
) -> _Mixed:
    """Add the keys and values that each query alone sees.

    On a CPU it takes one query of every group at a time: then the gradient of a key is a plain sum.
    A sum along an axis of groups takes XLA's CPU backend several times as long.
    """
    if not _on_cpu():
        later = [(key[:, :, None], value[:, :, None]) for key, value in later]
        return _beside(mixed, q, later, count)
    groups = [
        _beside(_Mixed(*(x[:, :, group] for x in mixed)), q[:, :, group], later, count)
        for group in range(q.shape[2])
    ]
    return jax.tree.map(lambda *parts: jnp.stack(parts, 2), *groups)


def _beside(
    mixed: _Mixed, q: Array, later: Sequence[tuple[Array, Array]], count: Array | None
) -> _Mixed:
    """Do the same for queries whose axes are those of the keys."""
    scores = [(q * key).sum(-1, keepdims=True) for key, _ in later]
    if count is not None:
        scores = [jnp.where(step < count, score, MASKED) for step, score in enumerate(scores)]
    top = jax.lax.stop_gradient(ft.reduce(jnp.maximum, scores, mixed.top))
    before = jnp.exp(mixed.top - top)
    values, total = before * mixed.values, before * mixed.total
    for score, (_, value) in zip(scores, later, strict=True):
        weight = jnp.exp(score - top)
        values, total = values + weight * value, total + weight
    return _Mixed(values, total, top)


def _on_cpu() -> bool:
    return jax.default_backend() == "cpu"


def over_context(
    q: Array,
    k: Array,
    v: Array,
    context_k: Array,
    context_v: Array,
    anchors: Array,
    segments: Array,
    *,
    causal: bool,
    window: int | None = None,
) -> Array:
    """Attend with each slot of a block to the context before its anchor, and to its block.

    Only the scores of a few blocks exist at a time; the backward pass computes them again.

    Args:
      q: [B, H, A * S, D], block by block.
      k: [B, Hkv, A * S, D], of the slots.
      v: [B, Hkv, A * S, D].
      context_k: [B, Hkv, T, D].
      context_v: [B, Hkv, T, D].
      anchors: int32 [B, A], positions in the context; slot i of a block stands i positions later.
      segments: int32 [B, T]; a block only sees the segment of its anchor.
      causal: whether a slot sees only earlier slots of its block.
      window: number of positions back that a slot sees, its own included; None for all.

    Returns:
      [B, H, A * S, D].
    """
    batch, heads, rows, width = q.shape
    kv_heads, count = k.shape[1], anchors.shape[1]
    slots = rows // count
    together = max(1, min(count, QUERY_BLOCK // slots))
    missing = -count % together

    def pieces(x: Array, *axes: int) -> Array:
        """Reshape [B, ..., A * S, D] to [A / c, B, ..., c, S, D]."""
        x = x.reshape(batch, *axes, count, slots, width)
        x = jnp.pad(x, [(0, 0)] * (x.ndim - 3) + [(0, missing), (0, 0), (0, 0)])
        x = x.reshape(*x.shape[:-3], -1, together, slots, width)
        return jnp.moveaxis(x, -4, 0)

    at = jnp.pad(anchors, ((0, 0), (0, missing))).reshape(batch, -1, together).swapaxes(0, 1)
    q = pieces(q * width**-0.5, kv_heads, heads // kv_heads)
    run = ft.partial(_some_blocks, context_k, context_v, segments, causal, window)
    mixed = jax.lax.map(run, (q, pieces(k, kv_heads), pieces(v, kv_heads), at))
    mixed = jnp.moveaxis(mixed, 0, -4)  # [B, Hkv, G, A / c, c, S, D]
    mixed = mixed.reshape(*mixed.shape[:3], -1, slots, width)[..., :count, :, :]
    return mixed.reshape(batch, heads, rows, width)


@ft.partial(jax.checkpoint, static_argnums=(3, 4))
def _some_blocks(context_k, context_v, segments, causal, window, blocks) -> Array:
    """Attend with the queries [B, Hkv, G, c, S, D] of some blocks."""
    q, k, v, anchors = blocks
    slots, position = q.shape[-2], jnp.arange(context_k.shape[2])
    segment = jnp.take_along_axis(segments, anchors, 1)[..., None]
    visible = (position < anchors[..., None]) & (segments[:, None] == segment)
    visible = jnp.broadcast_to(visible[:, :, None], (*anchors.shape, slots, position.size))
    if window is not None:
        here = anchors[..., None] + jnp.arange(slots)
        visible &= position > here[..., None] - window
    context = jnp.einsum("bhgcsd,bhtd->bhgcst", q, context_k)
    context = jnp.where(visible[:, None, None], context, MASKED)
    inside = jnp.einsum("bhgcsd,bhcud->bhgcsu", q, k)
    behind = jnp.arange(slots)[:, None] - jnp.arange(slots)
    visible = behind >= 0 if causal else jnp.full(behind.shape, True)
    inside = jnp.where(visible if window is None else visible & (behind < window), inside, MASKED)
    weights = jax.nn.softmax(jnp.concatenate([context, inside], -1), -1)
    context, inside = jnp.split(weights, [position.size], -1)
    return jnp.einsum("bhgcst,bhtd->bhgcsd", context, context_v) + jnp.einsum(
        "bhgcsu,bhcud->bhgcsd", inside, v
    )

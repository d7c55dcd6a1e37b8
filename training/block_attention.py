"""Attention of many short blocks over one context, a few blocks at a time."""

import functools as ft

import jax
import jax.numpy as jnp

from jspec.core.types import Array
from training.attention import MASKED

QUERIES = 128  # of the blocks that are computed together


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
    together = max(1, min(count, QUERIES // slots))
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

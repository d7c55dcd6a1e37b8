"""Attention of many short blocks over one context, a few blocks at a time."""

import functools as ft

import jax
import jax.numpy as jnp

from jspec.core.types import Array

QUERIES = 128  # of the blocks that are computed together
_FAR = -1e30  # a score that no exponential survives; finite, so that empty rows stay numbers


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
    """Each slot of a block over the context before its anchor, and over the block's own slots.

    Never more scores are held than of a few blocks, whose backward pass computes them again.

    Args:
      q: [B, H, A * S, D], block by block.
      k: [B, Hkv, A * S, D], of the slots.
      v: [B, Hkv, A * S, D].
      context_k: [B, Hkv, T, D].
      context_v: [B, Hkv, T, D].
      anchors: int32 [B, A], places in the context; slot i of a block stands i places on.
      segments: int32 [B, T]; a block sees only the segment of its anchor.
      causal: whether a slot sees only those of its block before it.
      window: how many places back a slot sees, its own included; None for all.

    Returns:
      [B, H, A * S, D].
    """
    batch, heads, rows, width = q.shape
    kv_heads, count = k.shape[1], anchors.shape[1]
    slots = rows // count
    together = max(1, min(count, QUERIES // slots))
    missing = -count % together

    def pieces(x: Array, *axes: int) -> Array:
        """[B, ..., A * S, D] to [A / c, B, ..., c, S, D]."""
        x = x.reshape(batch, *axes, count, slots, width)
        x = jnp.pad(x, [(0, 0)] * (x.ndim - 3) + [(0, missing), (0, 0), (0, 0)])
        x = x.reshape(*x.shape[:-3], -1, together, slots, width)
        return jnp.moveaxis(x, -4, 0)

    at = jnp.pad(anchors, ((0, 0), (0, missing))).reshape(batch, -1, together).swapaxes(0, 1)
    run = ft.partial(_pieces_of, context_k, context_v, segments, causal, window)
    mixed = jax.lax.map(
        run,
        (
            pieces(q * width**-0.5, kv_heads, heads // kv_heads),
            pieces(k, kv_heads),
            pieces(v, kv_heads),
            at,
        ),
    )
    mixed = jnp.moveaxis(mixed, 0, -4)  # [B, Hkv, G, A / c, c, S, D]
    mixed = mixed.reshape(*mixed.shape[:3], -1, slots, width)[..., :count, :, :]
    return mixed.reshape(batch, heads, rows, width)


@ft.partial(jax.checkpoint, static_argnums=(3, 4))
def _pieces_of(context_k, context_v, segments, causal, window, given) -> Array:
    """Queries [B, Hkv, G, c, S, D] of some blocks."""
    q, k, v, anchors = given
    slots, place = q.shape[-2], jnp.arange(context_k.shape[2])
    own = jnp.take_along_axis(segments, anchors, 1)[..., None]
    seen = (place < anchors[..., None]) & (segments[:, None] == own)
    seen = jnp.broadcast_to(seen[:, :, None], (*anchors.shape, slots, place.size))
    if window is not None:
        here = anchors[..., None] + jnp.arange(slots)
        seen &= place > here[..., None] - window
    far = jnp.einsum("bhgcsd,bhtd->bhgcst", q, context_k)
    far = jnp.where(seen[:, None, None], far, _FAR)
    near = jnp.einsum("bhgcsd,bhcud->bhgcsu", q, k)
    behind = jnp.arange(slots)[:, None] - jnp.arange(slots)
    visible = behind >= 0 if causal else jnp.full(behind.shape, True)
    near = jnp.where(visible if window is None else visible & (behind < window), near, _FAR)
    weights = jax.nn.softmax(jnp.concatenate([far, near], -1), -1)
    far, near = jnp.split(weights, [place.size], -1)
    return jnp.einsum("bhgcst,bhtd->bhgcsd", far, context_v) + jnp.einsum(
        "bhgcsu,bhcud->bhgcsd", near, v
    )

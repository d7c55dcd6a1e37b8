"""Attention of a chain that sums in the order of absolute positions, in plain jnp.

The sum runs block by block from position 0, whichever positions are committed. A block takes each
of its slots from the cache or from the chain. So a token's sum is the same, bit for bit, in every
pass. All products have one shape, ``TILE`` queries by ``BLOCK`` slots, since most backends round
matmuls of different shapes differently.
"""

import functools
from collections.abc import Callable

import jax.numpy as jnp
from jax import lax

from jspec.kernels.tree_attention.softmax import MASKED, Array, Softmax, dot, with_sinks

TILE = 16  # queries at a time
BLOCK = 64  # slots at a time; the slots of a cache are a multiple


def attention(
    q: Array,
    chain_k: Array,
    chain_v: Array,
    cache_k: Array,
    cache_v: Array,
    length: Array,
    *,
    scale: float | None = None,
    window: int | None = None,
    soft_cap: float | None = None,
    sinks: Array | None = None,
) -> Array:
    """Attend to all positions up to the query's own, in float32.

    Arguments and result are as for ``reference.tree_attention``. Query n of a row stands at
    position ``length + n``, at most S, and S is a multiple of ``BLOCK``.
    """
    batch, heads, nodes, dim = q.shape
    if sinks is not None:
        sinks = jnp.repeat(sinks.reshape(1, chain_k.shape[1], -1), TILE, axis=2)
    kv_heads, dtype = chain_k.shape[1], jnp.promote_types(q.dtype, jnp.float32)
    tiles = -(-nodes // TILE)
    scale = dim**-0.5 if scale is None else scale
    q = jnp.pad(q.astype(dtype) * scale, ((0, 0), (0, 0), (0, tiles * TILE - nodes), (0, 0)))
    q = q.reshape(batch, kv_heads, heads // kv_heads, tiles, TILE, dim)
    # Query heads of one group become rows of one matmul: [tiles, B, Hkv, G * TILE, D].
    q = jnp.moveaxis(q, 3, 0).reshape(tiles, batch, kv_heads, -1, dim)
    positions = length[:, None] + jnp.minimum(jnp.arange(tiles * TILE), nodes - 1)
    positions = jnp.moveaxis(positions.reshape(batch, tiles, TILE), 1, 0)

    keys = functools.partial(_slots, length, cache_k, chain_k)
    values = functools.partial(_slots, length, cache_v, chain_v)
    # [tiles, B, Hkv, G * TILE, D]
    attend = functools.partial(
        _attend, keys=keys, values=values, window=window, soft_cap=soft_cap, sinks=sinks
    )
    out = lax.map(lambda tile: attend(*tile), (q, positions))
    out = out.reshape(tiles, batch, kv_heads, heads // kv_heads, TILE, dim)
    return jnp.moveaxis(out, 0, 3).reshape(batch, heads, tiles * TILE, dim)[:, :, :nodes]


def _slots(length: Array, cached: Array, chain: Array, start: Array) -> Array:
    """Positions ``start`` to ``start + BLOCK``, from cache or chain: [B, Hkv, BLOCK, D]."""
    index = start + jnp.arange(BLOCK) - length[:, None]  # [B, BLOCK], in the chain
    clipped = jnp.clip(index, 0, chain.shape[2] - 1)[:, None, :, None]
    fresh = jnp.take_along_axis(chain, clipped, axis=2).astype(cached.dtype)
    committed = lax.dynamic_slice_in_dim(cached, start, BLOCK, axis=2)
    return jnp.where((index >= 0)[:, None, :, None], fresh, committed)


def _attend(
    rows: Array,
    positions: Array,
    *,
    keys: Callable[[Array], Array],
    values: Callable[[Array], Array],
    window: int | None,
    soft_cap: float | None,
    sinks: Array | None,
) -> Array:
    """Attend with one tile of ``rows`` [B, Hkv, G * TILE, D] at ``positions`` [B, TILE]."""

    def step(block: Array, carry):
        peak, total, mixed = carry
        start = block * BLOCK
        slots = start + jnp.arange(BLOCK)
        seen = slots <= positions[:, :, None]  # [B, TILE, BLOCK]
        if window is not None:
            seen &= slots > positions[:, :, None] - window
        seen = jnp.tile(seen, (1, rows.shape[2] // TILE, 1))[:, None]
        scores = dot("bhrd,bhsd->bhrs", rows, keys(start))
        if soft_cap is not None:
            scores = soft_cap * jnp.tanh(scores / soft_cap)
        scores = jnp.where(seen, scores, MASKED)
        new_peak = jnp.maximum(peak, scores.max(-1))
        decay = jnp.exp(peak - new_peak)
        weights = jnp.where(seen, jnp.exp(scores - new_peak[..., None]), 0)
        update = dot("bhrs,bhsd->bhrd", weights, values(start))
        return new_peak, total * decay + _by_halves(weights), mixed * decay[..., None] + update

    peak, zeros = jnp.full(rows.shape[:-1], MASKED, rows.dtype), jnp.zeros_like(rows)
    # Blocks past a query leave its sums unchanged, to the bit.
    empty = peak, jnp.zeros_like(peak), zeros
    softmax = Softmax(*lax.fori_loop(0, positions.max() // BLOCK + 1, step, empty))
    if sinks is not None:
        softmax = with_sinks(softmax, sinks)
    return softmax.mixed / softmax.total[..., None]


def _by_halves(x: Array) -> Array:
    """Sum over the last axis, a power of two long; the order of XLA's sum depends on the shape."""
    while x.shape[-1] > 1:
        half = x.shape[-1] // 2
        x = x[..., :half] + x[..., half:]
    return x[..., 0]

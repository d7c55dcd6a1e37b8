"""The only door to kernels: one operation, one function.

``implementation=None`` takes the default of the device, a name forces one.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax

from jspec.kernels.tree_attention import reference
from jspec.types import Array

# XLA's CPU matmul for bfloat16 reaches its fast path from two rows on, and gives rows that are
# bit-equal from three rows on; one padded row count makes a token's logits independent of N.
_BFLOAT16_ROWS = 4


def linear(x: Array, w: Array, *, transposed: bool = False) -> Array:
    """``x @ w`` for x [..., I] and w [I, O], accumulated and returned in float32 (or wider).

    ``transposed`` takes w as [O, I], which spares a tied head a copy of the embedding. A narrow
    ``w`` is never widened in memory: x is rounded to its dtype instead. float32 weights multiply at
    full precision on every device.
    """
    dtype = jnp.promote_types(w.dtype, jnp.float32)
    rows = x.reshape(-1, x.shape[-1]).astype(w.dtype)
    count = rows.shape[0]
    if w.dtype == jnp.bfloat16 and count < _BFLOAT16_ROWS:
        rows = jnp.pad(rows, ((0, _BFLOAT16_ROWS - count), (0, 0)))
    precision = lax.Precision.HIGHEST if w.dtype == jnp.float32 else None
    contracted = (((1,), (1 if transposed else 0,)), ((), ()))
    out = lax.dot_general(rows, w, contracted, precision=precision, preferred_element_type=dtype)
    return out[:count].reshape(*x.shape[:-1], out.shape[-1])


def attention(
    q: Array,
    tree_k: Array,
    tree_v: Array,
    ancestors: Array,
    cache_k: Array | None,
    cache_v: Array | None,
    length: Array,
    *,
    scale: float,
    window: int | None = None,
    positions: Array | None = None,
    soft_cap: float | None = None,
    implementation: str | None = None,
) -> Array:
    """Attention of tree nodes over the committed prefix and each other; see the reference.

    ``implementation`` forces ``"reference"`` (XLA), ``"pallas_tpu"`` or ``"pallas_gpu"`` (Hopper).
    None takes the default of the device, which is the reference everywhere: a kernel becomes the
    default of a device, for the shapes where it wins, once ``benchmarks/kernels.py`` has a row
    measured there that beats XLA, and there is none yet.

    Raises:
      ValueError: ``implementation`` is unknown or does not take these shapes or dtypes,
        ``ancestors`` are not words, or ``window`` comes without ``positions``.
    """
    words = -(-tree_k.shape[2] // 32)
    if ancestors.dtype != jnp.uint32 or ancestors.shape != (q.shape[0], q.shape[2], words):
        raise ValueError(
            f"ancestors is {ancestors.dtype}{list(ancestors.shape)}, but {tree_k.shape[2]} tree "
            f"keys need uint32{[q.shape[0], q.shape[2], words]}; topology.pack_bits makes words of "
            "a mask."
        )
    if window is not None and positions is None:
        raise ValueError(f"window={window} needs the positions of the queries; pass positions.")
    kernel = _attention_kernel(implementation, q, tree_k, cache_k)

    def run(*arrays: Array, **blocks: int) -> Array:
        options = dict(scale=scale, window=window, positions=positions, soft_cap=soft_cap)
        return kernel.tree_attention(*arrays, **options, **blocks)

    arrays = (q, tree_k, tree_v, ancestors, cache_k, cache_v, length)
    if kernel is not reference or cache_k is None:
        return run(*arrays)
    rows, slots = q.shape[0] * q.shape[1] * q.shape[2], cache_k.shape[2]
    on_accelerator = functools.partial(run, block=reference.accelerator_block(slots, rows))
    return lax.platform_dependent(*arrays, cpu=run, default=on_accelerator)


def _attention_kernel(name: str | None, q: Array, tree_k: Array, cache_k: Array | None):
    """The module of an implementation. Pallas is imported by those who ask for it only."""
    if name in (None, "reference"):
        return reference
    if name == "pallas_tpu":
        from jspec.kernels.tree_attention import pallas_tpu as kernel
    elif name == "pallas_gpu":
        from jspec.kernels.tree_attention import pallas_gpu as kernel
    else:
        raise ValueError(
            f"implementation={name!r} is not known; use None, 'reference', 'pallas_tpu' or "
            "'pallas_gpu'."
        )
    refusal = kernel.refusal(q, tree_k, cache_k)
    if refusal:
        raise ValueError(f"implementation={name!r} {refusal}; 'reference' takes everything.")
    return kernel


def default_backend() -> str:
    """The platform programs run on: ``cpu``, ``gpu`` or ``tpu``."""
    return jax.default_backend()

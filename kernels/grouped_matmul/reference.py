"""The specification of the grouped matrix product, dense and unoptimised."""

import jax
import jax.numpy as jnp

Array = jax.Array


def grouped_matmul(x: Array, weights: Array, sizes: Array) -> Array:
    """Return the product of each row with the matrix of its group.

    Args:
      x: [R, K], sorted by group; rounded to the dtype of ``weights``.
      weights: [E, K, N].
      sizes: int32 [E], the number of rows of each group.

    Returns:
      [R, N], accumulated in float32 (or wider). Rows behind the last group are zeros.
    """
    dtype = jnp.promote_types(weights.dtype, jnp.float32)
    ends, row = jnp.cumsum(sizes), jnp.arange(len(x))[:, None]
    is_of = ((row >= ends - sizes) & (row < ends)).astype(dtype)  # [R, E]
    x = x.astype(weights.dtype).astype(dtype)
    precision = jax.lax.Precision.HIGHEST
    products = jnp.einsum("rk,ekn->ren", x, weights.astype(dtype), precision=precision)
    return (products * is_of[..., None]).sum(1)

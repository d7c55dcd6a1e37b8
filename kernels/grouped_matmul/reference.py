"""The specification of the grouped matrix product, dense and unoptimised."""

import functools

import jax
import jax.numpy as jnp

from jspec.kernels.quantized_matmul import reference as quantised

Array = jax.Array


def grouped_matmul(
    x: Array,
    weights: Array,
    sizes: Array,
    scales: Array | None = None,
    zeros: Array | None = None,
) -> Array:
    """Return the product of each row with the matrix of its group.

    Args:
      x: [R, K], sorted by group; rounded to the dtype of ``weights``, or to bfloat16 if these are
        quantised.
      weights: [E, K, N]; with ``scales`` values [E, N, K] or [E, K, N], see ``quantized_matmul``.
      sizes: int32 [E], the number of rows of each group.
      scales: [E, N, G] or [E, G, N], as ``weights`` are; None for floats.
      zeros: whole numbers, of the shape of ``scales``, subtracted from values; None for none.

    Returns:
      [R, N], accumulated in float32 (or wider). Rows behind the last group are zeros. A kernel may
      scale values instead of sums, and round them to bfloat16.
    """
    ends, row = jnp.cumsum(sizes), jnp.arange(len(x))[:, None]
    is_of = (row >= ends - sizes) & (row < ends)  # [R, E]
    if scales is not None:
        multiply = functools.partial(quantised.quantized_matmul, x)
        products = jax.vmap(multiply, out_axes=1)(weights, scales, zeros)
    else:
        dtype = jnp.promote_types(weights.dtype, jnp.float32)
        x, precision = x.astype(weights.dtype).astype(dtype), jax.lax.Precision.HIGHEST
        products = jnp.einsum("rk,ekn->ren", x, weights.astype(dtype), precision=precision)
    return (products * is_of.astype(products.dtype)[..., None]).sum(1)

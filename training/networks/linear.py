"""Linear maps of training: a bfloat16 matmul that is fast on a CPU, forward and backward."""

import jax
import jax.numpy as jnp
from jax.experimental.layout import Layout, with_layout_constraint

from jspec.core.types import Array


@jax.custom_vjp
def linear_bfloat16(x: Array, weight: Array) -> Array:
    """Multiply x [..., M] by weight [M, N]: bfloat16 factors, float32 sums and result."""
    return _matmul_bfloat16(x, weight)[0]


def _matmul_bfloat16(x: Array, weight: Array):
    rows = x.reshape(-1, x.shape[-1]).astype(jnp.bfloat16)  # 2-D: batched forms miss the AMX path
    weight = weight.astype(jnp.bfloat16)
    out = jnp.matmul(rows, weight, preferred_element_type=jnp.float32)
    return out.reshape(*x.shape[:-1], weight.shape[1]), (rows, weight)


def _matmul_bfloat16_back(saved, grad: Array):
    rows, weight = saved
    grad_rows = grad.reshape(-1, grad.shape[-1]).astype(jnp.bfloat16)
    grad_x = jax.lax.dot_general(
        grad_rows, weight, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32
    )
    return grad_x.reshape(*grad.shape[:-1], rows.shape[1]), _weight_grad(rows, grad_rows)


def _weight_grad(rows: Array, grad_rows: Array) -> Array:
    """Multiply the transpose of rows [R, M] by grad_rows [R, N].

    The transpose is materialised: a contraction over rows is five times slower on a CPU.
    """
    transposed = with_layout_constraint(rows.T, Layout((0, 1)))
    out = jnp.matmul(transposed, grad_rows, preferred_element_type=jnp.float32)
    # A tied head transposes the result. XLA's CPU backend has no bfloat16 kernel for a matmul with
    # that transpose folded in, and fails at run time.
    return with_layout_constraint(out, Layout((0, 1)))


linear_bfloat16.defvjp(_matmul_bfloat16, _matmul_bfloat16_back)


def linear_float32(x: Array, weight: Array) -> Array:
    """Multiply x [..., M] by weight [M, N] in float32."""
    return x @ weight


LINEARS = {"bfloat16": linear_bfloat16, "float32": linear_float32}

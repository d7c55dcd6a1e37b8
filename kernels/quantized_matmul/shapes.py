"""Shapes of real models' matrices, for tests and ahead-of-time compilation."""

from typing import NamedTuple

import jax
import jax.numpy as jnp


class Case(NamedTuple):
    """A matrix [O, I] with G groups of inputs, and the rows of all tokens of a pass."""

    values: str  # dtype
    outputs: int
    inputs: int
    groups: int
    rows: int
    has_zeros: bool = False
    scales: str = "bfloat16"  # dtype of those of several groups

    def arrays(self, axis: int = -1) -> tuple[jax.ShapeDtypeStruct | None, ...]:
        """Return the shapes of the arguments; with ``axis`` -2 the matrix is [I, O]."""
        shape = jax.ShapeDtypeStruct
        matrix, factors = (self.outputs, self.inputs), (self.outputs, self.groups)
        if axis == -2:
            matrix, factors = matrix[::-1], factors[::-1]
        return (
            shape((self.rows, self.inputs), jnp.bfloat16),
            shape(matrix, self.values),
            shape(factors, self.scales if self.groups > 1 else jnp.float32),
            shape(factors, jnp.bfloat16) if self.has_zeros else None,
        )


CASES = {
    "Llama-3.1-8B, int4, qkv": Case("int4", 6144, 4096, 32, 40),
    "Llama-3.1-8B, int4, down, one token": Case("int4", 4096, 14336, 112, 1),
    "Llama-3.1-8B, AWQ, gate and up": Case("int4", 28672, 4096, 32, 128, has_zeros=True),
    "Llama-3.1-8B, Q4_0, out": Case("int4", 4096, 4096, 128, 40),
    "Llama-3.1-8B, Q8_0, down": Case("int8", 4096, 14336, 448, 8),
    "Llama-3.1-8B, int8, out": Case("int8", 4096, 4096, 1, 40),
    "Llama-3.1-8B, fp8, gate and up": Case("float8_e4m3fn", 28672, 4096, 1, 40),
    "Qwen3-8B, fp8 blocks, down": Case("float8_e4m3fn", 4096, 12288, 96, 40),
}

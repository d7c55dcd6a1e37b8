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
    scales: str = "bfloat16"  # dtype of those of several groups, and of minima
    has_minima: bool = False
    superblocks: int = 0  # Scales and minima have as many outer factors.
    offset: int = 0

    @property
    def is_scaled(self) -> bool:
        """True for groups that have scales and zero points alone."""
        return self.groups > 1 and not self.has_minima and not self.superblocks

    def arrays(self, axis: int = -1) -> tuple[jax.ShapeDtypeStruct | None, ...]:
        """Return the shapes of the arguments; with ``axis`` -2 the matrix is [I, O]."""

        def shape(width: int, dtype: str) -> jax.ShapeDtypeStruct:
            sizes = (self.outputs, width)
            return jax.ShapeDtypeStruct(sizes if axis == -1 else sizes[::-1], dtype)

        factors = shape(self.groups, self.scales if self.groups > 1 else "float32")
        outer = shape(self.superblocks, "float16") if self.superblocks else None
        return (
            jax.ShapeDtypeStruct((self.rows, self.inputs), jnp.bfloat16),
            shape(self.inputs, self.values),
            factors,
            shape(self.groups, "bfloat16") if self.has_zeros else None,
            outer,
            factors if self.has_minima else None,
            outer if self.has_minima else None,
        )


_Q4_1 = {"scales": "float16", "has_minima": True, "offset": 8}
_Q4_K = {"scales": "uint8", "has_minima": True, "offset": 8}
CASES = {
    "Llama-3.1-8B, int4, qkv": Case("int4", 6144, 4096, 32, 40),
    "Llama-3.1-8B, int4, down, one token": Case("int4", 4096, 14336, 112, 1),
    "Llama-3.1-8B, AWQ, gate and up": Case("int4", 28672, 4096, 32, 128, has_zeros=True),
    "Llama-3.1-8B, Q4_0, out": Case("int4", 4096, 4096, 128, 40),
    "Llama-3.1-8B, Q4_1, down": Case("int4", 4096, 14336, 448, 40, **_Q4_1),
    "Llama-3.1-8B, Q4_K, qkv": Case("int4", 6144, 4096, 128, 40, superblocks=16, **_Q4_K),
    "Llama-3.1-8B, Q6_K, down": Case("int8", 4096, 14336, 896, 40, scales="int8", superblocks=56),
    "Llama-3.1-8B, Q8_0, down": Case("int8", 4096, 14336, 448, 8),
    "Llama-3.1-8B, int8, out": Case("int8", 4096, 4096, 1, 40),
    "Llama-3.1-8B, fp8, gate and up": Case("float8_e4m3fn", 28672, 4096, 1, 40),
    "Qwen3-8B, fp8 blocks, down": Case("float8_e4m3fn", 4096, 12288, 96, 40),
}

"""Shapes of the experts of real models, for tests and ahead-of-time compilation."""

from typing import NamedTuple

import jax
import jax.numpy as jnp


class Case(NamedTuple):
    """A matrix for each expert, and the rows of all tokens of a pass."""

    experts: int
    depth: int
    columns: int
    rows: int
    values: str = "bfloat16"  # dtype
    groups: int = 0  # Groups of inputs, with a scale each; 0 for floats.

    def arrays(self, axis: int = -1) -> tuple[jax.ShapeDtypeStruct, ...]:
        """Return the shapes of the arguments; with ``axis`` -2 quantised matrices are [K, N]."""
        shape, count = jax.ShapeDtypeStruct, self.experts
        x, sizes = shape((self.rows, self.depth), jnp.bfloat16), shape((count,), jnp.int32)
        if not self.groups:
            return x, shape((count, self.depth, self.columns), self.values), sizes
        matrix, factors = (self.columns, self.depth), (self.columns, self.groups)
        if axis == -2:
            matrix, factors = matrix[::-1], factors[::-1]
        values = shape((count, *matrix), self.values)
        scale = jnp.float8_e8m0fnu if values.dtype == jnp.float4_e2m1fn else jnp.bfloat16
        return x, values, sizes, shape((count, *factors), scale)


CASES = {
    "Qwen3-30B-A3B, 5 tokens": Case(128, 2048, 2 * 768, 8 * 5),
    "Qwen3-30B-A3B, 40 tokens": Case(128, 2048, 2 * 768, 8 * 40),
    "Qwen3-30B-A3B, 160 tokens": Case(128, 2048, 2 * 768, 8 * 160),
    "Qwen3-30B-A3B, back": Case(128, 768, 2048, 8 * 40),
    "Mixtral-8x7B, 512 tokens": Case(8, 4096, 2 * 14336, 2 * 512),
    "DeepSeek-V3 on 8 devices, back": Case(256, 256, 7168, 8 * 40),
    "gpt-oss-20b": Case(32, 2880, 2 * 2880, 4 * 40),
    "gpt-oss-20b, MXFP4": Case(32, 2880, 2 * 2880, 4 * 40, "float4_e2m1fn", 90),
    "gpt-oss-20b, MXFP4, a prompt": Case(32, 2880, 2880, 4 * 512, "float4_e2m1fn", 90),
    "Qwen3-30B-A3B, int4": Case(128, 2048, 2 * 768, 8 * 40, "int4", 16),
    "Qwen3-30B-A3B, int8, back": Case(128, 768, 2048, 8 * 5, "int8", 1),
    "Qwen3-30B-A3B, fp8 blocks": Case(128, 2048, 2 * 768, 8 * 40, "float8_e4m3fn", 16),
}

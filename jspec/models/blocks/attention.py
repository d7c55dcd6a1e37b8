"""Standard attention: multi-head, or grouped heads that share keys and values."""

import dataclasses
import functools

import jax.numpy as jnp
from flax import struct

from jspec.core.entries import AttentionKV
from jspec.core.types import Array
from jspec.core.weights import columns_from
from jspec.models.blocks import rope as rope_lib
from jspec.models.blocks.arithmetic import Linear, affine, normal, over_listed, rows_at
from jspec.models.blocks.block import Mixer, Pass, Rotation
from jspec.models.blocks.norms import RmsNorm
from jspec.models.blocks.rope import RopeConfig
from jspec.models.blocks.tensors import Tensor, matrix, vector

_QKV = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
_OUTPUT = ("self_attn.o_proj",)


@dataclasses.dataclass(frozen=True)
class Attention(Mixer):
    """Standard attention; static and hashable."""

    num_heads: int  # H
    num_kv_heads: int  # Hkv
    head_dim: int
    rope: RopeConfig = RopeConfig()  # noqa: RUF009 (frozen)
    rotary_dim: int | None = None  # leading features of a head that are rotated; None for all
    window: int | None = None  # tokens that a query sees, its own included; None for all
    qkv_bias: bool = False
    output_bias: bool = False
    qk_norm: RmsNorm | None = None  # Each query and key head is normed before the rotation.
    column_parts: int = 1  # Each part of qkv has heads of queries, keys and values.

    title = "standard attention"

    @property
    def rotation(self) -> Rotation:
        """See ``Mixer``."""
        return self.rope, self.rotary_dim or self.head_dim

    @property
    def qkv_sizes(self) -> tuple[int, int, int]:
        """Widths of the queries, the keys and the values."""
        keys = self.num_kv_heads * self.head_dim
        return self.num_heads * self.head_dim, keys, keys

    def init(
        self,
        keys: Array,
        hidden: int,
        dtype: jnp.dtype,
        shrink: float = 1.0,
        inputs: int | None = None,
    ) -> "AttentionParams":
        """See ``Mixer``."""
        queries, wide = self.qkv_sizes[0], sum(self.qkv_sizes)
        head_norm = lambda: jnp.ones((self.head_dim,), dtype) if self.qk_norm else None
        return AttentionParams(
            qkv=normal(keys[0], (inputs or hidden, wide), dtype),
            output=normal(keys[1], (queries, hidden), dtype, shrink),
            qkv_bias=jnp.zeros((wide,), dtype) if self.qkv_bias else None,
            output_bias=jnp.zeros((hidden,), dtype) if self.output_bias else None,
            q_norm=head_norm(),
            k_norm=head_norm(),
        )

    def tensors(self, hidden: int, inputs: int | None = None) -> tuple[Tensor, ...]:
        """See ``Mixer``."""
        queries, sizes = self.qkv_sizes[0], self.qkv_sizes
        split = {"divided": "outputs", "unit": self.head_dim}
        tensors = [matrix("qkv", _QKV, sizes, inputs or hidden, by_linear=True, **split)]
        if self.qkv_bias:
            tensors.append(vector("qkv_bias", _QKV, sizes, "bias", **split))
        if self.qk_norm:
            tensors.append(vector("q_norm", ("self_attn.q_norm",), (self.head_dim,)))
            tensors.append(vector("k_norm", ("self_attn.k_norm",), (self.head_dim,)))
        output = matrix("output", _OUTPUT, (hidden,), queries, by_linear=True, divided="inputs")
        tensors.append(output)
        if self.output_bias:
            tensors.append(vector("output_bias", _OUTPUT, (hidden,), "bias"))
        return tuple(tensors)

    def divides(self, ways: int) -> bool:
        """See ``Mixer``; key heads that are fewer than devices repeat."""
        keys = self.num_kv_heads
        return self.num_heads % ways == 0 and 0 in (keys % ways, ways % keys)

    def split(self, ways: int) -> "Attention":
        """See ``Mixer``."""
        heads = max(self.num_kv_heads, ways)
        return dataclasses.replace(self, num_kv_heads=heads, column_parts=ways)

    def entry(self, batch: int, capacity: int, dtype: jnp.dtype) -> AttentionKV:
        """See ``Mixer``."""
        return AttentionKV.empty(
            batch,
            self.num_kv_heads,
            capacity,
            self.head_dim,
            dtype,
            is_divided=self.column_parts > 1,
        )

    def mix(
        self,
        params: "AttentionParams",
        x: Array,
        run: Pass,
        index: int,
        rows: Array | None = None,
    ) -> Array:
        """See ``Mixer``; x has the rows of ``params.qkv``, which is wider than D in some heads."""
        projection = functools.partial(
            affine, weight=params.qkv, bias=params.qkv_bias, linear=run.linear
        )
        fused = over_listed(run.packing, params.qkv, projection, x)
        q, k, v = self._heads(fused)
        if self.qk_norm:
            q, k = self.qk_norm(q, params.q_norm), self.qk_norm(k, params.k_norm)
        cos, sin = run.rotations[self.rotation]
        q, k = rope_lib.rotate(q, cos, sin), rope_lib.rotate(k, cos, sin)
        q, k, v = (part.swapaxes(1, 2) for part in (rows_at(q, rows), k, v))
        mixed = run.attend(index, q, k, v, window=self.window)
        return mixed.swapaxes(1, 2).reshape(len(x), q.shape[2], -1)

    def output(self, params: "AttentionParams", mixed: Array, linear: Linear) -> Array:
        """See ``Mixer``."""
        return affine(mixed, params.output, params.output_bias, linear)

    def _heads(self, fused: Array) -> list[Array]:
        """Return q, k and v [B, T, heads, head_dim] of columns [B, T, ...]."""
        batch, length, _ = fused.shape
        parts = fused.reshape(batch, length, self.column_parts, -1, self.head_dim)
        queries, keys = (n // self.column_parts for n in (self.num_heads, self.num_kv_heads))
        cut = jnp.split(parts, [queries, queries + keys], axis=3)
        return [part.reshape(batch, length, -1, self.head_dim) for part in cut]

    def keys_and_values(
        self, params: "AttentionParams", x: Array, rotation: tuple[Array, Array], linear: Linear
    ) -> AttentionKV:
        """Return the cache entry [B, Hkv, T, head_dim] of x [B, T, D], given cosines and sines."""
        parts, bias = self.column_parts, params.qkv_bias
        queries = self.qkv_sizes[0] // parts
        if bias is not None:
            bias = bias.reshape(parts, -1)[:, queries:].reshape(-1)
        both = affine(x, columns_from(params.qkv, queries, parts), bias, linear)
        apart = both.reshape(*x.shape[:-1], parts, 2, -1, self.head_dim)
        k, v = (apart[:, :, :, i].reshape(*x.shape[:-1], -1, self.head_dim) for i in (0, 1))
        if self.qk_norm:
            k = self.qk_norm(k, params.k_norm)
        k = rope_lib.rotate(k, *rotation)
        return AttentionKV(k.swapaxes(1, 2), v.swapaxes(1, 2), is_divided=parts > 1)


@struct.dataclass
class AttentionParams:
    """Weights of standard attention; None for those that it lacks."""

    qkv: Array  # [D, (H + 2 Hkv) * head_dim]
    output: Array  # [H * head_dim, D]
    qkv_bias: Array | None = None
    output_bias: Array | None = None
    q_norm: Array | None = None  # [head_dim]
    k_norm: Array | None = None  # [head_dim]

"""Standard attention: multi-head, or grouped heads that share keys and values."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
from flax import struct

from jspec.core.entries import AttentionKV
from jspec.core.types import Array
from jspec.core.weights import columns_from
from jspec.models.blocks import rope as rope_lib
from jspec.models.blocks.arithmetic import Linear, affine, normal, over_listed, rows_at
from jspec.models.blocks.block import Mixer, Pass, Rotation
from jspec.models.blocks.norms import Norm
from jspec.models.blocks.rope import RopeConfig
from jspec.models.blocks.tensors import Tensor, matrix, norm_of, vector

_QKV = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
_GATE = "self_attn.gate_proj"
_OUTPUT = ("self_attn.o_proj",)


@dataclasses.dataclass(frozen=True)
class Attention(Mixer):
    """Standard attention; static and hashable.

    Attributes:
      num_heads: H.
      num_kv_heads: Hkv.
      head_dim: width of a head.
      rope: rotation of queries and keys; None for none.
      rotary_dim: leading features of a head that are rotated; None for all.
      window: tokens that a query sees, its own included; None for all.
      qkv_bias: whether queries, keys and values have biases.
      output_bias: whether the output projection has a bias.
      qk_norm: norm of queries and keys; None for none.
      column_parts: parts of qkv, each of which has heads of queries, keys and values.
      norms_all_heads: whether ``qk_norm`` is over all heads together, not over each.
      norms_rotated: whether ``qk_norm`` comes after the rotation.
      v_norm: norm of each head's values; None for none.
      keys_are_values: whether values are the keys before their norm and rotation.
      interleaved: whether the rotation pairs features 2j and 2j + 1 in the checkpoint.
      scale: factor on the scores; None for ``head_dim ** -0.5``.
      gated: whether the outputs of a head are multiplied by sigmoids, whose columns follow those of
        its query.
      gate_apart: whether files have the columns of the gates in a module of their own; they are
        before all queries of a part.
      query_growth: queries at position p are multiplied by ``1 + growth * log(1 + floor(p / L))``,
        where L is the original length of the rope; 0 for none.
      growth_length: L in ``query_growth`` for positions counted from 1, as of Llama 4; None for the
        original length of the rope.
      chunked: whether a query sees the tokens of its own ``window`` alone: text is cut into chunks
        of so many tokens.
      soft_cap: scores x become ``soft_cap * tanh(x / soft_cap)``; None for no cap.
      has_sinks: whether a learned score of each head takes part in the softmax.
      source: number of the earlier layer whose keys and values it reads; None for its own.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope: RopeConfig | None = RopeConfig()  # noqa: RUF009 (frozen)
    rotary_dim: int | None = None
    window: int | None = None
    qkv_bias: bool = False
    output_bias: bool = False
    qk_norm: Norm | None = None
    column_parts: int = 1
    norms_all_heads: bool = False
    norms_rotated: bool = False
    v_norm: Norm | None = None
    interleaved: bool = False
    scale: float | None = None
    soft_cap: float | None = None
    query_growth: float = 0.0
    growth_length: int | None = None
    chunked: bool = False
    gated: bool = False
    gate_apart: bool = False
    has_sinks: bool = False
    keys_are_values: bool = False
    source: int | None = None

    title = "standard attention"

    @property
    def rotation(self) -> Rotation | None:
        """See ``Mixer``."""
        return None if self.rope is None else (self.rope, self.rotary_dim or self.head_dim)

    @property
    def qkv_sizes(self) -> tuple[int, int, int]:
        """Widths of the queries (and their gates), the keys and the values."""
        keys = self.num_kv_heads * self.head_dim if self.source is None else 0
        values = 0 if self.keys_are_values else keys
        return (1 + self.gated) * self.num_heads * self.head_dim, keys, values

    @property
    def _norms(self) -> tuple[tuple[str, Norm | None, int], ...]:
        """The field of each norm, its kind and the width of its axis."""
        queries, keys, _ = self.qkv_sizes
        if not self.norms_all_heads:
            queries = keys = self.head_dim
        return (
            ("q_norm", self.qk_norm, queries),
            ("k_norm", self.qk_norm if self.source is None else None, keys),
            ("v_norm", self.v_norm, self.head_dim),
        )

    def init(
        self,
        keys: Array,
        hidden: int,
        dtype: jnp.dtype,
        shrink: float = 1.0,
        inputs: int | None = None,
    ) -> "AttentionParams":
        """See ``Mixer``."""
        heads, wide = self.num_heads * self.head_dim, sum(self.qkv_sizes)
        norms = {name: norm.init(size, dtype) for name, norm, size in self._norms if norm}
        return AttentionParams(
            qkv=normal(keys[0], (inputs or hidden, wide), dtype),
            output=normal(keys[1], (heads, hidden), dtype, shrink),
            qkv_bias=jnp.zeros((wide,), dtype) if self.qkv_bias else None,
            output_bias=jnp.zeros((hidden,), dtype) if self.output_bias else None,
            sinks=jnp.zeros((self.num_heads,), dtype) if self.has_sinks else None,
            **norms,
        )

    def tensors(self, hidden: int, inputs: int | None = None) -> tuple[Tensor, ...]:
        """See ``Mixer``."""
        heads, sizes = self.num_heads * self.head_dim, [*filter(None, self.qkv_sizes)]
        names = _QKV[: len(sizes)]
        split = {"divided": "outputs", "unit": self.head_dim}
        if self.gate_apart:
            names, sizes = (_GATE, *names), (heads, heads, *sizes[1:])
        tensors = [matrix("qkv", names, sizes, inputs or hidden, by_linear=True, **split)]
        if self.qkv_bias:
            tensors.append(vector("qkv_bias", names, sizes, "bias", **split))
        for name, norm, size in self._norms:
            divided = split if self.norms_all_heads and name != "v_norm" else {}
            tensors += norm_of(name, f"self_attn.{name}", norm, size, **divided)
        output = matrix("output", _OUTPUT, (hidden,), heads, by_linear=True, divided="inputs")
        tensors.append(output)
        if self.output_bias:
            tensors.append(vector("output_bias", _OUTPUT, (hidden,), "bias"))
        if self.has_sinks:
            heads = (self.num_heads,)
            tensors.append(vector("sinks", ("self_attn",), heads, "sinks", divided="outputs"))
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
        if self.gated:
            q, gates = self._without_gates(q)
        rotation = None if self.rope is None else run.rotations[self.rotation]
        q, k = self._turned(rotation, (q, params.q_norm), (k, params.k_norm))
        if self.v_norm:
            v = self.v_norm(v, params.v_norm)
        if self.query_growth:
            if self.growth_length is None:
                turns = run.positions // self.rope.original_length
            else:
                turns = (run.positions + 1) // self.growth_length
            turns = turns.astype(jnp.float32)
            q = q * (1 + self.query_growth * jnp.log1p(turns))[:, :, None, None]
        q, k, v = (part.swapaxes(1, 2) for part in (rows_at(q, rows), k, v))
        scores = {"scale": self.scale, "soft_cap": self.soft_cap, "sinks": params.sinks}
        scores["chunked"] = self.chunked or None
        scores = {name: value for name, value in scores.items() if value is not None}
        if self.source is not None:
            index, k, v = self.source, None, None
        mixed = run.attend(index, q, k, v, window=self.window, **scores)
        mixed = mixed.swapaxes(1, 2)
        if self.gated:
            mixed = mixed * jax.nn.sigmoid(rows_at(gates, rows))
        return mixed.reshape(len(x), q.shape[2], -1)

    def output(self, params: "AttentionParams", mixed: Array, linear: Linear) -> Array:
        """See ``Mixer``."""
        return affine(mixed, params.output, params.output_bias, linear)

    def _heads(self, fused: Array) -> list[Array]:
        """Return q, k and v [B, T, heads, head_dim] of columns [B, T, ...]; q has gates too."""
        batch, length, _ = fused.shape
        # XLA for TPUs pads an axis of one part by the batch, up to 16 times.
        parts = (self.column_parts,) if self.column_parts > 1 else ()
        apart = fused.reshape(batch, length, *parts, -1, self.head_dim)
        queries, keys, _ = (n // self.column_parts // self.head_dim for n in self.qkv_sizes)
        cut = jnp.split(apart, [queries, queries + keys], axis=-2)
        if self.keys_are_values:
            cut[2] = cut[1]
        return [
            part.reshape(batch, length, math.prod(part.shape[2:-1]), self.head_dim) for part in cut
        ]

    def _without_gates(self, q: Array) -> tuple[Array, Array]:
        """Return the queries and the gates [B, T, H, head_dim] of both."""
        if not self.gate_apart:
            return q[:, :, 0::2], q[:, :, 1::2]
        parts = q.reshape(*q.shape[:2], self.column_parts, 2, -1, self.head_dim)
        gates, q = (parts[:, :, :, i].reshape(*q.shape[:2], -1, self.head_dim) for i in (0, 1))
        return q, gates

    def _turned(
        self, rotation: tuple[Array, Array] | None, *parts: tuple[Array, Array | None]
    ) -> list[Array]:
        """Return queries or keys [B, T, heads, head_dim], normed by their weights and rotated."""
        xs, weights = zip(*parts, strict=True)
        if self.qk_norm and not self.norms_rotated:
            xs = [*map(self._normed, xs, weights)]
        if rotation is not None:
            xs = [rope_lib.rotate(x, *rotation, interleaved=self.interleaved) for x in xs]
        if self.qk_norm and self.norms_rotated:
            xs = [*map(self._normed, xs, weights)]
        return xs

    def _normed(self, x: Array, weight: Array | None) -> Array:
        if not self.norms_all_heads:
            return self.qk_norm(x, weight)
        return self.qk_norm(x.reshape(*x.shape[:2], -1), weight).reshape(x.shape)

    def keys_and_values(
        self, params: "AttentionParams", x: Array, rotation: tuple[Array, Array], linear: Linear
    ) -> AttentionKV:
        """Return the cache entry [B, Hkv, T, head_dim] of x [B, T, D], given cosines and sines."""
        parts, bias = self.column_parts, params.qkv_bias
        queries = self.qkv_sizes[0] // parts
        if bias is not None:
            bias = bias.reshape(parts, -1)[:, queries:].reshape(-1)
        both = affine(x, columns_from(params.qkv, queries, parts), bias, linear)
        apart = both.reshape(*x.shape[:-1], parts, 2 - self.keys_are_values, -1, self.head_dim)
        k, v = (apart[:, :, :, i].reshape(*x.shape[:-1], -1, self.head_dim) for i in (0, -1))
        (k,) = self._turned(rotation, (k, params.k_norm))
        if self.v_norm:
            v = self.v_norm(v, params.v_norm)
        return AttentionKV(k.swapaxes(1, 2), v.swapaxes(1, 2), is_divided=parts > 1)


@struct.dataclass
class AttentionParams:
    """Weights of standard attention; None for those that it lacks."""

    qkv: Array  # [D, (H + 2 Hkv) * head_dim], or (2 H + 2 Hkv) if it is gated
    output: Array  # [H * head_dim, D]
    qkv_bias: Array | None = None
    output_bias: Array | None = None
    q_norm: Array | None = None  # [head_dim], or [H * head_dim] if it ``norms_all_heads``
    k_norm: Array | None = None  # [head_dim], or [Hkv * head_dim]
    v_norm: Array | None = None  # [head_dim]
    sinks: Array | None = None  # [H]

"""Multi-head latent attention of DeepSeek (arXiv 2405.04434, section 2.1).

The keys and values of all heads are projections of one latent with ``kv_rank`` features per token.
All heads share one rotated key of ``rope_dim`` features: ::

    c = norm(W_c x)      k_h = [W_uk_h c; rotate(W_kr x)]      v_h = W_uv_h c

Only [c; rotated key] is cached, once for all heads. Queries are projected to the latent space
(q W_uk), attention mixes latents, and W_uv then projects the mixture to values. So attention sees
one key head whose keys and values are the same buffer; the rotated part of the mixture is dropped.
At DeepSeek-V3's sizes this mixes 576 features instead of 512, but needs no copy of the cache. For a
few tokens, reading the cache dominates and this form is cheap. Over a long prompt it takes 3.4
times the multiplications of the expanded form.
"""

import dataclasses
import functools
import math
from typing import Self

import jax
import jax.numpy as jnp
from flax import struct

from jspec.core.entries import SlotEntry, stored_like
from jspec.core.narrow import Narrow
from jspec.core.types import Array
from jspec.core.weights import as_array
from jspec.models.blocks import rope as rope_lib
from jspec.models.blocks.arithmetic import Linear, normal, over_listed, product, rows_at
from jspec.models.blocks.block import Mixer, Pass, Rotation
from jspec.models.blocks.norms import RmsNorm
from jspec.models.blocks.rope import RopeConfig
from jspec.models.blocks.tensors import Tensor, matrix, vector

_NORM = RmsNorm(1e-6)  # The norm of latents; config.json's value is for the others.


@struct.dataclass
class LatentKV(SlotEntry):
    """The latents of one layer of latent attention, which serve as keys and values."""

    latent: Array | Narrow  # [B, 1, S, D]
    # See ``SlotEntry``; every device has the latents.
    has_split_queries: bool = struct.field(pytree_node=False, default=False)
    keeps_dtype: bool = struct.field(pytree_node=False, default=False)  # see ``SlotEntry``

    @classmethod
    def empty(
        cls,
        batch: int,
        capacity: int,
        width: int,
        dtype: jnp.dtype,
        *,
        has_split_queries: bool = False,
    ) -> Self:
        """Return ``capacity`` empty slots per row, of ``width`` features."""
        return cls(jnp.zeros((batch, 1, capacity, width), dtype), has_split_queries)

    @property
    def k(self) -> Array | Narrow:
        """The keys."""
        return self.latent

    @property
    def v(self) -> Array | Narrow:
        """The values, which are the same buffer."""
        return self.latent

    def holding(self, k: Array, v: Array) -> Self:
        """Return an entry of k [B, 1, n, D] in this entry's dtype; ``v`` is ``k``."""
        del v
        return self.replace(latent=stored_like(self.latent, k))


@dataclasses.dataclass(frozen=True)
class LatentAttention(Mixer):
    """Latent attention; static and hashable."""

    num_heads: int
    kv_rank: int  # width of the latent
    q_rank: int | None  # width of the queries' latent; None for queries without one
    nope_dim: int  # features of a head's query and key that are not rotated
    rope_dim: int  # features of a head's query and key that are rotated
    value_dim: int  # features of a head's value
    rope: RopeConfig = RopeConfig()  # noqa: RUF009 (frozen)
    interleaved: bool = True  # the rotation pairs features 2j and 2j + 1 in the checkpoint
    mscale: float = 0.0  # YaRN's ``mscale_all_dim``, which scales the scores; 0 for none
    is_split: bool = False  # whether the devices of a mesh have some of the heads each

    title = "latent attention"
    window = None

    @property
    def num_kv_heads(self) -> int:
        """Number of key heads before their projection to latents: every head has its own."""
        return self.num_heads

    @property
    def head_dim(self) -> int:
        """Number of features of a head's query."""
        return self.nope_dim + self.rope_dim

    @property
    def width(self) -> int:
        """Number of features cached per token."""
        return self.kv_rank + self.rope_dim

    @property
    def rotation(self) -> Rotation:
        """See ``Mixer``."""
        return self.rope, self.rope_dim

    @property
    def score_scale(self) -> float:
        """Factor on the scores; YaRN's is squared because it scales query and key."""
        growth, factor = 1.0, self.rope.factor
        if self.mscale and self.rope.kind != "default" and factor > 1:
            growth = 0.1 * self.mscale * math.log(factor) + 1.0
        return self.head_dim**-0.5 * growth * growth

    def init(
        self,
        keys: Array,
        hidden: int,
        dtype: jnp.dtype,
        shrink: float = 1.0,
        inputs: int | None = None,
    ) -> "LatentAttentionParams":
        """See ``Mixer``."""
        first, heads, rank = jax.random.split(keys[0], 3), self.num_heads, self.q_rank or 0
        inputs = inputs or hidden
        up = heads * (self.nope_dim + self.value_dim), self.kv_rank
        return LatentAttentionParams(
            down=normal(first[0], (inputs, rank + self.width), dtype),
            q_up=normal(first[1], (rank or inputs, heads * self.head_dim), dtype),
            kv_norm=jnp.ones((self.kv_rank,), dtype),
            kv_up=normal(first[2], up, dtype),
            output=normal(keys[1], (heads * self.value_dim, hidden), dtype, shrink),
            q_norm=jnp.ones((rank,), dtype) if rank else None,
        )

    def tensors(self, hidden: int, inputs: int | None = None) -> tuple[Tensor, ...]:
        """See ``Mixer``."""
        at = lambda *parts: tuple(f"self_attn.{part}" for part in parts)
        heads, rank, inputs = self.num_heads, self.q_rank, inputs or hidden
        queries, down = (heads * self.head_dim,), at("kv_a_proj_with_mqa")
        if rank:
            tensors = [
                matrix("down", at("q_a_proj") + down, (rank, self.width), inputs),
                vector("q_norm", at("q_a_layernorm"), (rank,)),
                matrix("q_up", at("q_b_proj"), queries, rank, divided="outputs"),
            ]
        else:
            tensors = [
                matrix("down", down, (self.width,), inputs),
                matrix("q_up", at("q_proj"), queries, inputs, divided="outputs"),
            ]
        up = (heads * (self.nope_dim + self.value_dim),)
        return (
            *tensors,
            vector("kv_norm", at("kv_a_layernorm"), (self.kv_rank,)),
            matrix("kv_up", at("kv_b_proj"), up, self.kv_rank, transpose=False, divided="outputs"),
            matrix(
                "output",
                at("o_proj"),
                (hidden,),
                heads * self.value_dim,
                by_linear=True,
                divided="inputs",
            ),
        )

    def divides(self, ways: int) -> bool:
        """See ``Mixer``."""
        return self.num_heads % ways == 0

    def split(self, ways: int) -> "LatentAttention":
        """See ``Mixer``: every head has columns of its own, and all devices have the latents."""
        return dataclasses.replace(self, is_split=ways > 1)

    def entry(self, batch: int, capacity: int, dtype: jnp.dtype) -> LatentKV:
        """See ``Mixer``."""
        return LatentKV.empty(batch, capacity, self.width, dtype, has_split_queries=self.is_split)

    def mix(
        self,
        params: "LatentAttentionParams",
        x: Array,
        run: Pass,
        index: int,
        rows: Array | None = None,
    ) -> Array:
        """See ``Mixer``."""
        heads = functools.partial(self._latent_heads, params, linear=run.linear)
        query, key = over_listed(run.packing, params, heads, x, *run.rotations[self.rotation])
        # ``attend`` divides by the square root of the width of its queries; undo that.
        query = rows_at(query, rows) * (self.score_scale * self.width**0.5)
        key = key.swapaxes(1, 2)
        mixed = run.attend(index, query.swapaxes(1, 2), key, key)
        return mixed[..., : self.kv_rank].swapaxes(1, 2)

    def output(self, params: "LatentAttentionParams", mixed: Array, linear: Linear) -> Array:
        """See ``Mixer``."""
        values = product("bthr,hvr->bthv", mixed, self._up(params)[:, self.nope_dim :])
        return linear(values.reshape(*mixed.shape[:2], -1), params.output)

    def _up(self, params: "LatentAttentionParams") -> Array:
        """Return the matrices of all heads, [H, nope_dim + value_dim, kv_rank]."""
        return as_array(params.kv_up).reshape(self.num_heads, -1, self.kv_rank)

    def _latent_heads(
        self, params: "LatentAttentionParams", x: Array, cos: Array, sin: Array, linear: Linear
    ) -> tuple[Array, Array]:
        """Return queries [B, T, H, width] and the key [B, T, 1, width], rotated parts last."""
        low = linear(x, params.down).astype(x.dtype)
        rank = self.q_rank or 0
        q_low, latent, k_rope = jnp.split(low, [rank, rank + self.kv_rank], axis=-1)
        q_low = _NORM(q_low, params.q_norm) if rank else x
        q = linear(q_low, params.q_up)
        q = q.reshape(*q.shape[:2], -1, self.head_dim)
        q, q_rope = q[..., : self.nope_dim], q[..., self.nope_dim :]
        rotate = lambda part: rope_lib.rotate(part, cos, sin, interleaved=self.interleaved)
        latent = _NORM(latent, params.kv_norm)[:, :, None]
        key = jnp.concatenate([latent, rotate(k_rope[:, :, None]).astype(latent.dtype)], -1)
        latent_q = product("bthn,hnr->bthr", q, self._up(params)[:, : self.nope_dim])
        return jnp.concatenate([latent_q, rotate(q_rope).astype(latent_q.dtype)], -1), key


@struct.dataclass
class LatentAttentionParams:
    """Weights of latent attention."""

    down: Array  # [D, q_rank + kv_rank + rope_dim]; q_rank counts 0 if None
    q_up: Array  # [q_rank or D, H * (nope_dim + rope_dim)]
    kv_norm: Array  # [kv_rank]
    kv_up: Array  # [H * (nope_dim + value_dim), kv_rank], the layout of checkpoints
    output: Array  # [H * value_dim, D]
    q_norm: Array | None = None  # [q_rank]

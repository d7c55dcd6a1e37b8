"""One decoder for the Llama-like families; a family is a configuration, not a class.

Free functions over a plain pytree of weights. Projections are stored [in, out], with q, k, v in one
matrix and gate, up in another: on every device fewer and larger matmuls are faster. Layers are a
tuple and their loop is unrolled, because a cache stacked over layers is copied by XLA.
"""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import struct

from jspec import kv, ops, topology
from jspec.models import rope as rope_lib
from jspec.models.rope import RopeConfig
from jspec.types import Array, TargetOutput, Tree


@dataclasses.dataclass(frozen=True)
class DecoderConfig:
    """Sizes and switches of a decoder; static and hashable."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_positions: int
    norm_eps: float = 1e-6
    rope: RopeConfig = RopeConfig()  # noqa: RUF009 (frozen)
    tie_embeddings: bool = False
    qkv_bias: bool = False
    output_bias: bool = False  # of the attention's output projection
    mlp_bias: bool = False
    qk_norm: bool = False  # RMS norm of every query and key head before the rotation
    windows: tuple[int | None, ...] = ()  # sliding window of each layer; () for none
    cache_dtype: str = "float32"
    activation_dtype: str = "float32"  # of the residual stream
    attention: str | None = None  # implementation of ops.attention; None for the device's default

    @property
    def qkv_sizes(self) -> tuple[int, int]:
        """Widths of the queries and of the keys (or values)."""
        return self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim


@struct.dataclass
class LayerParams:
    """Weights of one block; None where the family has no such tensor."""

    attention_norm: Array | None  # [D]; None for a first block whose input is prepared already
    qkv: Array  # [D, (H + 2 Hkv) * head_dim]
    output: Array  # [H * head_dim, D]
    mlp_norm: Array  # [D]
    gate_up: Array  # [D, 2 * intermediate]
    down: Array  # [intermediate, D]
    qkv_bias: Array | None = None
    output_bias: Array | None = None
    gate_up_bias: Array | None = None
    down_bias: Array | None = None
    q_norm: Array | None = None  # [head_dim]
    k_norm: Array | None = None  # [head_dim]


@struct.dataclass
class DecoderParams:
    """Weights of a decoder. ``head`` is None where the embedding is tied."""

    embedding: Array  # [V, D]
    layers: tuple[LayerParams, ...]
    norm: Array  # [D]
    head: Array | None = None  # [D, V]


Linear = Callable[[Array, Array], Array]
# attend(layer, q [B, H, T, head_dim], k and v [B, Hkv, T, head_dim]) -> [B, H, T, head_dim]
Attend = Callable[[int, Array, Array, Array], Array]


def init_params(key: Array, config: DecoderConfig, dtype: jnp.dtype = jnp.float32) -> DecoderParams:
    """Random weights: normal, 0.02 wide, the projections into the residual stream narrower."""
    embedding_key, *layer_keys, head_key = jax.random.split(key, 4 * config.num_layers + 2)
    vocab, hidden = config.vocab_size, config.hidden_size
    tied = config.tie_embeddings
    return DecoderParams(
        embedding=_normal(embedding_key, (vocab, hidden), dtype),
        layers=_init_layers(layer_keys, config, dtype),
        norm=jnp.ones((hidden,), dtype),
        head=None if tied else _normal(head_key, (hidden, vocab), dtype),
    )


def init_layers(
    key: Array, config: DecoderConfig, dtype: jnp.dtype = jnp.float32
) -> tuple[LayerParams, ...]:
    """The blocks of ``init_params`` alone."""
    return _init_layers(jax.random.split(key, 4 * config.num_layers), config, dtype)


def _normal(key: Array, shape: tuple[int, ...], dtype: jnp.dtype, scale: float = 1.0) -> Array:
    return (0.02 * scale * jax.random.normal(key, shape)).astype(dtype)


def _init_layers(keys, config: DecoderConfig, dtype: jnp.dtype) -> tuple[LayerParams, ...]:
    """Blocks from four keys each."""
    keys = iter(keys)
    hidden, wide = config.hidden_size, config.intermediate_size
    q_size, kv_size = config.qkv_sizes
    shrink = (2 * config.num_layers) ** -0.5
    normal = lambda shape, scale=1.0: _normal(next(keys), shape, dtype, scale)

    def optional(wanted: bool, size: int, fill: float = 0.0) -> Array | None:
        return jnp.full((size,), fill, dtype) if wanted else None

    def layer() -> LayerParams:
        return LayerParams(
            attention_norm=jnp.ones((hidden,), dtype),
            qkv=normal((hidden, q_size + 2 * kv_size)),
            output=normal((q_size, hidden), shrink),
            mlp_norm=jnp.ones((hidden,), dtype),
            gate_up=normal((hidden, 2 * wide)),
            down=normal((wide, hidden), shrink),
            qkv_bias=optional(config.qkv_bias, q_size + 2 * kv_size),
            output_bias=optional(config.output_bias, hidden),
            gate_up_bias=optional(config.mlp_bias, 2 * wide),
            down_bias=optional(config.mlp_bias, hidden),
            q_norm=optional(config.qk_norm, config.head_dim, 1.0),
            k_norm=optional(config.qk_norm, config.head_dim, 1.0),
        )

    return tuple(layer() for _ in range(config.num_layers))


def rms_norm(x: Array, weight: Array, eps: float) -> Array:
    """Root-mean-square norm over the last axis, computed in float32 (or wider)."""
    wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    wide = wide * jax.lax.rsqrt(jnp.mean(wide * wide, -1, keepdims=True) + eps)
    return wide.astype(x.dtype) * weight.astype(x.dtype)


def embed(params: DecoderParams, config: DecoderConfig, tokens: Array) -> Array:
    """Token ids [...] to the first residual stream [..., D]."""
    return params.embedding[tokens].astype(config.activation_dtype)


def unembed(
    params: DecoderParams,
    config: DecoderConfig,
    x: Array,
    linear: Linear | None = None,
    *,
    norm: bool = True,
) -> Array:
    """Last residual stream [..., D] to float32 logits [..., V]: final norm and head.

    Without ``norm`` the head alone, for a stream that the final norm has passed already.
    """
    if norm:
        x = rms_norm(x, params.norm, config.norm_eps)
    if params.head is not None:
        return (linear or ops.linear)(x, params.head)
    if linear is not None:
        return linear(x, params.embedding.T)
    return ops.linear(x, params.embedding, transposed=True)


def trunk(
    params: DecoderParams,
    config: DecoderConfig,
    x: Array,
    positions: Array,
    attend: Attend,
    *,
    linear: Linear = ops.linear,
    capture_layers: tuple[int, ...] = (),
    remat: bool = False,
) -> tuple[Array, tuple[Array, ...]]:
    """Runs every block over x [B, T, D] at int32 positions [B, T].

    ``attend`` owns the attention: training attends causally within x, decoding over a cache. With
    ``remat`` a backward pass keeps only what enters a block, and computes the block again.

    Returns:
      The last residual stream [B, T, D] (before the final norm) and the streams named by
      ``capture_layers``: index i is the input of block i, as in Hugging Face's ``hidden_states``;
      index ``num_layers`` is the output of the final norm.
    """
    cos, sin = rope_lib.cos_sin(config.rope, config.head_dim, positions)
    stream = [x]

    def block(index: int, layer, x: Array) -> Array:
        normed = rms_norm(x, layer.attention_norm, config.norm_eps)
        x = x + attention(layer, config, normed, cos, sin, index, attend, linear)
        return x + mlp(layer, config, x, linear)

    if remat:
        block = jax.checkpoint(block, static_argnums=0)
    for index, layer in enumerate(params.layers):
        x = block(index, layer, x)
        stream.append(x)
    if config.num_layers in capture_layers:
        stream[-1] = rms_norm(x, params.norm, config.norm_eps)
    return x, tuple(stream[index] for index in capture_layers)


def attention(layer, config, x, cos, sin, index, attend, linear) -> Array:
    """A block's attention [B, T, D] for its normed input x [B, T, inputs of ``layer.qkv``]."""
    batch, length, _ = x.shape
    fused = affine(x, layer.qkv, layer.qkv_bias, linear)
    heads = fused.reshape(batch, length, -1, config.head_dim)
    q, k, v = jnp.split(heads, [config.num_heads, config.num_heads + config.num_kv_heads], axis=2)
    if config.qk_norm:
        q = rms_norm(q, layer.q_norm, config.norm_eps)
        k = rms_norm(k, layer.k_norm, config.norm_eps)
    q, k = rope_lib.rotate(q, cos, sin), rope_lib.rotate(k, cos, sin)
    mixed = attend(index, *(part.swapaxes(1, 2) for part in (q, k, v)))
    mixed = mixed.swapaxes(1, 2).reshape(batch, length, -1)
    return affine(mixed, layer.output, layer.output_bias, linear).astype(x.dtype)


def mlp(layer, config, x, linear) -> Array:
    """A block's norm and MLP [B, T, D] for the residual stream x [B, T, D]."""
    fused = affine(rms_norm(x, layer.mlp_norm, config.norm_eps), layer.gate_up,
                   layer.gate_up_bias, linear)  # fmt: skip
    gate, up = jnp.split(fused, 2, axis=-1)
    return affine(jax.nn.silu(gate) * up, layer.down, layer.down_bias, linear).astype(x.dtype)


def affine(x: Array, weight: Array, bias: Array | None, linear: Linear) -> Array:
    """``x @ weight + bias`` in the dtype that ``linear`` gives; None for no bias."""
    out = linear(x, weight)
    return out if bias is None else out + bias.astype(out.dtype)


def init_cache(config: DecoderConfig, batch: int, capacity: int) -> kv.KVCache:
    """An empty cache of ``capacity`` slots a row."""
    return kv.allocate(
        config.num_layers, batch, config.num_kv_heads, capacity, config.head_dim,
        jnp.dtype(config.cache_dtype),
    )  # fmt: skip


def forward(
    params: DecoderParams,
    config: DecoderConfig,
    tokens: Array,
    tree: Tree,
    cache: kv.KVCache,
    capture_layers: tuple[int, ...] = (),
) -> TargetOutput:
    """Scores the nodes ``tokens`` [B, N] of ``tree``, placed after the cache's prefix.

    Writes nothing: the keys and values of the nodes come back as ``tree_kv``.
    """
    tree = topology.broadcast(tree, tokens.shape[0])
    attend, tree_kv = attention_over(
        cache, tree, windows=config.windows, implementation=config.attention
    )
    positions = cache.length[:, None] + tree.depth
    x, features = trunk(
        params, config, embed(params, config, tokens), positions, attend,
        capture_layers=capture_layers,
    )  # fmt: skip
    return TargetOutput(unembed(params, config, x), features, tuple(tree_kv))


def attention_over(
    cache: kv.KVCache,
    tree: Tree,
    *,
    scale: float | None = None,
    windows: tuple[int | None, ...] = (),
    implementation: str | None = None,
) -> tuple[Attend, list[kv.AttentionKV]]:
    """Attention over a committed prefix and a tree, for any network that calls it once a layer.

    Args:
      cache: the committed prefix, read only.
      tree: shape of the nodes, with a batch axis.
      scale: factor on the scores; None for ``head_dim ** -0.5``.
      windows: sliding window of each layer; () for none.
      implementation: of ``ops.attention``; None for the device's default.

    Returns:
      ``attend``, and the list of entries [B, Hkv, N, head_dim], one a layer, that it fills.
    """
    positions = cache.length[:, None] + tree.depth
    fresh = list(cache.layers)  # replaced one by one

    def attend(index: int, q: Array, k: Array, v: Array) -> Array:
        entry = cache.layers[index]
        # As the cache will hold them: a token's logits must not depend on what is committed yet.
        fresh[index] = new = kv.AttentionKV(k.astype(entry.k.dtype), v.astype(entry.v.dtype))
        window = windows[index] if windows else None
        near = tree.ancestors if window is None else topology.within(tree, window)
        return ops.attention(
            q, new.k, new.v, near, entry.k, entry.v, cache.length,
            scale=q.shape[-1] ** -0.5 if scale is None else scale,
            window=window, positions=positions, implementation=implementation,
        )  # fmt: skip

    return attend, fresh


def extend(
    params: DecoderParams,
    config: DecoderConfig,
    tokens: Array,
    positions: Array,
    cache: kv.KVCache,
    side: tuple[kv.AttentionKV, ...],
    slot: Array,
    mask: Array,
) -> tuple[Array, tuple[kv.AttentionKV, ...]]:
    """A drafting step: feeds ``tokens`` [B, n] and keeps their entries beside the cache.

    Args:
      params: weights.
      config: sizes.
      tokens: int32 [B, n].
      positions: int32 [B, n].
      cache: the committed prefix, read only.
      side: one entry a layer, [B, Hkv, M, head_dim]: this round's keys and values so far.
      slot: int32 [], where in ``side`` the n new entries go.
      mask: bool [B, n, M], which side slots each token sees, its own included.

    Returns:
      The last residual stream [B, n, D] and the side buffers with the new entries.
    """
    attend, side = attention_beside(
        cache, side, slot, mask, positions,
        windows=config.windows, implementation=config.attention,
    )  # fmt: skip
    x, _ = trunk(params, config, embed(params, config, tokens), positions, attend)
    return x, tuple(side)


def attention_beside(
    cache: kv.KVCache,
    side: tuple[kv.AttentionKV, ...],
    slot: Array,
    mask: Array,
    positions: Array,
    *,
    windows: tuple[int | None, ...] = (),
    implementation: str | None = None,
) -> tuple[Attend, list[kv.AttentionKV]]:
    """Attention over a committed prefix and side buffers, for the steps of a drafting network.

    Arguments are those of ``extend``; ``windows`` and ``implementation`` as in ``attention_over``.

    Returns:
      ``attend``, and the list of side buffers that it updates, one a layer.
    """
    side, seen = list(side), topology.pack_bits(mask)

    def attend(index: int, q: Array, k: Array, v: Array) -> Array:
        put = lambda buffer, new: jax.lax.dynamic_update_slice_in_dim(
            buffer, new.astype(buffer.dtype), slot, axis=2
        )
        near = side[index] = jax.tree.map(put, side[index], kv.AttentionKV(k, v))
        window = windows[index] if windows else None
        entry = cache.layers[index]
        return ops.attention(
            q, near.k, near.v, seen, entry.k, entry.v, cache.length,
            scale=q.shape[-1] ** -0.5, window=window, positions=positions,
            implementation=implementation,
        )  # fmt: skip

    return attend, side


@dataclasses.dataclass(frozen=True)
class Decoder:
    """A decoder as a ``Target``: the configuration bound to the free functions above."""

    config: DecoderConfig

    @property
    def vocab_size(self) -> int:
        """Rows of the head, padding included."""
        return self.config.vocab_size

    @property
    def max_positions(self) -> int:
        """Longest sequence that the checkpoint was made for."""
        return self.config.max_positions

    def init_cache(self, batch: int, capacity: int) -> kv.KVCache:
        """See ``init_cache``."""
        return init_cache(self.config, batch, capacity)

    def forward(self, params, tokens, tree, cache, capture_layers=()) -> TargetOutput:
        """See ``forward``."""
        return forward(params, self.config, tokens, tree, cache, capture_layers)

    def embed(self, params: DecoderParams, tokens: Array) -> Array:
        """See ``embed``."""
        return embed(params, self.config, tokens)

    def unembed(self, params: DecoderParams, hidden: Array, *, norm: bool = True) -> Array:
        """See ``unembed``."""
        return unembed(params, self.config, hidden, norm=norm)

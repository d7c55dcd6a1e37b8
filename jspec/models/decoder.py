"""One decoder for the Llama-like families; a family is a configuration, not a class.

Free functions over a plain pytree of weights. Projections are stored [in, out], with q, k, v in one
matrix and gate, up in another: on every device fewer and larger matmuls are faster. Layers are a
tuple and their loop is unrolled, because a cache stacked over layers is copied by XLA.
"""

import dataclasses

import jax
import jax.numpy as jnp
from flax import struct

from jspec import ops
from jspec.core import kv_cache, trees, validation
from jspec.core.types import Array, TargetOutput, Tree
from jspec.models import mla, moe
from jspec.models import rope as rope_lib
from jspec.models.attention import Attend, attention, attention_beside, attention_over
from jspec.models.layers import Linear, affine, gated, normal, rms_norm, rows_at
from jspec.models.mla import MlaConfig, MlaParams
from jspec.models.moe import MoeConfig, MoeParams
from jspec.models.rope import RopeConfig


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
    rotary_dim: int | None = None  # features of a head that are rotated, the first; None for all
    mla: MlaConfig | None = None  # latent attention in place of the usual kind
    moe: MoeConfig | None = None  # experts in place of the MLP

    @property
    def rope_dim(self) -> int:
        """Features of a head that are rotated."""
        return self.mla.rope_dim if self.mla else self.rotary_dim or self.head_dim

    @property
    def mixed_size(self) -> int:
        """Width of what the attention's output projection reads."""
        return self.num_heads * (self.mla.value_dim if self.mla else self.head_dim)

    def with_plain_blocks(self) -> "DecoderConfig":
        """The same sizes, of blocks with the usual attention and MLP: what heads are made of."""
        return dataclasses.replace(
            self,
            mla=None,
            moe=None,
            rotary_dim=None,
            windows=(),
        )

    def has_experts(self, layer: int) -> bool:
        """Whether block ``layer`` is a mixture of experts."""
        return self.moe is not None and layer >= self.moe.first_dense

    @property
    def qkv_sizes(self) -> tuple[int, int]:
        """Widths of the queries, and of the keys (or values)."""
        return self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim

    def norm(self, x: Array, weight: Array) -> Array:
        """The RMS norm of blocks, over the last axis of x."""
        return rms_norm(x, weight, self.norm_eps)


@struct.dataclass
class LayerParams:
    """Weights of one block; None where the family has no such tensor."""

    attention_norm: Array | None  # [D]; None for a first block whose input is prepared already
    qkv: Array | None  # [D, (H + 2 Hkv) * head_dim]; None for latent attention
    output: Array  # [H * head_dim, D]
    mlp_norm: Array  # [D]
    gate_up: Array  # [D, 2 * intermediate]; of a mixture, the expert that every token meets
    down: Array  # [intermediate, D]
    qkv_bias: Array | None = None
    output_bias: Array | None = None
    gate_up_bias: Array | None = None
    down_bias: Array | None = None
    q_norm: Array | None = None  # [head_dim]
    k_norm: Array | None = None  # [head_dim]
    mla: MlaParams | None = None
    moe: MoeParams | None = None


@struct.dataclass
class DecoderParams:
    """Weights of a decoder. ``head`` is None where the embedding is tied."""

    embedding: Array  # [V, D]
    layers: tuple[LayerParams, ...]
    norm: Array  # [D]
    head: Array | None = None  # [D, V]


def init_params(key: Array, config: DecoderConfig, dtype: jnp.dtype = jnp.float32) -> DecoderParams:
    """Random weights: normal, 0.02 wide, the projections into the residual stream narrower."""
    embedding_key, *layer_keys, head_key = jax.random.split(key, 4 * config.num_layers + 2)
    vocab, hidden = config.vocab_size, config.hidden_size
    tied = config.tie_embeddings
    return DecoderParams(
        embedding=normal(embedding_key, (vocab, hidden), dtype),
        layers=_init_layers(layer_keys, config, dtype),
        norm=jnp.ones((hidden,), dtype),
        head=None if tied else normal(head_key, (hidden, vocab), dtype),
    )


def check_params(params: DecoderParams, config: DecoderConfig) -> None:
    """Refuses weights of another model.

    Raises:
      ValueError: they are no decoder's, or of other sizes.
    """
    validation.check_kind(params, DecoderParams)
    found = *params.embedding.shape, len(params.layers)
    wanted = config.vocab_size, config.hidden_size, config.num_layers
    if found != wanted:
        raise ValueError(
            "its vocabulary, width and number of layers are {}, {}, {}, but theirs {}, {}, {}; "
            "were they loaded from another checkpoint?".format(*wanted, *found)
        )


def init_layers(
    key: Array, config: DecoderConfig, dtype: jnp.dtype = jnp.float32
) -> tuple[LayerParams, ...]:
    """The blocks of ``init_params`` alone."""
    return _init_layers(jax.random.split(key, 4 * config.num_layers), config, dtype)


def _init_layers(keys, config: DecoderConfig, dtype: jnp.dtype) -> tuple[LayerParams, ...]:
    """Blocks from four keys each."""
    hidden, shrink = config.hidden_size, (2 * config.num_layers) ** -0.5
    q_size, kv_size = config.qkv_sizes

    def bias(wanted: bool, size: int) -> Array | None:
        return jnp.zeros((size,), dtype) if wanted else None

    def head_norm() -> Array | None:
        return jnp.ones((config.head_dim,), dtype) if config.qk_norm else None

    def layer(index: int) -> LayerParams:
        first, *others = keys[4 * index : 4 * index + 4]
        mixed, wide = config.has_experts(index), config.intermediate_size
        if mixed:
            wide = config.moe.shared_size
        parts: dict = {"qkv": None}
        if config.mla:
            parts["mla"] = mla.init_params(first, config.mla, hidden, config.num_heads, dtype)
        else:
            parts["qkv"] = normal(first, (hidden, q_size + 2 * kv_size), dtype)
        if mixed:
            routed = jax.random.fold_in(first, 1)
            parts["moe"] = moe.init_params(routed, config.moe, hidden, shrink, dtype)
        return LayerParams(
            attention_norm=jnp.ones((hidden,), dtype),
            output=normal(others[0], (config.mixed_size, hidden), dtype, shrink),
            mlp_norm=jnp.ones((hidden,), dtype),
            gate_up=normal(others[1], (hidden, 2 * wide), dtype),
            down=normal(others[2], (wide, hidden), dtype, shrink),
            qkv_bias=bias(config.qkv_bias, q_size + 2 * kv_size),
            output_bias=bias(config.output_bias, hidden),
            gate_up_bias=bias(config.mlp_bias, 2 * wide),
            down_bias=bias(config.mlp_bias, hidden),
            q_norm=head_norm(),
            k_norm=head_norm(),
            **parts,
        )

    return tuple(layer(index) for index in range(config.num_layers))


def embed(params: DecoderParams, config: DecoderConfig, tokens: Array) -> Array:
    """Token ids [...] to the first residual stream [..., D]."""
    return ops.look_up(params.embedding, tokens).astype(config.activation_dtype)


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
        x = config.norm(x, params.norm)
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
    wanted: Array | None = None,
) -> tuple[Array, tuple[Array, ...]]:
    """Runs every block over x [B, T, D] at int32 positions [B, T].

    ``attend`` owns the attention: training attends causally within x, decoding over a cache. With
    ``remat`` a backward pass keeps only what enters a block, and computes the block again. The last
    block runs the rows ``wanted`` [B, M] alone, if they are given, beside the keys and values of
    all.

    Returns:
      The last residual stream [B, T, D] (before the final norm) and the streams named by
      ``capture_layers``: index i is the input of block i, as in Hugging Face's ``hidden_states``;
      index ``num_layers`` is the output of the final norm.
    """
    validation.check_captured(capture_layers, config.num_layers)
    cos, sin = rope_lib.cos_sin(config.rope, config.rope_dim, positions)
    stream = [x]

    def run(index: int, layer: LayerParams, x: Array) -> Array:
        last = index == len(params.layers) - 1
        return block(layer, config, x, cos, sin, index, attend, linear, wanted if last else None)

    if remat:
        run = jax.checkpoint(run, static_argnums=0)
    for index, layer in enumerate(params.layers):
        x = run(index, layer, x)
        stream.append(x)
    if config.num_layers in capture_layers:
        stream[-1] = config.norm(x, params.norm)
    return x, tuple(stream[index] for index in capture_layers)


def block(layer, config, x, cos, sin, index, attend, linear, wanted=None) -> Array:
    """A whole block for the residual stream x [B, T, D]; ``index`` is what ``attend`` is told.

    What leaves it are the rows ``wanted`` [B, M] alone, if they are given.
    """
    kind = attention if layer.mla is None else mla.attention
    with jax.named_scope("attention"):
        normed = config.norm(x, layer.attention_norm)
        mixed = kind(layer, config, normed, cos, sin, index, attend, linear, wanted)
        x = rows_at(x, wanted) + mixed
    with jax.named_scope("mlp"):
        return x + mlp(layer, config, x, linear)


def mlp(layer, config, x, linear) -> Array:
    """A block's norm and MLP, or its experts, [B, T, D] for the residual stream x [B, T, D]."""
    normed = config.norm(x, layer.mlp_norm)
    if layer.moe is not None:
        shared = gated(normed, layer.gate_up, layer.down, linear)
        return (moe.mixture(layer.moe, config.moe, normed) + shared).astype(x.dtype)
    gate, up = jnp.split(affine(normed, layer.gate_up, layer.gate_up_bias, linear), 2, axis=-1)
    return affine(jax.nn.silu(gate) * up, layer.down, layer.down_bias, linear).astype(x.dtype)


def init_cache(config: DecoderConfig, batch: int, capacity: int) -> kv_cache.KVCache:
    """An empty cache of ``capacity`` slots a row."""
    dtype = jnp.dtype(config.cache_dtype)
    if config.mla:
        return kv_cache.allocate_latent(config.num_layers, batch, capacity, config.mla.width, dtype)
    return kv_cache.allocate(
        config.num_layers, batch, config.num_kv_heads, capacity, config.head_dim, dtype
    )


def forward(
    params: DecoderParams,
    config: DecoderConfig,
    tokens: Array,
    tree: Tree,
    cache: kv_cache.KVCache,
    capture_layers: tuple[int, ...] = (),
) -> TargetOutput:
    """Scores the nodes ``tokens`` [B, N] of ``tree``, placed after the cache's prefix.

    Writes nothing: the keys and values of the nodes come back as ``tree_kv``.
    """
    tree = trees.broadcast(tree, tokens.shape[0])
    attend, tree_kv = attention_over(
        cache, tree, windows=config.windows, implementation=config.attention
    )
    positions = cache.length[:, None] + tree.depth
    x, features = trunk(
        params,
        config,
        embed(params, config, tokens),
        positions,
        attend,
        capture_layers=capture_layers,
    )
    return TargetOutput(unembed(params, config, x), features, tuple(tree_kv))


def extend(
    params: DecoderParams,
    config: DecoderConfig,
    tokens: Array,
    positions: Array,
    cache: kv_cache.KVCache,
    side: tuple[kv_cache.Entry, ...],
    slot: Array,
    mask: Array,
) -> tuple[Array, tuple[kv_cache.Entry, ...]]:
    """A drafting step: feeds ``tokens`` [B, n] and keeps their entries beside the cache.

    Args:
      params: weights.
      config: sizes.
      tokens: int32 [B, n].
      positions: int32 [B, n].
      cache: the committed prefix, read only.
      side: one entry a layer, M slots each: this round's keys and values so far.
      slot: int32 [], where in ``side`` the n new entries go.
      mask: bool [B, n, M], which side slots each token sees, its own included.

    Returns:
      The last residual stream [B, n, D] and the side buffers with the new entries.
    """
    attend, side = attention_beside(
        cache,
        side,
        slot,
        mask,
        positions,
        windows=config.windows,
        implementation=config.attention,
    )
    x, _ = trunk(params, config, embed(params, config, tokens), positions, attend)
    return x, tuple(side)


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

    def check_params(self, params: DecoderParams) -> None:
        """See ``check_params``."""
        check_params(params, self.config)

    def init_cache(self, batch: int, capacity: int) -> kv_cache.KVCache:
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

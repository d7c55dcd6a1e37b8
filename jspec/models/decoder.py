"""One decoder for all Llama-like families; a family is a configuration, not a class.

The functions take a plain pytree of weights. Projections are stored [in, out]; q, k, v share one
matrix and gate, up another, because fewer and larger matmuls are faster. Layers are a tuple and
their loop is unrolled, because XLA would copy a cache that is stacked over layers.
"""

import dataclasses

import jax
import jax.numpy as jnp
from flax import struct

from jspec import ops
from jspec.core import kv_cache, shape_checks, trees, validation
from jspec.core.entries import AttentionKV, LatentKV
from jspec.core.packing import Packing
from jspec.core.types import Array, Target, TargetOutput, Tree
from jspec.models.attend import Attend, attention_over
from jspec.models.blocks import experts as moe
from jspec.models.blocks import latent_attention as mla
from jspec.models.blocks import rope as rope_lib
from jspec.models.blocks.arithmetic import Linear, affine, normal, packed_linear, rows_at
from jspec.models.blocks.attention import attention
from jspec.models.blocks.experts import MoeConfig, MoeParams
from jspec.models.blocks.latent_attention import MlaConfig, MlaParams
from jspec.models.blocks.mlp import gated
from jspec.models.blocks.norms import rms_norm
from jspec.models.blocks.rope import RopeConfig


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
    output_bias: bool = False  # on the attention's output projection
    mlp_bias: bool = False
    qk_norm: bool = False  # RMS norm of each query and key head before the rotation
    windows: tuple[int | None, ...] = ()  # sliding window of each layer; () for none
    cache_dtype: str = "float32"
    activation_dtype: str = "float32"  # of the residual stream
    attention: str | None = None  # implementation of ops.attention; None for the device's default
    rotary_dim: int | None = None  # leading features of a head that are rotated; None for all
    mla: MlaConfig | None = None  # latent attention instead of standard attention
    moe: MoeConfig | None = None  # experts instead of the MLP

    @property
    def rope_dim(self) -> int:
        """Number of features of a head that are rotated."""
        return self.mla.rope_dim if self.mla else self.rotary_dim or self.head_dim

    @property
    def mixed_size(self) -> int:
        """Input width of the attention's output projection."""
        return self.num_heads * (self.mla.value_dim if self.mla else self.head_dim)

    def with_plain_blocks(self) -> "DecoderConfig":
        """Return the config with standard attention and MLPs, as draft heads use them."""
        return dataclasses.replace(self, mla=None, moe=None, rotary_dim=None, windows=())

    def has_experts(self, layer: int) -> bool:
        """Return whether block ``layer`` is a mixture of experts."""
        return self.moe is not None and layer >= self.moe.first_dense

    @property
    def qkv_sizes(self) -> tuple[int, int]:
        """Widths of the queries, and of the keys (or values)."""
        return self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim

    @property
    def attention_options(self) -> dict:
        """Keyword arguments of ``attention_over`` and ``attention_beside``."""
        return {"windows": self.windows, "implementation": self.attention}

    def norm(self, x: Array, weight: Array) -> Array:
        """Return the RMS norm of x over its last axis."""
        return rms_norm(x, weight, self.norm_eps)


@struct.dataclass
class LayerParams:
    """Weights of one block; None for tensors that the family lacks."""

    attention_norm: Array | None  # [D]; None for a first block whose input is already normed
    qkv: Array | None  # [D, (H + 2 Hkv) * head_dim]; None for latent attention
    output: Array  # [H * head_dim, D]
    mlp_norm: Array  # [D]
    gate_up: Array  # [D, 2 * intermediate]; in a mixture, the shared expert
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
    """Weights of a decoder; ``head`` is None if the embedding is tied."""

    embedding: Array  # [V, D]
    layers: tuple[LayerParams, ...]
    norm: Array  # [D]
    head: Array | None = None  # [D, V]


def init_params(key: Array, config: DecoderConfig, dtype: jnp.dtype = jnp.float32) -> DecoderParams:
    """Return random normal weights of std 0.02, less for projections into the residual stream."""
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
    """Refuse weights of another model.

    Raises:
      ValueError: the weights are not a decoder's, or have other sizes.
    """
    validation.check_kind(params, DecoderParams)
    actual = *params.embedding.shape, len(params.layers)
    expected = config.vocab_size, config.hidden_size, config.num_layers
    if actual != expected:
        raise ValueError(
            "its vocabulary, width and number of layers are {}, {}, {}, but theirs {}, {}, {}; "
            "were they loaded from another checkpoint?".format(*expected, *actual)
        )


def init_layers(
    key: Array, config: DecoderConfig, dtype: jnp.dtype = jnp.float32
) -> tuple[LayerParams, ...]:
    """Return the blocks of ``init_params``."""
    return _init_layers(jax.random.split(key, 4 * config.num_layers), config, dtype)


def _init_layers(keys, config: DecoderConfig, dtype: jnp.dtype) -> tuple[LayerParams, ...]:
    """Return blocks drawn from four keys each."""
    hidden, shrink = config.hidden_size, (2 * config.num_layers) ** -0.5
    q_size, kv_size = config.qkv_sizes
    bias = lambda exists, size: jnp.zeros((size,), dtype) if exists else None
    head_norm = lambda: jnp.ones((config.head_dim,), dtype) if config.qk_norm else None

    def layer(index: int) -> LayerParams:
        first, *others = keys[4 * index : 4 * index + 4]
        mixed, parts = config.has_experts(index), {"qkv": None}
        wide = config.moe.shared_size if mixed else config.intermediate_size
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
    """Return the first residual stream [..., D] of token ids [...]."""
    return ops.look_up(params.embedding, tokens).astype(config.activation_dtype)


def unembed(
    params: DecoderParams,
    config: DecoderConfig,
    x: Array,
    *,
    norm: bool = True,
    linear: Linear = ops.linear,
) -> Array:
    """Return float32 logits [..., V] of the last residual stream [..., D].

    ``norm=False`` skips the final norm.
    """
    x = config.norm(x, params.norm) if norm else x
    if params.head is None:
        return linear(x, params.embedding, transposed=True)
    return linear(x, params.head)


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
    rows: Array | None = None,
    packing: Packing | None = None,
) -> tuple[Array, tuple[Array, ...]]:
    """Run every block over x [B, T, D] at int32 positions [B, T].

    ``attend`` implements the attention: causal within x for training, over a cache for decoding.
    With ``remat`` a backward pass stores only the inputs of blocks and recomputes the rest. If
    ``rows`` [B, M] is given, the last block computes only these rows, and keys and values of all.
    With a ``packing``, of which ``linear`` is, x are its entries.

    Returns:
      The last residual stream [B, T, D] (before the final norm), and the streams of
      ``capture_layers``: index i is the input of block i, as in Hugging Face's ``hidden_states``;
      index ``num_layers`` is the output of the final norm.
    """
    shape_checks.check_captured(capture_layers, config.num_layers)
    cos, sin = rope_lib.cos_sin(config.rope, config.rope_dim, positions)
    stream = [x]

    def run(index: int, layer: LayerParams, x: Array) -> Array:
        last = index == len(params.layers) - 1
        queried = rows if last else None
        return block(layer, config, x, cos, sin, index, attend, linear, queried, packing)

    if remat:
        run = jax.checkpoint(run, static_argnums=0)
    for index, layer in enumerate(params.layers):
        x = run(index, layer, x)
        stream.append(x)
    if config.num_layers in capture_layers:
        stream[-1] = config.norm(x, params.norm)
    return x, tuple(stream[index] for index in capture_layers)


def block(layer, config, x, cos, sin, index, attend, linear, rows=None, packing=None) -> Array:
    """Return the residual stream [B, T, D] after a block; ``index`` is passed to ``attend``.

    ``rows`` [B, M] restricts the output to [B, M, D].
    """
    with jax.named_scope("attention"):
        normed = config.norm(x, layer.attention_norm)
        if layer.mla is None:
            mixed = attention(layer, config, normed, cos, sin, index, attend, linear, rows)
        else:
            mixed = mla.attention(
                layer, config, normed, cos, sin, index, attend, linear, rows, packing
            )
        x = rows_at(x, rows) + mixed
    with jax.named_scope("mlp"):
        return x + mlp(layer, config, x, linear, packing)


def mlp(layer, config, x, linear, packing=None) -> Array:
    """Return the output [B, T, D] of a block's norm and MLP (or experts) for x [B, T, D]."""
    normed = config.norm(x, layer.mlp_norm)
    if layer.moe is not None:
        shared = gated(normed, layer.gate_up, layer.down, linear)
        count = None if packing is None else packing.count
        routed = moe.mixture(layer.moe, config.moe, normed, count=count)
        return (routed + shared).astype(x.dtype)
    gate, up = jnp.split(affine(normed, layer.gate_up, layer.gate_up_bias, linear), 2, axis=-1)
    return affine(jax.nn.silu(gate) * up, layer.down, layer.down_bias, linear).astype(x.dtype)


def init_cache(config: DecoderConfig, batch: int, capacity: int) -> kv_cache.KVCache:
    """Return an empty cache of ``capacity`` slots per row."""
    dtype = jnp.dtype(config.cache_dtype)

    def entry() -> AttentionKV | LatentKV:
        if config.mla:
            return LatentKV.empty(batch, capacity, config.mla.width, dtype)
        return AttentionKV.empty(batch, config.num_kv_heads, capacity, config.head_dim, dtype)

    layers = [entry() for _ in range(config.num_layers)]
    return kv_cache.empty(batch, layers, window=kv_cache.widest(config.windows))


def forward(
    params: DecoderParams,
    config: DecoderConfig,
    tokens: Array,
    tree: Tree,
    cache: kv_cache.KVCache,
    capture_layers: tuple[int, ...] = (),
    packing: Packing | None = None,
) -> TargetOutput:
    """Score the nodes ``tokens`` [B, N] of ``tree``, which follow the cache's prefix.

    With a ``packing``, all matmuls run over its nodes alone, and the output of others is undefined.
    """
    tree = trees.broadcast(tree, tokens.shape[0])
    attend, tree_kv = attention_over(cache, tree, packing=packing, **config.attention_options)
    positions, unpack, linear = cache.length[:, None] + tree.depth, lambda x: x, ops.linear
    if packing is not None:
        tokens, positions = packing.pack(tokens), packing.pack(positions)
        unpack, linear = packing.unpack, packed_linear(packing)
    x = embed(params, config, tokens)
    x, features = trunk(
        params,
        config,
        x,
        positions,
        attend,
        linear=linear,
        capture_layers=capture_layers,
        packing=packing,
    )
    logits = unpack(unembed(params, config, x, linear=linear))
    return TargetOutput(logits, tuple(map(unpack, features)), tuple(tree_kv))


@dataclasses.dataclass(frozen=True)
class Decoder(Target):
    """A decoder as a ``Target``: a config bound to the functions of this module."""

    config: DecoderConfig

    reads_pages = True
    packs_nodes = True

    @property
    def vocab_size(self) -> int:
        """V, padding of the head included."""
        return self.config.vocab_size

    @property
    def max_positions(self) -> int:
        """Longest sequence that the checkpoint supports."""
        return self.config.max_positions

    def check_params(self, params: DecoderParams) -> None:
        """See ``check_params``."""
        check_params(params, self.config)

    def init_cache(self, batch: int, capacity: int) -> kv_cache.KVCache:
        """See ``init_cache``."""
        return init_cache(self.config, batch, capacity)

    def forward(self, params, tokens, tree, cache, capture_layers=(), packing=None) -> TargetOutput:
        """See ``forward``."""
        return forward(params, self.config, tokens, tree, cache, capture_layers, packing)

    def embed(self, params: DecoderParams, tokens: Array) -> Array:
        """See ``embed``."""
        return embed(params, self.config, tokens)

    def unembed(self, params: DecoderParams, hidden: Array, *, norm: bool = True) -> Array:
        """See ``unembed``."""
        return unembed(params, self.config, hidden, norm=norm)

"""DFlash heads: a block of masked tokens filled in at once, over the target's hidden states.

DFlash (arXiv 2602.06036) reads the target's hidden states as if they were a text of its own: fused
and normed once, every block turns them into keys and values, which no layer of the head changes.
So they are computed once for a committed position and stay in a cache: ::

    context = norm (fc [HS_a; HS_b; ...])       positions 0 .. r-1, all that the target has computed
    block   = embed [root, MASK, MASK, ...]     positions r, r+1, r+2, ...
    in every layer:  q                of norm block
                     keys and values  of context (as it is) and of norm block, side by side
    logits  = head (norm block)

The slots of a block see each other, later ones too, and slot i, which stands at position r + i,
says what the token at its OWN position is; slot 0 holds the root and says nothing. In a head that
samples ``from_anchor`` it is the token after: slot 0 says what stands at r + 1. Keys and values of
a block are forgotten when it is drafted.

A block need not have all ``block_size`` slots: to draft K tokens it has the root and K masks, as in
vLLM and in the authors' program when asked for smaller blocks.

DSpark heads are the same with something on top, see ``jspec.models.heads.dspark``.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from jspec import ops
from jspec.core import kv_cache, trees
from jspec.core.types import Array, Target
from jspec.models import decoder
from jspec.models import rope as rope_lib
from jspec.models.decoder import Attend, DecoderConfig, LayerParams, Linear, rms_norm
from jspec.models.heads import dspark
from jspec.models.heads.dspark import SparkConfig, SparkParams
from jspec.models.heads.network import NetworkSizes, embed


@dataclasses.dataclass(frozen=True)
class DFlashConfig(NetworkSizes):
    """Sizes and switches of a head; static and hashable.

    Attributes:
      network: the head's blocks. Its ``vocab_size`` is that of the draft, Vd.
      capture_layers: hidden states of the target that the head reads, as Hugging Face counts them.
      target_hidden_size: width of those.
      target_vocab_size: V.
      block_size: slots of a block that the head was trained for, the root's included.
      mask_token: the target's id that stands in every slot to be filled in.
      causal: for each layer, whether a slot sees only those before it; () for none does.
      from_anchor: whether the root's slot drafts too, each slot the token after its own position.
      own_embedding: whether the head brings an embedding; the target's serves otherwise.
      own_head: whether it brings an output matrix; the target's serves otherwise.
      spark: what a DSpark head has on top; None for DFlash.

    Raises:
      ValueError: the settings contradict each other.
    """

    network: DecoderConfig
    capture_layers: tuple[int, ...]
    target_hidden_size: int
    target_vocab_size: int
    block_size: int
    mask_token: int
    causal: tuple[bool, ...] = ()
    from_anchor: bool = False
    separate_embedding: bool = False
    separate_head: bool = False
    spark: SparkConfig | None = None

    def __post_init__(self):
        _check(self)

    @property
    def fc_inputs(self) -> int:
        """Rows of ``fc``."""
        return len(self.capture_layers) * self.target_hidden_size

    @property
    def max_depth(self) -> int:
        """Tokens that a whole block drafts."""
        return self.block_size if self.from_anchor else self.block_size - 1

    def slots(self, depth: int) -> int:
        """Slots of a block that drafts ``depth`` tokens."""
        return depth if self.from_anchor else depth + 1


@struct.dataclass
class DFlashParams:
    """Weights of a head; None where it has no such tensor."""

    fc: Array  # [C * D_target, D]
    hidden_norm: Array  # [D], of the fused hidden states
    layers: tuple[LayerParams, ...]
    norm: Array  # [D], before the head
    head: Array | None = None  # [D, Vd]
    embedding: Array | None = None  # [V, D]
    draft_to_target: Array | None = None  # [Vd] int32, ascending
    spark: SparkParams | None = None


def init_params(key: Array, config: DFlashConfig, dtype: jnp.dtype = jnp.float32) -> DFlashParams:
    """Random weights: normal, 0.02 wide; a reduced vocabulary is the first Vd tokens."""
    fc_key, layers_key, head_key, embedding_key, spark_key = jax.random.split(key, 5)
    hidden = config.hidden_size

    def normal(key: Array, *shape: int) -> Array:
        return (0.02 * jax.random.normal(key, shape)).astype(dtype)

    return DFlashParams(
        fc=normal(fc_key, config.fc_inputs, hidden),
        hidden_norm=jnp.ones((hidden,), dtype),
        layers=decoder.init_layers(layers_key, config.network, dtype),
        norm=jnp.ones((hidden,), dtype),
        head=normal(head_key, hidden, config.vocab_size) if config.separate_head else None,
        embedding=normal(embedding_key, config.target_vocab_size, hidden)
        if config.separate_embedding
        else None,
        draft_to_target=jnp.arange(config.vocab_size, dtype=jnp.int32) if config.reduced else None,
        spark=config.spark
        and dspark.init_params(
            spark_key, config.spark, hidden, config.target_vocab_size, config.vocab_size, dtype
        ),
    )


def init_cache(config: DFlashConfig, batch: int, capacity: int) -> kv_cache.KVCache:
    """An empty cache of ``capacity`` slots a row; slot i is for the target's position i."""
    return decoder.init_cache(config.network, batch, capacity)


def fuse(
    params: DFlashParams,
    config: DFlashConfig,
    features: tuple[Array, ...],
    *,
    linear: Linear = ops.linear,
) -> Array:
    """Hidden states of the target, one [..., D_target] a captured layer, to context [..., D]."""
    dtype = config.network.activation_dtype
    joined = jnp.concatenate([x.astype(dtype) for x in features], -1)
    fused = linear(joined, params.fc).astype(dtype)
    return rms_norm(fused, params.hidden_norm, config.network.norm_eps)


def inject(
    params: DFlashParams,
    config: DFlashConfig,
    context: Array,
    positions: Array,
    *,
    linear: Linear = ops.linear,
) -> tuple[kv_cache.AttentionKV, ...]:
    """What every layer makes of context [B, n, D] at int32 positions [B, n].

    Returns:
      One entry a layer, [B, Hkv, n, head_dim] each, for ``kv.append``.
    """
    network = config.network
    cos, sin = rope_lib.cos_sin(network.rope, network.head_dim, positions)
    queries = network.qkv_sizes[0]

    def entry(layer: LayerParams) -> kv_cache.AttentionKV:
        bias = None if layer.qkv_bias is None else layer.qkv_bias[queries:]
        both = decoder.affine(context, layer.qkv[:, queries:], bias, linear)
        k, v = jnp.split(both.reshape(*context.shape[:-1], -1, network.head_dim), 2, axis=2)
        if network.qk_norm:
            k = rms_norm(k, layer.k_norm, network.norm_eps)
        return kv_cache.AttentionKV(rope_lib.rotate(k, cos, sin).swapaxes(1, 2), v.swapaxes(1, 2))

    return tuple(entry(layer) for layer in params.layers)


def blocks(
    params: DFlashParams,
    config: DFlashConfig,
    embedded: Array,
    positions: Array,
    attend: Attend,
    *,
    linear: Linear = ops.linear,
) -> Array:
    """Runs the slots' streams [B, T, D] at int32 positions [B, T] to what ``unembed`` takes.

    ``attend`` owns the attention, as in ``decoder.trunk``, and brings in the context.

    Returns:
      [B, T, D], after the head's final norm.
    """
    network, x = config.network, embedded
    cos, sin = rope_lib.cos_sin(network.rope, network.head_dim, positions)
    for index, layer in enumerate(params.layers):
        normed = rms_norm(x, layer.attention_norm, network.norm_eps)
        x = x + decoder.attention(layer, network, normed, cos, sin, index, attend, linear)
        x = x + decoder.mlp(layer, network, x, linear)
    return rms_norm(x, params.norm, network.norm_eps)


def fill_in(
    params: DFlashParams,
    config: DFlashConfig,
    root: Array,
    depth: int,
    cache: kv_cache.KVCache,
    target: Target,
    target_params: object,
) -> Array:
    """One pass over a block: the root and the masks behind it, over the context in the cache.

    Args:
      params: weights.
      config: sizes.
      root: int32 [B], the last committed token.
      depth: K, tokens to draft, at most ``config.max_depth``.
      cache: of the context, read only; the root stands at its ``length``.
      target: whose embedding serves where the head has none.
      target_params: its weights.

    Returns:
      [B, K, D], one row a drafted token, for ``unembed``.
    """
    slots = config.slots(depth)
    masks = jnp.full((root.shape[0], slots - 1), config.mask_token, root.dtype)
    tokens = jnp.concatenate([root[:, None], masks], 1)
    positions = cache.length[:, None] + jnp.arange(slots)
    embedded = embed(params, config, tokens, target, target_params)
    hidden = blocks(params, config, embedded, positions, _over(config, cache, positions))
    return hidden[:, slots - depth :]


def _over(config: DFlashConfig, cache: kv_cache.KVCache, positions: Array) -> Attend:
    """Attention of a block's slots over the context and over each other."""
    network, (batch, slots) = config.network, positions.shape

    def attend(index: int, q: Array, k: Array, v: Array) -> Array:
        entry = cache.layers[index]
        seen = (
            np.tri(slots, dtype=bool) if is_causal(config, index) else np.ones((slots,) * 2, bool)
        )
        words = trees.pack_bits(seen)
        return ops.attention(
            q,
            k.astype(entry.k.dtype),
            v.astype(entry.v.dtype),
            jnp.broadcast_to(words, (batch, *words.shape)),
            entry.k,
            entry.v,
            cache.length,
            scale=network.head_dim**-0.5,
            window=network.windows[index] if network.windows else None,
            positions=positions,
            implementation=network.attention,
        )

    return attend


def is_causal(config: DFlashConfig, layer: int) -> bool:
    """Whether a slot of that layer sees only those before it."""
    return bool(config.causal) and config.causal[layer]


def unembed(
    params: DFlashParams,
    config: DFlashConfig,
    hidden: Array,
    target: Target,
    target_params: object,
    *,
    linear: Linear = ops.linear,
) -> Array:
    """What ``blocks`` gave [..., D] to float32 logits [..., Vd] over the draft's vocabulary."""
    del config
    if params.head is None:
        return target.unembed(target_params, hidden, norm=False)
    return linear(hidden, params.head)


def _check(config: DFlashConfig) -> None:
    if config.block_size < 2:
        raise ValueError(f"block_size={config.block_size} must be at least 2: a root and a mask.")
    if not 0 <= config.mask_token < config.target_vocab_size:
        raise ValueError(
            f"mask_token={config.mask_token} is none of the target's {config.target_vocab_size} "
            "ids."
        )
    if config.causal and len(config.causal) != config.network.num_layers:
        raise ValueError(
            f"causal={config.causal} must say it for each of {config.network.num_layers} layers."
        )
    if not config.capture_layers:
        raise ValueError("capture_layers=() must name one hidden state or more.")
    shared = [name for name in ("separate_embedding", "separate_head") if not vars(config)[name]]
    if config.hidden_size != config.target_hidden_size and shared:
        raise ValueError(
            f"the head is {config.hidden_size} wide and the target {config.target_hidden_size}, so "
            "it cannot share the target's embedding or output matrix; only a head with both of its "
            "own can differ."
        )
    if config.reduced and not config.separate_head:
        raise ValueError(
            f"a head with {config.vocab_size} of the target's {config.target_vocab_size} tokens "
            "needs an output matrix of its own (own_head=True)."
        )

"""DFlash heads: all tokens of a block predicted in one pass, over the target's hidden states.

DFlash (arXiv 2602.06036) fuses and norms the target's hidden states once. Every layer of the head
projects them to keys and values, which do not depend on the block. So they are computed once per
committed position and cached: ::

    context = norm (fc [HS_a; HS_b; ...])       positions 0 .. r-1, all that the target has computed
    block   = embed [root, MASK, MASK, ...]     positions r, r+1, r+2, ...
    in every layer:  q                of norm block
                     keys and values  of context (unnormed) and of norm block, concatenated
    logits  = head (norm block)

The slots of a block see each other, later ones too. Slot i, at position r + i, predicts the token
at its OWN position; slot 0 holds the root and predicts nothing. With ``from_anchor``, slot i
predicts the token at r + i + 1. The keys and values of a block are discarded after it is drafted.

To draft K tokens, a block has the root and K masks, at most ``block_size`` slots. vLLM and the
authors' program draft smaller blocks in the same way.

DSpark heads extend these, see ``jspec.models.heads.dspark``. Drafter: ``jspec.drafters.dflash``.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from jspec import ops
from jspec.core import kv_cache, trees
from jspec.core.entries import AttentionKV, numbers
from jspec.core.types import Array, Target
from jspec.models import decoder
from jspec.models.blocks.arithmetic import Linear, by_rows, normal
from jspec.models.blocks.attend import Attend
from jspec.models.blocks.block import rotations_of
from jspec.models.decoder import DecoderConfig, LayerParams
from jspec.models.heads import dspark, network
from jspec.models.heads.dspark import SparkConfig, SparkParams
from jspec.models.heads.network import Divided, SharingSizes, embed
from jspec.sharding import COLUMNS, ROWS


@dataclasses.dataclass(frozen=True)
class DFlashConfig(SharingSizes):
    """Sizes and switches of a head; static and hashable."""

    network: DecoderConfig  # the blocks; its ``vocab_size`` is Vd, that of the draft
    capture_layers: tuple[int, ...]  # indices of the target's ``hidden_states`` that the head reads
    target_hidden_size: int  # D_target, their width
    target_vocab_size: int  # V
    block_size: int  # slots of a block in training, root included
    mask_token: int  # the target id of the mask
    causal: tuple[bool, ...] = ()  # per layer: a slot sees only earlier slots; () for none
    from_anchor: bool = False  # slot i predicts the token after its position, so slot 0 drafts too
    separate_embedding: bool = False  # the head has its own embedding, not the target's
    separate_head: bool = False  # it has its own output matrix, not the target's
    spark: SparkConfig | None = None  # the extension of a DSpark head

    def __post_init__(self):
        layers, vocab = self.network.num_layers, self.target_vocab_size
        if self.block_size < 2:
            raise ValueError(f"block_size={self.block_size} must be at least 2: a root and a mask.")
        if not 0 <= self.mask_token < vocab:
            raise ValueError(
                f"mask_token={self.mask_token} must be one of the target's {vocab} ids."
            )
        if self.causal and len(self.causal) != layers:
            raise ValueError(
                f"causal={self.causal} must be () or a bool for each of {layers} layers."
            )
        if not self.capture_layers:
            raise ValueError("capture_layers=() must name one hidden state or more.")
        self.check_sharing()

    @property
    def fc_inputs(self) -> int:
        """Number of rows of ``fc``."""
        return len(self.capture_layers) * self.target_hidden_size

    @property
    def max_depth(self) -> int:
        """Number of tokens that a block of ``block_size`` slots drafts."""
        return self.block_size if self.from_anchor else self.block_size - 1

    def slots(self, depth: int) -> int:
        """Return the number of slots of a block that drafts ``depth`` tokens."""
        return depth if self.from_anchor else depth + 1

    @property
    def divided(self) -> Divided:
        """See ``Divided``."""
        return super().divided | {
            "fc": (ROWS, self.fc_inputs),
            "spark.before": (ROWS, self.target_vocab_size),
            "spark.bias": (COLUMNS, self.vocab_size),
        }


@struct.dataclass
class DFlashParams:
    """Weights of a head; None for tensors that it lacks."""

    fc: Array  # [C * D_target, D]
    hidden_norm: Array  # [D], of the fused hidden states
    layers: tuple[LayerParams, ...]
    norm: Array  # [D], before the head
    head: Array | None = None  # [D, Vd]
    embedding: Array | None = None  # [V, D]
    draft_to_target: Array | None = None  # [Vd] int32, ascending
    spark: SparkParams | None = None


def init_params(key: Array, config: DFlashConfig, dtype: jnp.dtype = jnp.float32) -> DFlashParams:
    """Return random normal weights of std 0.02; a reduced vocabulary is the first Vd tokens."""
    fc_key, layers_key, head_key, embedding_key, spark_key = jax.random.split(key, 5)
    hidden, spark = config.hidden_size, config.spark
    if spark is not None:
        spark = dspark.init_params(
            spark_key, spark, hidden, config.target_vocab_size, config.vocab_size, dtype
        )
    return DFlashParams(
        fc=normal(fc_key, (config.fc_inputs, hidden), dtype),
        hidden_norm=jnp.ones((hidden,), dtype),
        layers=decoder.init_layers(layers_key, config.network, dtype),
        norm=jnp.ones((hidden,), dtype),
        spark=spark,
        **network.init_shared(head_key, embedding_key, config, dtype),
    )


def fuse(
    params: DFlashParams,
    config: DFlashConfig,
    features: tuple[Array, ...],
    *,
    linear: Linear = ops.linear,
) -> Array:
    """Return context [..., D] of the target's hidden states, [..., D_target] per captured layer."""
    dtype = config.network.activation_dtype
    joined = jnp.concatenate([x.astype(dtype) for x in features], -1)
    fused = by_rows(joined, params.fc, None, linear).astype(dtype)
    return config.network.norm(fused, params.hidden_norm)


def inject(
    params: DFlashParams,
    config: DFlashConfig,
    context: Array,
    positions: Array,
    *,
    linear: Linear = ops.linear,
) -> tuple[AttentionKV, ...]:
    """Return each layer's cache entry of context [B, n, D] at int32 positions [B, n].

    The entries [B, Hkv, n, head_dim] are for ``kv_cache.append``.
    """
    mixers = [layer.mixer for layer in config.network.layers]
    rotations = rotations_of(mixers, positions)
    return tuple(
        mixer.keys_and_values(layer.mixer, context, rotations[mixer.rotation], linear)
        for mixer, layer in zip(mixers, params.layers, strict=True)
    )


def blocks(
    params: DFlashParams,
    config: DFlashConfig,
    embedded: Array,
    positions: Array,
    attend: Attend,
    *,
    linear: Linear = ops.linear,
) -> Array:
    """Return the normed output [B, T, D] of the slots' embeddings at int32 positions [B, T].

    ``attend`` is that of ``decoder.trunk`` and adds the context.
    """
    x, _ = decoder.trunk(params, config.network, embedded, positions, attend, linear=linear)
    return config.network.norm(x, params.norm)


def fill_in(
    params: DFlashParams,
    config: DFlashConfig,
    root: Array,
    depth: int,
    cache: kv_cache.KVCache,
    target: Target,
    target_params: object,
) -> Array:
    """Run one pass over a block: the root int32 [B] and the masks after it.

    ``cache`` holds the context; the root's position is its ``length``. ``depth`` is K, at most
    ``config.max_depth``.

    Returns:
      [B, K, D], one row per drafted token, for ``unembed``.
    """
    slots = config.slots(depth)
    masks = jnp.full((root.shape[0], slots - 1), config.mask_token, root.dtype)
    tokens = jnp.concatenate([root[:, None], masks], 1)
    positions = cache.length[:, None] + jnp.arange(slots)
    embedded = embed(params, config, tokens, target, target_params)
    hidden = blocks(params, config, embedded, positions, _over(config, cache, positions))
    return hidden[:, slots - depth :]


def _over(config: DFlashConfig, cache: kv_cache.KVCache, positions: Array) -> Attend:
    """Return an ``attend`` of a block's slots over the context and each other."""
    batch, slots = positions.shape

    def attend(
        index: int, q: Array, k: Array, v: Array, window: int | None = None, **scores: Any
    ) -> Array:
        entry = cache.layers[index]
        block = entry.holding(k, v)
        square = (slots, slots)
        mask = np.tri(*square, dtype=bool) if is_causal(config, index) else np.ones(square, bool)
        words = trees.pack_bits(mask)
        return ops.attention(
            q,
            numbers(block.k),
            numbers(block.v),
            jnp.broadcast_to(words, (batch, *words.shape)),
            entry.k,
            entry.v,
            cache.length,
            table=cache.table_of(index),
            window=window,
            positions=positions,
            implementation=config.network.attention,
            is_split=entry.has_split_queries,
            **scores,
        )

    return attend


def is_causal(config: DFlashConfig, layer: int) -> bool:
    """Return whether a slot of ``layer`` sees only earlier slots."""
    return bool(config.causal) and config.causal[layer]

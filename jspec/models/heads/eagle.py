"""EAGLE heads: decoder blocks that read the target's hidden states.

Row i of a head pairs the feature f_i of position i with the embedding of the NEXT token t_{i+1}. It
is rotated to position i and predicts t_{i+2}. The output of a row replaces the feature of the next
row until the target has computed the true one.

EAGLE-1 and -2 (arXiv 2401.15077, 2406.16858; same checkpoints): f is the target's last hidden state
after its final norm, and the head predicts the next such f: ::

    x = fc [e; f]            h = x + attention(x)            f' = h + mlp(norm h)
    logits = target's head(f')

EAGLE-3 (arXiv 2503.01840): f is an unnormed projection of several hidden states: ::

    f = fc [HS_a; HS_b; HS_c]        for features of the target only; f' is fed back unchanged
    x = [norm e; norm f]     h = f + attention(x)            f' = h + mlp(norm h)
    logits = head(norm f')

P-EAGLE (arXiv 2602.01469) is EAGLE-3 trained to predict several tokens in one pass. A row after the
last true feature has a mask token's embedding as e and ``fc`` of a learned vector as f. It has the
position of the row that it replaces, and its output is never fed back.

Blocks after the first are plain decoder blocks. ``EagleConfig`` lists the published variants.
Drafter: ``jspec.drafters.eagle`` and ``jspec.drafters.parallel_eagle``.
"""

import dataclasses
from typing import Literal

import jax
import jax.numpy as jnp
from flax import struct

from jspec import ops
from jspec.core import kv_cache, trees
from jspec.core.entries import AttentionKV
from jspec.core.types import Array, Target
from jspec.models import decoder
from jspec.models.blocks.arithmetic import Linear, by_rows, normal
from jspec.models.blocks.attend import Attend, attention_over
from jspec.models.blocks.block import Pass, rotations_of
from jspec.models.decoder import DecoderConfig
from jspec.models.heads import network
from jspec.models.heads.network import Divided, SharingSizes
from jspec.models.layer import LayerParams, apply_normed
from jspec.sharding import ROWS


@dataclasses.dataclass(frozen=True)
class EagleConfig(SharingSizes):
    """Sizes and switches of a head; static and hashable."""

    network: DecoderConfig  # the blocks; its ``vocab_size`` is Vd, that of the draft
    generation: Literal[1, 3]  # 1 for EAGLE-1 and -2, 3 for EAGLE-3
    capture_layers: tuple[int, ...]  # indices of the target's ``hidden_states`` that the head reads
    target_hidden_size: int  # D_target, their width
    target_vocab_size: int  # V
    separate_embedding: bool = False  # the head has its own embedding, not the target's
    separate_head: bool = False  # it has its own output matrix, not the target's
    fc_bias: bool = False
    norm_inputs: bool = False  # EAGLE-1: e and f are normed before ``fc`` (HASS's add_para_norm)
    feature_norms: bool = False  # EAGLE-3: one norm per hidden state before ``fc`` (fc_norm)
    input_norm: bool = False  # EAGLE-3: one norm over their concatenation (norm_before_fc)
    norm_before_residual: bool = False  # EAGLE-3: the first residual is norm f, not f
    norm_output: bool = False  # EAGLE-3: norm f' is fed back, not f'
    mask_token_id: int | None = None  # P-EAGLE: the target id of the mask token

    def __post_init__(self):
        first, layers = self.generation == 1, self.capture_layers
        if self.generation not in (1, 3):
            raise ValueError(f"generation={self.generation!r} must be 1 (EAGLE-1 and -2) or 3.")
        of_three = "feature_norms", "input_norm", "norm_before_residual", "norm_output"
        foreign = (*of_three, "mask_token_id") if first else ("norm_inputs",)
        wrong = [name for name in foreign if vars(self)[name] is not vars(EagleConfig)[name]]
        if wrong:
            raise ValueError(f"{', '.join(wrong)} do not belong to EAGLE-{self.generation}.")
        mask, vocab = self.mask_token_id, self.target_vocab_size
        if mask is not None and not 0 <= mask < vocab:
            raise ValueError(f"mask_token_id={mask} is none of the target's {vocab} tokens.")
        if self.feature_norms and self.input_norm:
            raise ValueError("feature_norms and input_norm exclude each other.")
        if not layers or (first and len(layers) > 1):
            count = "one hidden state" if first else "one hidden state or more"
            raise ValueError(f"capture_layers={layers} must name {count}.")
        if first and self.hidden_size != self.target_hidden_size:
            raise ValueError(
                f"an EAGLE-1 head must be as wide as the target, {self.target_hidden_size}, not "
                f"{self.hidden_size}."
            )
        self.check_sharing()

    @property
    def fc_inputs(self) -> int:
        """Number of rows of ``fc``."""
        if self.generation == 1:
            return 2 * self.hidden_size
        return len(self.capture_layers) * self.target_hidden_size

    @property
    def divided(self) -> Divided:
        """See ``Divided``."""
        return super().divided | {"fc": (ROWS, self.fc_inputs)}


@struct.dataclass
class EagleParams:
    """Weights of a head; None for tensors that it lacks.

    The first of ``layers`` has no ``mixer_norm``; in EAGLE-3 its mixer reads 2D features.
    """

    fc: Array  # EAGLE-1 [2D, D], embedding first; EAGLE-3 [C * D_target, D]
    layers: tuple[LayerParams, ...]
    fc_bias: Array | None = None  # [D]
    embedding_norm: Array | None = None  # [D], of e
    hidden_norm: Array | None = None  # [D], of f
    feature_norms: Array | None = None  # [C * D_target], the norms concatenated
    input_norm: Array | None = None  # [C * D_target]
    norm: Array | None = None  # [D], before the head
    head: Array | None = None  # [D, Vd]
    embedding: Array | None = None  # [V, D]
    mask_hidden: Array | None = None  # [1, 1, C * D_target], replaces unknown features
    draft_to_target: Array | None = None  # [Vd] int32, ascending


def init_params(key: Array, config: EagleConfig, dtype: jnp.dtype = jnp.float32) -> EagleParams:
    """Return random normal weights of std 0.02; a reduced vocabulary is the first Vd tokens."""
    fc_key, layers_key, first_key, head_key, embedding_key = jax.random.split(key, 5)
    mask_key = jax.random.fold_in(key, 5)
    hidden = config.hidden_size
    ones = lambda size, exists: jnp.ones((size,), dtype) if exists else None
    layers = decoder.init_layers(layers_key, config.network, dtype)
    first, third = layers[0].replace(mixer_norm=None), config.generation == 3
    if third:
        qkv = normal(first_key, (2 * hidden, first.mixer.qkv.shape[1]), dtype)
        first = first.replace(mixer=first.mixer.replace(qkv=qkv))
    mask = jax.random.normal(mask_key, (1, 1, config.fc_inputs)).astype(dtype)
    return EagleParams(
        fc=normal(fc_key, (config.fc_inputs, hidden), dtype),
        layers=(first, *layers[1:]),
        fc_bias=jnp.zeros((hidden,), dtype) if config.fc_bias else None,
        embedding_norm=ones(hidden, third or config.norm_inputs),
        hidden_norm=ones(hidden, third or config.norm_inputs),
        feature_norms=ones(config.fc_inputs, config.feature_norms),
        input_norm=ones(config.fc_inputs, config.input_norm),
        norm=ones(hidden, third),
        mask_hidden=None if config.mask_token_id is None else mask,
        **network.init_shared(head_key, embedding_key, config, dtype),
    )


def fuse(
    params: EagleParams,
    config: EagleConfig,
    features: tuple[Array, ...],
    *,
    linear: Linear = ops.linear,
) -> Array:
    """Return f [..., D] of the target's hidden states, [..., D_target] per captured layer."""
    dtype, norm = config.network.activation_dtype, config.network.norm
    if config.generation == 1:
        return features[0].astype(dtype)
    apart = jnp.stack([x.astype(dtype) for x in features], -2)  # [..., C, D_target]
    if params.feature_norms is not None:
        apart = norm(apart, params.feature_norms.reshape(apart.shape[-2:]))
    joined = apart.reshape(*apart.shape[:-2], -1)
    if params.input_norm is not None:
        joined = norm(joined, params.input_norm)
    return by_rows(joined, params.fc, params.fc_bias, linear).astype(dtype)


def mask_feature(params: EagleParams, config: EagleConfig, *, linear: Linear = ops.linear) -> Array:
    """Return f [1, 1, D] of rows after the last true feature, for heads with a mask token."""
    apart = jnp.split(params.mask_hidden, len(config.capture_layers), -1)
    return fuse(params, config, tuple(apart), linear=linear)


def blocks(
    params: EagleParams,
    config: EagleConfig,
    embedded: Array,
    features: Array,
    positions: Array,
    attend: Attend,
    *,
    linear: Linear = ops.linear,
    rows: Array | None = None,
) -> Array:
    """Return f' [B, T, D] of rows e and f [B, T, D] at int32 positions [B, T].

    f' is fed back and is the input of ``unembed``. ``attend`` and ``rows`` [B, M] are those of
    ``decoder.trunk``; with ``rows`` the result is [B, M, D].
    """
    sizes, last = config.network, config.network.num_layers - 1
    rotations = rotations_of((layer.mixer for layer in sizes.layers), positions)
    run = Pass(attend, rotations, positions, linear)
    x, mixed_in = _first_block_inputs(params, config, embedded, features, linear)
    for index, (layer, weights) in enumerate(zip(sizes.layers, params.layers, strict=True)):
        if index > 0:
            mixed_in = layer.norm(x, weights.mixer_norm)
        queried = rows if index == last else None
        x = apply_normed(layer, weights, x, mixed_in, run, index, queried)
    return sizes.norm(x, params.norm) if config.norm_output else x


def _first_block_inputs(params, config, embedded, features, linear) -> tuple[Array, Array]:
    """Return the residual stream [B, T, D] and the attention input of the first block."""
    e, f, norm = embedded, features, config.network.norm
    if params.embedding_norm is not None:
        e, f = norm(e, params.embedding_norm), norm(f, params.hidden_norm)
    joined = jnp.concatenate([e, f], -1)
    if config.generation == 3:
        return (f if config.norm_before_residual else features), joined
    x = by_rows(joined, params.fc, params.fc_bias, linear).astype(features.dtype)
    return x, x


def prefill(
    params: EagleParams,
    config: EagleConfig,
    embedded: Array,
    features: Array,
    cache: kv_cache.KVCache,
    rows: Array | None = None,
) -> tuple[Array, tuple[AttentionKV, ...]]:
    """Run n rows of true features, e and f [B, n, D], which follow those in the cache.

    Returns:
      f' [B, n, D], or [B, m, D] of ``rows`` int32 [B, m] only; and the cache entries of all n rows
      for ``kv_cache.append``.
    """
    tree, implementation = trees.chain_tree(*embedded.shape[:2]), config.network.attention
    attend, entries = attention_over(cache, tree, rows=rows, implementation=implementation)
    positions = cache.length[:, None] + tree.depth
    x = blocks(params, config, embedded, features, positions, attend, rows=rows)
    return x, tuple(entries)


def unembed(
    params: EagleParams, config: EagleConfig, hidden: Array, target: Target, target_params: object
) -> Array:
    """Return float32 logits [..., Vd] of f' [..., D]."""
    if params.norm is not None and not config.norm_output:
        hidden = config.network.norm(hidden, params.norm)
    return network.unembed(params, hidden, target, target_params)

"""EAGLE heads: one or a few decoder blocks that read the target's hidden states.

Row i of a head pairs the feature f_i of position i with the embedding of the NEXT token t_{i+1}, is
rotated to position i, and predicts t_{i+2}. What a row gives out is the feature of the next row as
long as the target has not computed a true one.

EAGLE-1 and -2 (arXiv 2401.15077, 2406.16858; the checkpoint is the same): f is the target's last
hidden state after its final norm, and so is what the head predicts: ::

    x = fc [e; f]            h = x + attention(x)            f' = h + mlp(norm h)
    logits = target's head(f')

EAGLE-3 (arXiv 2503.01840): f is a projection of several hidden states, not normed: ::

    f = fc [HS_a; HS_b; HS_c]        only for features of the target, f' is fed back as it is
    x = [norm e; norm f]     h = f + attention(x)            f' = h + mlp(norm h)
    logits = head(norm f')

P-EAGLE (arXiv 2602.01469) is EAGLE-3 trained to guess several tokens in one pass. A row behind the
last true feature has the embedding of a mask token for e and ``fc`` of a learned vector for f; it
stands at the place of the row that it is there for, and what it gives out is never fed back.

Blocks after the first are plain decoder blocks. The options of ``EagleConfig`` say what published
variants change.
"""

import dataclasses
from typing import Literal

import jax
import jax.numpy as jnp
from flax import struct

from jspec import ops
from jspec.core import kv_cache, trees
from jspec.core.types import Array, Target
from jspec.models import decoder
from jspec.models import rope as rope_lib
from jspec.models.decoder import Attend, DecoderConfig, LayerParams, Linear, rms_norm
from jspec.models.heads.network import NetworkSizes
from jspec.models.layers import rows_at


@dataclasses.dataclass(frozen=True)
class EagleConfig(NetworkSizes):
    """Sizes and switches of a head; static and hashable.

    Attributes:
      network: the head's blocks. Its ``vocab_size`` is that of the draft, Vd.
      generation: 1 for EAGLE-1 and -2, 3 for EAGLE-3.
      capture_layers: hidden states of the target that the head reads, as Hugging Face counts them.
      target_hidden_size: width of those.
      target_vocab_size: V.
      own_embedding: whether the head brings an embedding; the target's serves otherwise.
      own_head: whether it brings an output matrix; the target's serves otherwise.
      fc_bias: whether ``fc`` has a bias.
      norm_inputs: EAGLE-1: e and f are normed before ``fc`` (HASS's add_para_norm).
      feature_norms: EAGLE-3: a norm for each hidden state before ``fc`` (fc_norm).
      input_norm: EAGLE-3: one norm over their concatenation (norm_before_fc).
      norm_before_residual: EAGLE-3: the first residual is norm f, not f.
      norm_output: EAGLE-3: norm f' is what is fed back, not f'.
      mask_token_id: P-EAGLE: the mask, a token of the target; None for a head that has none.

    Raises:
      ValueError: the settings contradict each other.
    """

    network: DecoderConfig
    generation: Literal[1, 3]
    capture_layers: tuple[int, ...]
    target_hidden_size: int
    target_vocab_size: int
    separate_embedding: bool = False
    separate_head: bool = False
    fc_bias: bool = False
    norm_inputs: bool = False
    feature_norms: bool = False
    input_norm: bool = False
    norm_before_residual: bool = False
    norm_output: bool = False
    mask_token_id: int | None = None

    def __post_init__(self):
        _check(self)

    @property
    def fc_inputs(self) -> int:
        """Rows of ``fc``."""
        if self.generation == 1:
            return 2 * self.hidden_size
        return len(self.capture_layers) * self.target_hidden_size


@struct.dataclass
class EagleParams:
    """Weights of a head; None where it has no such tensor.

    The first of ``layers`` has no ``attention_norm``; in EAGLE-3 its ``qkv`` takes [2D].
    """

    fc: Array  # EAGLE-1 [2D, D], embedding first; EAGLE-3 [C * D_target, D]
    layers: tuple[LayerParams, ...]
    fc_bias: Array | None = None  # [D]
    embedding_norm: Array | None = None  # [D], of e
    hidden_norm: Array | None = None  # [D], of f
    feature_norms: Array | None = None  # [C * D_target], one norm after the other
    input_norm: Array | None = None  # [C * D_target]
    norm: Array | None = None  # [D], before the head
    head: Array | None = None  # [D, Vd]
    embedding: Array | None = None  # [V, D]
    mask_hidden: Array | None = None  # [1, 1, C * D_target], what stands for unknown features
    draft_to_target: Array | None = None  # [Vd] int32, ascending


def init_params(key: Array, config: EagleConfig, dtype: jnp.dtype = jnp.float32) -> EagleParams:
    """Random weights: normal, 0.02 wide; a reduced vocabulary is the first Vd tokens."""
    fc_key, layers_key, first_key, head_key, embedding_key = jax.random.split(key, 5)
    mask_key = jax.random.fold_in(key, 5)
    network, hidden = config.network, config.hidden_size

    def normal(key: Array, *shape: int) -> Array:
        return (0.02 * jax.random.normal(key, shape)).astype(dtype)

    ones = lambda size, wanted: jnp.ones((size,), dtype) if wanted else None
    layers = decoder.init_layers(layers_key, network, dtype)
    first = layers[0].replace(attention_norm=None)
    third = config.generation == 3
    if third:
        first = first.replace(qkv=normal(first_key, 2 * hidden, first.qkv.shape[1]))
    return EagleParams(
        fc=normal(fc_key, config.fc_inputs, hidden),
        layers=(first, *layers[1:]),
        fc_bias=jnp.zeros((hidden,), dtype) if config.fc_bias else None,
        embedding_norm=ones(hidden, third or config.norm_inputs),
        hidden_norm=ones(hidden, third or config.norm_inputs),
        feature_norms=ones(config.fc_inputs, config.feature_norms),
        input_norm=ones(config.fc_inputs, config.input_norm),
        norm=ones(hidden, third),
        head=normal(head_key, hidden, config.vocab_size) if config.separate_head else None,
        embedding=normal(embedding_key, config.target_vocab_size, hidden)
        if config.separate_embedding
        else None,
        mask_hidden=jax.random.normal(mask_key, (1, 1, config.fc_inputs)).astype(dtype)
        if config.mask_token_id is not None
        else None,
        draft_to_target=jnp.arange(config.vocab_size, dtype=jnp.int32) if config.reduced else None,
    )


def init_cache(config: EagleConfig, batch: int, capacity: int) -> kv_cache.KVCache:
    """An empty cache of ``capacity`` slots a row; slot i is for row i of the head."""
    return decoder.init_cache(config.network, batch, capacity)


def fuse(
    params: EagleParams,
    config: EagleConfig,
    features: tuple[Array, ...],
    *,
    linear: Linear = ops.linear,
) -> Array:
    """Hidden states of the target, one [..., D_target] a captured layer, to f [..., D]."""
    dtype = config.network.activation_dtype
    if config.generation == 1:
        return features[0].astype(dtype)
    eps = config.network.norm_eps
    apart = jnp.stack([x.astype(dtype) for x in features], -2)  # [..., C, D_target]
    if params.feature_norms is not None:
        apart = rms_norm(apart, params.feature_norms.reshape(apart.shape[-2:]), eps)
    joined = apart.reshape(*apart.shape[:-2], -1)
    if params.input_norm is not None:
        joined = rms_norm(joined, params.input_norm, eps)
    return decoder.affine(joined, params.fc, params.fc_bias, linear).astype(dtype)


def mask_feature(params: EagleParams, config: EagleConfig, *, linear: Linear = ops.linear) -> Array:
    """f [1, 1, D] of the rows behind the last true feature; of heads with a mask token."""
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
    wanted: Array | None = None,
) -> Array:
    """Runs the head over rows e and f [B, T, D] at int32 positions [B, T].

    ``attend`` owns the attention, and ``wanted`` are rows, as in ``decoder.trunk``.

    Returns:
      f' [B, T, D]: what is fed back, and what ``unembed`` takes. Of ``wanted`` alone [B, M, D].
    """
    network = config.network
    cos, sin = rope_lib.cos_sin(network.rope, network.rope_dim, positions)
    x, mixed_in = _first_block_inputs(params, config, embedded, features, linear)
    for index, layer in enumerate(params.layers):
        if index > 0:
            mixed_in = rms_norm(x, layer.attention_norm, network.norm_eps)
        kept = wanted if index == len(params.layers) - 1 else None
        mixed = decoder.attention(layer, network, mixed_in, cos, sin, index, attend, linear, kept)
        x = rows_at(x, kept) + mixed
        x = x + decoder.mlp(layer, network, x, linear)
    return rms_norm(x, params.norm, network.norm_eps) if config.norm_output else x


def _first_block_inputs(params, config, embedded, features, linear) -> tuple[Array, Array]:
    """The residual [B, T, D] that enters the first block, and what its attention reads."""
    eps = config.network.norm_eps
    e, f = embedded, features
    if params.embedding_norm is not None:
        e, f = rms_norm(e, params.embedding_norm, eps), rms_norm(f, params.hidden_norm, eps)
    joined = jnp.concatenate([e, f], -1)
    if config.generation == 3:
        return (f if config.norm_before_residual else features), joined
    x = decoder.affine(joined, params.fc, params.fc_bias, linear).astype(features.dtype)
    return x, x


def take_in(
    params: EagleParams,
    config: EagleConfig,
    embedded: Array,
    features: Array,
    cache: kv_cache.KVCache,
    wanted: Array | None = None,
) -> tuple[Array, tuple[kv_cache.AttentionKV, ...]]:
    """Runs n rows of true features that come next after those in the cache, in order.

    Args:
      params: weights.
      config: sizes.
      embedded: e [B, n, D], of the token after each row's feature.
      features: f [B, n, D].
      cache: earlier rows, read only.
      wanted: int32 [B, m], rows whose f' is wanted: of the others the last block only makes keys
        and values. None for all.

    Returns:
      f' [B, n, D], or [B, m, D] of those wanted, and the entries of all rows for ``kv.append``, one
      a layer [B, Hkv, n, head_dim].
    """
    batch, size, _ = embedded.shape
    tree = trees.broadcast(trees.from_parents(trees.chain(size - 1), size - 1), batch)
    attend, entries = decoder.attention_over(
        cache,
        tree,
        windows=config.network.windows,
        implementation=config.network.attention,
        wanted=wanted,
    )
    positions = cache.length[:, None] + tree.depth
    x = blocks(params, config, embedded, features, positions, attend, wanted=wanted)
    return x, tuple(entries)


def extend(
    params: EagleParams,
    config: EagleConfig,
    embedded: Array,
    features: Array,
    positions: Array,
    cache: kv_cache.KVCache,
    side: tuple[kv_cache.AttentionKV, ...],
    slot: Array,
    mask: Array,
) -> tuple[Array, tuple[kv_cache.AttentionKV, ...]]:
    """A drafting step: runs n rows and keeps their entries beside the cache.

    Args:
      params: weights.
      config: sizes.
      embedded: e [B, n, D], of the token after each row's feature.
      features: f [B, n, D].
      positions: int32 [B, n], of the features: one less than the tokens' own. A sliding window
        bounds what a row sees of the cache; of ``side`` it sees what ``mask`` says.
      cache: rows of true features, read only.
      side: one entry a layer, [B, Hkv, M, head_dim]: this round's keys and values so far.
      slot: int32 [], where in ``side`` the n new entries go.
      mask: bool [B, n, M], which side slots each row sees, its own included.

    Returns:
      f' [B, n, D] and the side buffers with the new entries.
    """
    attend, side = decoder.attention_beside(
        cache,
        side,
        slot,
        mask,
        positions,
        windows=config.network.windows,
        implementation=config.network.attention,
    )
    x = blocks(params, config, embedded, features, positions, attend)
    return x, tuple(side)


def unembed(
    params: EagleParams,
    config: EagleConfig,
    hidden: Array,
    target: Target,
    target_params: object,
    *,
    linear: Linear = ops.linear,
) -> Array:
    """f' [..., D] to float32 logits [..., Vd] over the draft's vocabulary."""
    if params.norm is not None and not config.norm_output:
        hidden = rms_norm(hidden, params.norm, config.network.norm_eps)
    if params.head is None:
        return target.unembed(target_params, hidden, norm=False)
    return linear(hidden, params.head)


def _check(config: EagleConfig) -> None:
    first_only, third_only = (
        ("norm_inputs",),
        (
            "feature_norms",
            "input_norm",
            "norm_before_residual",
            "norm_output",
            "mask_token_id",
        ),
    )
    if config.generation not in (1, 3):
        raise ValueError(f"generation={config.generation!r} must be 1 (EAGLE-1 and -2) or 3.")
    wrong = [
        name
        for name in (third_only if config.generation == 1 else first_only)
        if vars(config)[name] is not None and vars(config)[name] is not False
    ]
    if wrong:
        raise ValueError(f"{', '.join(wrong)} do not belong to EAGLE-{config.generation}.")
    if (
        config.mask_token_id is not None
        and not 0 <= config.mask_token_id < config.target_vocab_size
    ):
        raise ValueError(
            f"mask_token_id={config.mask_token_id} is none of the target's "
            f"{config.target_vocab_size} tokens."
        )
    if config.feature_norms and config.input_norm:
        raise ValueError("feature_norms and input_norm exclude each other.")
    if not config.capture_layers or (config.generation == 1 and len(config.capture_layers) > 1):
        raise ValueError(
            f"capture_layers={config.capture_layers}: EAGLE-1 reads one hidden state, EAGLE-3 one "
            "or more."
        )
    if config.hidden_size != config.target_hidden_size:
        shared = [
            name for name in ("separate_embedding", "separate_head") if not vars(config)[name]
        ]
        if config.generation == 1 or shared:
            raise ValueError(
                f"the head is {config.hidden_size} wide and the target {config.target_hidden_size},"
                " so it cannot share the target's embedding or output matrix; only an EAGLE-3 head "
                "with both of its own can differ."
            )
    if config.reduced and not config.separate_head:
        raise ValueError(
            f"a head with {config.vocab_size} of the target's {config.target_vocab_size} tokens "
            "needs an output matrix of its own (own_head=True)."
        )

"""One decoder for all families; a family is a configuration, not a class.

A layer is a value (``jspec.models.layer``).

The functions take a plain pytree of weights. Projections are stored [in, out]; q, k, v share one
matrix and gate, up another, because fewer and larger matmuls are faster. Layers are a tuple and
their loop is unrolled, because XLA would copy a cache that is stacked over layers.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from jspec import ops
from jspec.core import kv_cache, shape_checks, trees, validation
from jspec.core.packing import MATMULS, Packing
from jspec.core.types import Array, Target, TargetOutput, Tree
from jspec.models.blocks.arithmetic import Linear, normal, over_listed
from jspec.models.blocks.attend import Attend, attention_over
from jspec.models.blocks.block import Pass, rotations_of
from jspec.models.blocks.delta_rule import DeltaRule
from jspec.models.blocks.experts import Experts
from jspec.models.blocks.layer_inputs import LayerInputs, LayerInputsParams
from jspec.models.blocks.norms import Norm, RmsNorm
from jspec.models.blocks.recur import Recur, recurrence_over
from jspec.models.layer import Layer, LayerParams, apply_layer


@dataclasses.dataclass(frozen=True)
class DecoderConfig:
    """Layers and sizes of a decoder; static and hashable."""

    vocab_size: int
    hidden_size: int
    layers: tuple[Layer, ...]
    max_positions: int
    norm: Norm = RmsNorm()  # noqa: RUF009 (frozen); the final norm
    tie_embeddings: bool = False
    cache_dtype: str = "float32"
    activation_dtype: str = "float32"  # dtype of the residual stream
    attention: str | None = None  # implementation of ops.attention; None for the device's default
    embedding_norm: Norm | None = None  # norm of embeddings; it has no weights
    embedding_scale: float = 1.0  # factor on embeddings, rounded to their dtype
    logit_scale: float = 1.0  # factor on logits
    logit_cap: float | None = None  # logits x become ``cap * tanh(x / cap)``
    head_bias: bool = False
    layer_inputs: LayerInputs | None = None  # for the ``input_gate`` of all layers
    kv_cache_dtype: str | None = None  # see ``Entry.stored_as``; None for the caller's choice

    def __hash__(self) -> int:
        # Plans are hashed in every launch, and layers are many.
        sizes = self.vocab_size, self.hidden_size, len(self.layers), self.max_positions
        return hash((*sizes, self.layers[:1], self.cache_dtype, self.attention))

    @property
    def num_layers(self) -> int:
        """Number of layers."""
        return len(self.layers)

    @property
    def windows(self) -> tuple[int | None, ...]:
        """Sliding window of each layer, None for none."""
        return tuple(layer.mixer.window for layer in self.layers)

    @property
    def is_recurrent(self) -> bool:
        """True if a layer has a state instead of keys and values."""
        return any(isinstance(layer.mixer, DeltaRule) for layer in self.layers)

    @property
    def has_experts(self) -> bool:
        """True if a layer is a mixture of experts."""
        return any(isinstance(layer.feed_forward, Experts) for layer in self.layers)

    def with_experts(self, **changes: Any) -> "DecoderConfig":
        """Return the config with fields of every mixture of experts replaced."""

        def changed(layer: Layer) -> Layer:
            if not isinstance(layer.feed_forward, Experts):
                return layer
            feed_forward = dataclasses.replace(layer.feed_forward, **changes)
            return dataclasses.replace(layer, feed_forward=feed_forward)

        return dataclasses.replace(self, layers=tuple(map(changed, self.layers)))

    def with_mixers(self, **changes: Any) -> "DecoderConfig":
        """Return the config with fields of every mixer replaced."""
        layers = tuple(
            dataclasses.replace(layer, mixer=dataclasses.replace(layer.mixer, **changes))
            for layer in self.layers
        )
        return dataclasses.replace(self, layers=layers)


@struct.dataclass
class DecoderParams:
    """Weights of a decoder; ``head`` is None if the embedding is tied."""

    embedding: Array  # [V, D]
    layers: tuple[LayerParams, ...]
    norm: Array  # [D]
    head: Array | None = None  # [D, V]
    head_bias: Array | None = None  # [V]
    layer_inputs: LayerInputsParams | None = None


def init_params(key: Array, config: DecoderConfig, dtype: jnp.dtype = jnp.float32) -> DecoderParams:
    """Return random normal weights of std 0.02, less for projections into the residual stream."""
    embedding_key, *layer_keys, head_key = jax.random.split(key, 4 * config.num_layers + 2)
    vocab, hidden = config.vocab_size, config.hidden_size
    tied, inputs = config.tie_embeddings, config.layer_inputs
    inputs_key = jax.random.fold_in(embedding_key, 1)
    return DecoderParams(
        embedding=normal(embedding_key, (vocab, hidden), dtype),
        layers=_init_layers(layer_keys, config, dtype),
        norm=config.norm.init(hidden, dtype),
        head=None if tied else normal(head_key, (hidden, vocab), dtype),
        head_bias=jnp.zeros((vocab,), dtype) if config.head_bias else None,
        layer_inputs=inputs and inputs.init(inputs_key, vocab, hidden, config.num_layers, dtype),
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
    """Return the layers of ``init_params``."""
    return _init_layers(jax.random.split(key, 4 * config.num_layers), config, dtype)


def _init_layers(keys, config: DecoderConfig, dtype: jnp.dtype) -> tuple[LayerParams, ...]:
    """Return layers drawn from four keys each."""
    shrink = (2 * config.num_layers) ** -0.5
    return tuple(
        layer.init(keys[4 * index : 4 * index + 4], config.hidden_size, dtype, shrink)
        for index, layer in enumerate(config.layers)
    )


def embed(params: DecoderParams, config: DecoderConfig, tokens: Array) -> Array:
    """Return the first residual stream [..., D] of token ids [...]."""
    x = ops.look_up(params.embedding, tokens).astype(config.activation_dtype)
    if config.embedding_norm is not None:
        x = config.embedding_norm(x, None)
    return x if config.embedding_scale == 1 else x * config.embedding_scale


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
        logits = linear(x, params.embedding, transposed=True)
    else:
        logits = linear(x, params.head)
    if params.head_bias is not None:
        logits = logits + params.head_bias.astype(logits.dtype)
    if config.logit_scale != 1:
        logits = logits * config.logit_scale
    if config.logit_cap is not None:
        logits = config.logit_cap * jnp.tanh(logits / config.logit_cap)
    return logits


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
    recur: Recur | None = None,
    tokens: Array | None = None,
) -> tuple[Array, tuple[Array, ...]]:
    """Run every block over x [B, T, D] at int32 positions [B, T].

    ``attend`` implements the attention: causal within x for training, over a cache for decoding.
    With ``remat`` a backward pass stores only the inputs of blocks and recomputes the rest. If
    ``rows`` [B, M] is given, the last block computes only these rows, and keys and values of all.
    With a ``packing`` x are its entries. A network with inputs of each layer needs the ``tokens``,
    int32 [B, T].

    Returns:
      The last residual stream [B, T, D] (before the final norm), and the streams of
      ``capture_layers``: index i is the input of block i, as in Hugging Face's ``hidden_states``;
      index ``num_layers`` is the output of the final norm.
    """
    if config.is_recurrent and recur is None:
        raise ValueError(
            "a network with layers of the gated delta rule runs as a target or a draft model, not "
            "in a head, and in training not behind mask tokens; take one of attention alone"
        )
    shape_checks.check_captured(capture_layers, config.num_layers)
    rotations = rotations_of((layer.mixer for layer in config.layers), positions)
    shared, stream = Pass(attend, rotations, positions, linear, packing, recur), [x]
    if config.layer_inputs is not None:
        inputs = config.layer_inputs.over(params.layer_inputs, tokens, x, shared)
        shared = dataclasses.replace(shared, layer_inputs=inputs)

    def run(index: int, weights: LayerParams, x: Array) -> Array:
        queried = rows if index == config.num_layers - 1 else None
        return apply_layer(config.layers[index], weights, x, shared, index, queried)

    if remat:
        run = jax.checkpoint(run, static_argnums=0)
    for index, weights in enumerate(params.layers):
        x = run(index, weights, x)
        stream.append(x)
    if config.num_layers in capture_layers:
        stream[-1] = config.norm(x, params.norm)
    return x, tuple(stream[index] for index in capture_layers)


def init_cache(config: DecoderConfig, batch: int, capacity: int) -> kv_cache.KVCache:
    """Return an empty cache of ``capacity`` slots per row; layers without an entry are last."""
    dtype = jnp.dtype(config.cache_dtype)
    mixers = [layer.mixer for layer in config.layers if layer.mixer.source is None]
    entries = [mixer.entry(batch, capacity, dtype) for mixer in mixers]
    if config.kv_cache_dtype is not None:
        entries = [entry.stored_as(config.kv_cache_dtype) for entry in entries]
    return kv_cache.empty(batch, entries, windows=config.windows[: len(entries)])


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
    attend, tree_kv = attention_over(cache, tree, packing=packing, implementation=config.attention)
    positions, unpack = cache.length[:, None] + tree.depth, lambda x: x
    if packing is not None:
        if params.embedding.dtype != jnp.float32:  # Narrow weights are widened, for one row too.
            packing = packing.from_size(MATMULS["cpu"].free_rows)
        tokens, positions = packing.pack(tokens), packing.pack(positions)
        unpack = packing.unpack
    x = embed(params, config, tokens)
    x, features = trunk(
        params,
        config,
        x,
        positions,
        attend,
        capture_layers=capture_layers,
        packing=packing,
        recur=recurrence_over(cache, tree, tree_kv) if config.is_recurrent else None,
        tokens=tokens,
    )
    head = params.embedding if params.head is None else params.head
    logits = over_listed(packing, head, lambda x: unembed(params, config, x), x)
    logits = unpack(logits)
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

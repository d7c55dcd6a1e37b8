"""Multi-token prediction (MTP) modules, which some targets are trained with.

Each module is a block of the target's kind. Its input is a projection of a position's feature and
of the embedding of the next token (DeepSeek-V3, arXiv 2412.19437, section 2.2): ::

    x = W [norm e; norm f]        y = block(x)        logits = target's head(norm' y)

Module 0 reads the target's feature f_i, after its final norm, and token t_{i+1}; it predicts
t_{i+2}. Module 1 reads the output of module 0 at that position, and t_{i+2}: ::

    slot                        1                2                3
    module 0   reads      f_1,    t_2      f_2,    t_3      f_3,    t_4
    module 1   reads      y^0_0,  t_2      y^0_1,  t_3      y^0_2,  t_4

So in a slot all modules read the same token, and module m + 1 reads the output of module m one slot
earlier; its first slots are missing. Published targets have one module. To draft more tokens, it
reads its own output, like a recurrent network.

Families differ in the order of e and f, in whether y or norm' y is passed on, and in whether the
embedding at position 0 is replaced by zeros; ``jspec.checkpoints.heads.mtp`` reads which. Drafter:
``jspec.drafters.mtp``.
"""

import dataclasses

import jax
import jax.numpy as jnp
from flax import struct

from jspec import ops
from jspec.core import kv_cache, trees
from jspec.core.entries import Entry
from jspec.core.types import Array, Target
from jspec.models import decoder
from jspec.models.blocks.arithmetic import Linear, by_rows, normal
from jspec.models.blocks.attend import Attend, attention_over
from jspec.models.blocks.block import Pass, rotations_of
from jspec.models.decoder import DecoderConfig
from jspec.models.heads.network import Divided, NetworkSizes
from jspec.models.layer import LayerParams, apply_layer
from jspec.sharding import ROWS


@dataclasses.dataclass(frozen=True)
class MtpConfig(NetworkSizes):
    """Sizes and switches of the modules; static and hashable."""

    network: DecoderConfig  # the blocks, one per module, with the sizes of the target
    capture_layers: tuple[int, ...]  # index of the target's last hidden state, after its norm
    hidden_first: bool = False  # ``projection`` takes [f; e] instead of [e; f]
    feeds_normed: bool = True  # a module passes on norm' y instead of y
    zeroes_first: bool = True  # the embedding at position 0 is replaced by zeros

    @property
    def n_predict(self) -> int:
        """Number of modules, M."""
        return self.network.num_layers

    @property
    def target_vocab_size(self) -> int:
        """V."""
        return self.network.vocab_size

    @property
    def divided(self) -> Divided:
        """See ``Divided``."""
        return {"modules.projection": (ROWS, 2 * self.hidden_size)}


@struct.dataclass
class ModuleParams:
    """Weights of a module without its block."""

    embedding_norm: Array  # [D], of e
    hidden_norm: Array  # [D], of f
    projection: Array  # [2D, D]
    norm: Array  # [D], norm'


@struct.dataclass
class MtpParams:
    """Weights of M modules, which use the target's embedding and output matrix."""

    modules: tuple[ModuleParams, ...]
    layers: tuple[LayerParams, ...]


def init_params(key: Array, config: MtpConfig, dtype: jnp.dtype = jnp.float32) -> MtpParams:
    """Return random normal weights of std 0.02."""
    layers_key, *keys = jax.random.split(key, 1 + config.n_predict)
    hidden = config.hidden_size
    norm = config.network.norm.init(hidden, dtype)
    modules = tuple(
        ModuleParams(norm, norm, normal(key, (2 * hidden, hidden), dtype), norm) for key in keys
    )
    return MtpParams(modules, decoder.init_layers(layers_key, config.network, dtype))


def init_cache(config: MtpConfig, batch: int, capacity: int) -> kv_cache.KVCache:
    """Return an empty cache of one module with ``capacity`` slots per row."""
    network = dataclasses.replace(config.network, layers=config.network.layers[:1])
    return decoder.init_cache(network, batch, capacity)


def run(
    params: MtpParams,
    config: MtpConfig,
    module: int,
    embedded: Array,
    features: Array,
    positions: Array,
    attend: Attend,
    *,
    linear: Linear = ops.linear,
    rows: Array | None = None,
) -> Array:
    """Return the output [B, T, D] of a module for e and f [B, T, D] at int32 positions [B, T].

    The output is passed on and is the input of ``unembed``. ``attend`` and ``rows`` [B, M] are
    those of ``decoder.trunk``, with the module as layer 0; with ``rows`` the output is [B, M, D].
    """
    network, weights = config.network, params.modules[module]
    if config.zeroes_first:
        embedded = jnp.where((positions == 0)[..., None], 0, embedded)
    e = network.norm(embedded, weights.embedding_norm)
    f = network.norm(features, weights.hidden_norm)
    pair = [f, e] if config.hidden_first else [e, f]
    x = by_rows(jnp.concatenate(pair, -1), weights.projection, None, linear)
    x = x.astype(features.dtype)
    layer = network.layers[module]
    shared = Pass(attend, rotations_of([layer.mixer], positions), positions, linear)
    x = apply_layer(layer, params.layers[module], x, shared, 0, rows)
    return network.norm(x, weights.norm) if config.feeds_normed else x


def prefill(
    params: MtpParams,
    config: MtpConfig,
    module: int,
    embedded: Array,
    features: Array,
    cache: kv_cache.KVCache,
    rows: Array | None = None,
) -> tuple[Array, tuple[Entry, ...]]:
    """Run n rows of a module, e and f [B, n, D], which follow those in its cache.

    ``features`` are those of the target or the outputs of the module before. The first row in the
    cache of module m is that of slot m.

    Returns:
      The outputs [B, n, D], or [B, m, D] of ``rows`` int32 [B, m] only; and the cache entries of
      all n rows for ``kv_cache.append``.
    """
    tree = trees.chain_tree(*embedded.shape[:2])
    implementation = config.network.attention
    attend, entries = attention_over(cache, tree, rows=rows, implementation=implementation)
    positions = cache.length[:, None] + module + tree.depth
    x = run(params, config, module, embedded, features, positions, attend, rows=rows)
    return x, tuple(entries)


def normed(params: MtpParams, config: MtpConfig, module: int, hidden: Array) -> Array:
    """Return the input of the target's output matrix for the output [..., D] of a module."""
    if config.feeds_normed:
        return hidden
    return config.network.norm(hidden, params.modules[module].norm)


def unembed(
    params: MtpParams,
    config: MtpConfig,
    module: int,
    hidden: Array,
    target: Target,
    target_params: object,
) -> Array:
    """Return float32 logits [..., V] of the output [..., D] of a module."""
    return target.unembed(target_params, normed(params, config, module, hidden), norm=False)

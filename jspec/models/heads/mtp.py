"""Modules that predict the tokens after the next, as a target is trained with (MTP).

Each module is one block of the target's kind behind a projection of two things: what is known of a
position, and the token that follows it (DeepSeek-V3, arXiv 2412.19437, section 2.2): ::

    x = W [norm e; norm f]        y = block(x)        logits = target's head(norm' y)

The first module reads the target's features f_i, after its final norm, and the token t_{i+1}, and
predicts t_{i+2}. The next one reads what the first gave out for that position, and t_{i+2}: ::

    slot                        1                2                3
    module 0   reads      f_1,    t_2      f_2,    t_3      f_3,    t_4
    module 1   reads      y^0_0,  t_2      y^0_1,  t_3      y^0_2,  t_4

So a module reads, slot by slot, the token that the first reads, and what the module before gave out
a slot earlier; its first slots are missing. Published targets have one module, and to draft more
tokens it reads its own output, as a recurrent net does.

The embedding at position 0 counts as zero. Families differ in the order of e and f, and in whether
what is handed on has passed norm'; ``jspec.checkpoints.heads.mtp`` reads which.
"""

import dataclasses

import jax
import jax.numpy as jnp
from flax import struct

from jspec import ops
from jspec.core import kv_cache, trees
from jspec.core.types import Array, Target
from jspec.models import decoder
from jspec.models import rope as rope_lib
from jspec.models.decoder import Attend, DecoderConfig, LayerParams, Linear
from jspec.models.heads.network import NetworkSizes


@dataclasses.dataclass(frozen=True)
class MtpConfig(NetworkSizes):
    """Sizes and switches of the modules; static and hashable.

    Attributes:
      network: the modules' blocks, one each, so ``num_layers`` modules; sizes are the target's.
      capture_layers: the target's last hidden state, after its final norm.
      hidden_first: whether ``projection`` takes [f; e] and not [e; f].
      feeds_normed: whether a module hands on norm' y, and not y.
    """

    network: DecoderConfig
    capture_layers: tuple[int, ...]
    hidden_first: bool = False
    feeds_normed: bool = True

    @property
    def n_predict(self) -> int:
        """Number of modules, M."""
        return self.network.num_layers

    @property
    def target_vocab_size(self) -> int:
        """V."""
        return self.network.vocab_size


@struct.dataclass
class ModuleParams:
    """Weights of a module beside its block."""

    embedding_norm: Array  # [D], of e
    hidden_norm: Array  # [D], of f
    projection: Array  # [2D, D]
    norm: Array  # [D], norm'


@struct.dataclass
class MtpParams:
    """Weights of M modules; embedding and output matrix are the target's."""

    modules: tuple[ModuleParams, ...]
    layers: tuple[LayerParams, ...]


def init_params(key: Array, config: MtpConfig, dtype: jnp.dtype = jnp.float32) -> MtpParams:
    """Random weights: normal, 0.02 wide."""
    layers_key, *keys = jax.random.split(key, 1 + config.n_predict)
    hidden = config.hidden_size
    one = jnp.ones((hidden,), dtype)
    draw = lambda key: (0.02 * jax.random.normal(key, (2 * hidden, hidden))).astype(dtype)
    return MtpParams(
        modules=tuple(ModuleParams(one, one, draw(key), one) for key in keys),
        layers=decoder.init_layers(layers_key, config.network, dtype),
    )


def init_cache(config: MtpConfig, batch: int, capacity: int) -> kv_cache.KVCache:
    """An empty cache of one module, of ``capacity`` slots a row."""
    return decoder.init_cache(dataclasses.replace(config.network, num_layers=1), batch, capacity)


def embed(config: MtpConfig, tokens: Array, target: Target, target_params: object) -> Array:
    """Token ids [...] to e [..., D]."""
    return target.embed(target_params, tokens).astype(config.network.activation_dtype)


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
    wanted: Array | None = None,
) -> Array:
    """Runs a module over rows e and f [B, T, D] at int32 positions [B, T].

    ``attend`` owns the attention, and ``wanted`` are rows, as in ``decoder.trunk``; the module is
    its layer 0.

    Returns:
      [B, T, D], what the module hands on, and what ``unembed`` takes. Of ``wanted`` alone
      [B, M, D].
    """
    network, own = config.network, params.modules[module]
    embedded = jnp.where((positions == 0)[..., None], 0, embedded)
    e = network.norm(embedded, own.embedding_norm)
    f = network.norm(features, own.hidden_norm)
    pair = [f, e] if config.hidden_first else [e, f]
    x = linear(jnp.concatenate(pair, -1), own.projection).astype(features.dtype)
    cos, sin = rope_lib.cos_sin(network.rope, network.rope_dim, positions)
    x = decoder.block(params.layers[module], network, x, cos, sin, 0, attend, linear, wanted)
    return network.norm(x, own.norm) if config.feeds_normed else x


def take_in(
    params: MtpParams,
    config: MtpConfig,
    module: int,
    embedded: Array,
    features: Array,
    cache: kv_cache.KVCache,
    wanted: Array | None = None,
) -> tuple[Array, tuple[kv_cache.Entry, ...]]:
    """Runs n rows of a module that come next after those in its cache, in order.

    Args:
      params: weights.
      config: sizes.
      module: which one.
      embedded: e [B, n, D].
      features: f [B, n, D], of the target or of the module before.
      cache: of the module, read only; the first row of module m is that of slot m.
      wanted: int32 [B, m], rows whose output is wanted: of the others there are only entries. None
        for all.

    Returns:
      What the rows give out [B, n, D], or [B, m, D] of those wanted, and the entries of all for
      ``kv.append``.
    """
    batch, size, _ = embedded.shape
    tree = trees.broadcast(trees.from_parents(trees.chain(size - 1), size - 1), batch)
    attend, entries = decoder.attention_over(
        cache, tree, implementation=config.network.attention, wanted=wanted
    )
    positions = cache.length[:, None] + module + tree.depth
    x = run(params, config, module, embedded, features, positions, attend, wanted=wanted)
    return x, tuple(entries)


def extend(
    params: MtpParams,
    config: MtpConfig,
    module: int,
    embedded: Array,
    features: Array,
    positions: Array,
    cache: kv_cache.KVCache,
    side: tuple[kv_cache.Entry, ...],
    slot: Array,
    mask: Array,
) -> tuple[Array, tuple[kv_cache.Entry, ...]]:
    """A drafting step: runs n rows of a module and keeps their entries beside its cache.

    Args:
      params: weights.
      config: sizes.
      module: which one.
      embedded: e [B, n, D].
      features: f [B, n, D].
      positions: int32 [B, n].
      cache: of the module, read only.
      side: the module's entries of this round so far, M slots.
      slot: int32 [], where in ``side`` the n new entries go.
      mask: bool [B, n, M], which side slots each row sees, its own included.

    Returns:
      What the rows give out [B, n, D], and ``side`` with the new entries.
    """
    attend, side = decoder.attention_beside(
        cache, side, slot, mask, positions, implementation=config.network.attention
    )
    x = run(params, config, module, embedded, features, positions, attend)
    return x, tuple(side)


def normed(params: MtpParams, config: MtpConfig, module: int, hidden: Array) -> Array:
    """What a module gave out [..., D], as the target's output matrix takes it."""
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
    """What a module gave out [..., D] to float32 logits [..., V]."""
    return target.unembed(target_params, normed(params, config, module, hidden), norm=False)

"""A decoder whose logits do not depend, to the bit, on how tokens are grouped into passes.

A token's logits then depend only on the tokens before it: whether it is verified with K others,
decoded alone or prefilled, in any batch and cache. So greedy text, and the text of rule
``coupled``, equals plain decoding even in bfloat16, where ordinary passes differ by rounding.

This costs speed: every matmul runs in tiles of one shape, and attention sums in the order of
positions. Only chains are supported, because nodes of a tree may share a position.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from jspec import ops
from jspec.core import kv_cache
from jspec.core.entries import Entry
from jspec.core.narrow import LIMITS
from jspec.core.types import Array, TargetOutput, Tree
from jspec.models import decoder
from jspec.models.blocks.attend import Attend
from jspec.models.blocks.attention import Attention
from jspec.models.blocks.mlp import GatedMlp
from jspec.models.blocks.norms import Norm
from jspec.models.decoder import Decoder, DecoderConfig, DecoderParams, Layer


def in_tiles(function: Callable[[Array], Array], x: Array) -> Array:
    """Apply ``function`` to x [..., I] in tiles of rows: for determinism, not for speed.

    Sums over a row round differently in arrays of different shapes. All tiles have one shape, so
    the result of a row depends on that row alone, to the bit.

    Args:
      function: maps rows [R, I] to [R, O], each row independently.
      x: [..., I].

    Returns:
      [..., O]
    """
    rows = x.reshape(-1, x.shape[-1])
    count, size = rows.shape[0], ops.ORDERED_TILE
    tiles = -(-count // size)
    rows = jnp.pad(rows, ((0, tiles * size - count), (0, 0))).reshape(tiles, size, -1)
    # The barrier prevents fusion of a single tile with surrounding operations.
    fence = lax.optimization_barrier
    out = lax.map(lambda tile: fence(function(fence(tile))), rows)
    return out.reshape(tiles * size, -1)[:count].reshape(*x.shape[:-1], -1)


@dataclasses.dataclass(frozen=True)
class _TiledNorm(Norm):
    """A norm that runs in tiles."""

    plain: Norm = Norm()  # noqa: RUF009 (frozen)

    def __call__(self, x: Array, weight: Array | None) -> Array:
        """See ``Norm``."""
        return in_tiles(lambda rows: self.plain(rows, weight), x)


def _tiled(part: Any, *fields: str) -> Any:
    """Return a config, or a part of it, whose norms in ``fields`` run in tiles."""
    norms = {field: vars(part)[field] for field in fields}
    tiled = {field: norm and _TiledNorm(plain=norm) for field, norm in norms.items()}
    return dataclasses.replace(part, **tiled)


def _in_tiles(config: DecoderConfig) -> DecoderConfig:
    """Return the config with norms that run in tiles."""

    def layer(plain: Layer) -> Layer:
        mixer = _tiled(plain.mixer, "qk_norm", "v_norm")
        return dataclasses.replace(_tiled(plain, "norm", "output_norm"), mixer=mixer)

    return dataclasses.replace(_tiled(config, "norm"), layers=tuple(map(layer, config.layers)))


def _linear(x: Array, w: Array, *, transposed: bool = False) -> Array:
    return in_tiles(lambda rows: ops.linear(rows, w, transposed=transposed), x)


@dataclasses.dataclass(frozen=True)
class BatchInvariantDecoder(Decoder):
    """A ``Decoder`` whose passes agree to the bit.

    Raises:
      ValueError: the network has experts or latent attention, or ``attention`` names a kernel.
    """

    reads_pages = False  # sums over whole blocks of one buffer
    packs_nodes = False  # matmuls run in tiles of one shape already

    def __post_init__(self):
        parts = (part for layer in self.config.layers for part in (layer.mixer, layer.feed_forward))
        present = {part.title: None for part in parts if type(part) not in (Attention, GatedMlp)}
        if any(vars(layer.mixer).get("chunked") for layer in self.config.layers):
            present["chunked attention"] = None
        if self.config.layer_inputs is not None:
            present["inputs of each layer"] = None
        if self.config.attention is not None:
            present[f"attention={self.config.attention!r}"] = None
        if self.config.kv_cache_dtype in LIMITS:
            present[f"a KV cache in {self.config.kv_cache_dtype}"] = None
        if present:
            raise ValueError(
                f"deterministic=True does not support {' and '.join(present)} of this target, "
                "whose sums depend on the other tokens of a pass; leave it out."
            )

    def init_cache(self, batch: int, capacity: int) -> kv_cache.KVCache:
        """Return an empty cache of ``capacity`` slots, rounded up to whole blocks."""
        block = ops.ORDERED_BLOCK
        return super().init_cache(batch, max(1, -(-capacity // block)) * block)

    def forward(
        self,
        params: DecoderParams,
        tokens: Array,
        tree: Tree,
        cache: kv_cache.KVCache,
        capture_layers: tuple[int, ...] = (),
    ) -> TargetOutput:
        """Score a chain ``tokens`` [B, N] that follows the cache's prefix; see ``Target``.

        Raises:
          ValueError: ``tree`` is not a static chain.
        """
        nodes = tokens.shape[1]
        static = isinstance(tree.parents, np.ndarray)
        if not static or (tree.parents[..., 1:] != np.arange(nodes - 1)).any():
            raise ValueError(
                "deterministic=True takes chains, but this drafter proposes trees; choose a chain, "
                "or leave deterministic out."
            )
        config, positions = _in_tiles(self.config), cache.length[:, None] + np.arange(nodes)
        attend, chain_kv = _attention_over(cache)
        x, features = decoder.trunk(
            params,
            config,
            self.embed(params, tokens),
            positions,
            attend,
            linear=_linear,
            capture_layers=capture_layers,
        )
        logits = decoder.unembed(params, config, x, linear=_linear)
        return TargetOutput(logits, features, tuple(chain_kv))


def _attention_over(cache: kv_cache.KVCache) -> tuple[Attend, list[Entry]]:
    """Return ``attention_over`` for chains, with sums in the order of positions."""
    entries = list(cache.layers)

    def attend(
        index: int,
        q: Array,
        k: Array | None,
        v: Array | None,
        window: int | None = None,
        **scores: Any,
    ) -> Array:
        entry = cache.layers[index]
        if k is not None:
            entries[index] = entry.holding(k, v)
        new = entries[index]
        return ops.ordered_attention(
            q,
            new.k,
            new.v,
            entry.k,
            entry.v,
            cache.length,
            window=window,
            **scores,
        )

    return attend, entries

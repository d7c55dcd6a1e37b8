"""The contract of a mixer and of a feed-forward, and the values that all layers of a pass share.

A new kind is one file beside this one: a frozen dataclass of sizes that inherits from ``Mixer`` or
``FeedForward``, and a pytree of its weights. Layers, cache, checkpoints and heads follow from them.
"""

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

import jax.numpy as jnp

from jspec import ops
from jspec.core.entries import Entry
from jspec.core.packing import Packing
from jspec.core.types import Array
from jspec.models.blocks import rope as rope_lib
from jspec.models.blocks.arithmetic import Linear
from jspec.models.blocks.attend import Attend
from jspec.models.blocks.recur import Recur
from jspec.models.blocks.rope import RopeConfig
from jspec.models.blocks.tensors import Tensor

Rotation = tuple[RopeConfig, int]  # a scaling, and the number of rotated features of a head


@dataclasses.dataclass(frozen=True)
class Pass:
    """The values that all layers of a pass share.

    Attributes:
      attend: attention of the layers, causal for training or over a cache for decoding.
      rotations: cosines and sines of the tokens' positions, one pair for each distinct rotation.
      positions: int32 [B, T], the tokens' positions.
      linear: the product of activations and a weight.
      packing: the list of nodes that the activations are; None for a whole tree.
      recur: recurrences of the layers, over a cache; None where there is none.
      layer_inputs: the inputs [B, T, L, P] of all layers; None for a network without them.
    """

    attend: Attend
    rotations: Mapping[Rotation, tuple[Array, Array]]
    positions: Array
    linear: Linear = ops.linear
    packing: Packing | None = None
    recur: Recur | None = None
    layer_inputs: Array | None = None


def rotations_of(mixers: Iterable["Mixer"], positions: Array) -> dict[Rotation, Any]:
    """Return cosines and sines of int32 positions [B, T] for the distinct rotations of mixers."""
    distinct = dict.fromkeys(mixer.rotation for mixer in mixers if mixer.rotation is not None)
    return {rotation: rope_lib.cos_sin(*rotation, positions) for rotation in distinct}


class Mixer:
    """The part of a layer that mixes tokens: sizes, static and hashable."""

    title = "another mixer"  # in messages
    window: int | None  # tokens that a query sees, its own included; None for all
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope: RopeConfig | None  # None for queries and keys without a rotation
    source = None  # An earlier layer whose cache entry it reads; None for an entry of its own.

    @property
    def rotation(self) -> Rotation | None:
        """The rotation of queries and keys; None for none."""
        return None

    def init(
        self,
        keys: Array,
        hidden: int,
        dtype: jnp.dtype,
        shrink: float = 1.0,
        inputs: int | None = None,
    ) -> Any:
        """Return random weights from two keys.

        The output projection is scaled by ``shrink``. ``inputs`` is the width of the input; None
        for ``hidden``, that of the residual stream.
        """
        raise NotImplementedError

    def tensors(self, hidden: int, inputs: int | None = None) -> tuple[Tensor, ...]:
        """Return the arrays of the weights, and the tensors of checkpoints that make them up."""
        raise NotImplementedError

    def divides(self, ways: int) -> bool:
        """Return whether ``ways`` devices can have a part each."""
        raise NotImplementedError

    def split(self, ways: int) -> "Mixer":
        """Return the mixer whose weights are in ``ways`` parts; see ``Tensor.parts``."""
        raise NotImplementedError

    def entry(self, batch: int, capacity: int, dtype: jnp.dtype) -> Entry:
        """Return an empty cache entry of ``capacity`` slots per row."""
        raise NotImplementedError

    def mix(self, params: Any, x: Array, run: Pass, index: int, rows: Array | None = None) -> Array:
        """Return a mixture of the normed input x [B, T, D] for each query, [B, T, ...].

        ``index`` is the number of the layer in the cache. ``rows`` [B, M] restricts the queries,
        and the mixtures to [B, M, ...].
        """
        raise NotImplementedError

    def output(self, params: Any, mixed: Array, linear: Linear) -> Array:
        """Return the output [B, T, D] of mixtures [B, T, ...], in the dtype of ``linear``."""
        raise NotImplementedError


class FeedForward:
    """The part of a layer that maps each token by itself: sizes, static and hashable."""

    title = "another feed-forward"  # in messages
    dense_size: int  # width of a plain MLP of such a model
    norms_input = False  # Whether it takes the residual stream, and norms that itself.

    def init(self, keys: Array, hidden: int, dtype: jnp.dtype, shrink: float = 1.0) -> Any:
        """Return random weights from two keys; the output projection is scaled by ``shrink``."""
        raise NotImplementedError

    def tensors(self, hidden: int) -> tuple[Tensor, ...]:
        """Return the arrays of the weights, and the tensors of checkpoints that make them up."""
        raise NotImplementedError

    def divides(self, ways: int) -> bool:
        """See ``Mixer``."""
        raise NotImplementedError

    def split(self, ways: int) -> "FeedForward":
        """See ``Mixer``."""
        raise NotImplementedError

    def apply(self, params: Any, x: Array, run: Pass) -> Array:
        """Return the output [B, T, D] for the input x [B, T, D], in a dtype of its own."""
        raise NotImplementedError

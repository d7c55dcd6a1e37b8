"""A layer: a mixer and a feed-forward of ``jspec.models.blocks``, and what is between them."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from jspec.core.types import Array
from jspec.models.blocks.arithmetic import over_listed, rows_at
from jspec.models.blocks.block import FeedForward, Mixer, Pass
from jspec.models.blocks.layer_inputs import InputGate, InputGateParams
from jspec.models.blocks.norms import Norm, RmsNorm


@dataclasses.dataclass(frozen=True)
class Layer:
    """A layer: a mixer of tokens and a feed-forward, each with norms and beside a residual.

    Attributes:
      mixer: the part that mixes tokens.
      feed_forward: the part that maps each token by itself.
      norm: norm of the inputs of both; None if they read the residual stream as it is.
      output_norm: norm of the outputs of both before they are added; None for none.
      parallel: whether the feed-forward has the mixer's normed input, and no norm of its own.
      residual_scale: factor on the outputs of both before they are added.
      input_gate: the part that adds an input of the layer behind the feed-forward; None for none.
      scaled: whether the residual stream behind the layer is multiplied by a learned number.
    """

    mixer: Mixer
    feed_forward: FeedForward
    norm: Norm | None = RmsNorm()  # noqa: RUF009 (frozen)
    output_norm: Norm | None = None
    parallel: bool = False
    residual_scale: float = 1.0
    scaled: bool = False
    input_gate: InputGate | None = None

    @property
    def inner_norm(self) -> Norm | None:
        """The norm of the feed-forward's input alone; None for none."""
        return None if self.parallel or self.feed_forward.norms_input else self.norm

    def normed(self, x: Array, weight: Array | None) -> Array:
        """Return the input of the mixer for the residual stream x."""
        return x if self.norm is None else self.norm(x, weight)

    def added(self, x: Array, output: Array, weight: Array | None) -> Array:
        """Return the residual stream x plus the output of the mixer or the feed-forward."""
        if self.residual_scale != 1:
            output = output * self.residual_scale
        output = output.astype(x.dtype)
        return x + (output if self.output_norm is None else self.output_norm(output, weight))

    def init(self, keys: Array, hidden: int, dtype: jnp.dtype, shrink: float) -> "LayerParams":
        """Return random weights from four keys; output projections are scaled by ``shrink``."""

        def norm(kind: Norm | None) -> Array | None:
            return None if kind is None else kind.init(hidden, dtype)

        return LayerParams(
            mixer_norm=norm(self.norm),
            mixer=self.mixer.init(keys[:2], hidden, dtype, shrink),
            feed_forward_norm=norm(self.inner_norm),
            feed_forward=self.feed_forward.init(keys[2:], hidden, dtype, shrink),
            mixer_output_norm=norm(self.output_norm),
            feed_forward_output_norm=norm(self.output_norm),
            scale=jnp.ones((1,), dtype) if self.scaled else None,
            input_gate=self.input_gate and self.input_gate.init(keys[2], hidden, dtype),
        )


@struct.dataclass
class LayerParams:
    """Weights of a layer."""

    mixer_norm: Array | None  # [D]; None for a first layer whose input is already normed
    mixer: Any
    feed_forward_norm: Array | None  # [D]; norms are None where the layer lacks them
    feed_forward: Any
    mixer_output_norm: Array | None = None  # [D]
    feed_forward_output_norm: Array | None = None  # [D]
    scale: Array | None = None  # [1]
    input_gate: InputGateParams | None = None


def apply_layer(
    layer: Layer, params: LayerParams, x: Array, run: Pass, index: int, rows: Array | None = None
) -> Array:
    """Return the residual stream [B, T, D] after a layer; ``index`` is its number in the cache.

    ``rows`` [B, M] restricts the output to [B, M, D].
    """
    return apply_normed(layer, params, x, layer.normed(x, params.mixer_norm), run, index, rows)


def apply_normed(
    layer: Layer,
    params: LayerParams,
    x: Array,
    normed: Array,
    run: Pass,
    index: int,
    rows: Array | None = None,
) -> Array:
    """Return ``apply_layer`` of x [B, T, D] whose mixer has the input ``normed`` [B, T, ...]."""
    with jax.named_scope("attention"):
        mixed = layer.mixer.mix(params.mixer, normed, run, index, rows)

    def after_mixing(x: Array, mixed: Array, *inputs: Array) -> Array:
        with jax.named_scope("attention"):
            output = layer.mixer.output(params.mixer, mixed, run.linear)
            after = layer.added(x, output, params.mixer_output_norm)
        with jax.named_scope("mlp"):
            if layer.parallel:
                normed = layer.normed(x, params.mixer_norm)
            elif layer.inner_norm is None:
                normed = after
            else:
                normed = layer.inner_norm(after, params.feed_forward_norm)
            output = layer.feed_forward.apply(params.feed_forward, normed, run)
            after = layer.added(after, output, params.feed_forward_output_norm)
            if layer.input_gate is not None:
                after = layer.input_gate.apply(params.input_gate, after, *inputs, run.linear)
        return after if params.scale is None else after * params.scale.astype(after.dtype)

    each = [rows_at(x, rows), mixed]
    if layer.input_gate is not None:
        each.append(rows_at(run.layer_inputs[:, :, index], rows))
    # Tokens do not meet any more: one choice of a size for all that is left.
    return over_listed(run.packing, params.feed_forward, after_mixing, *each)

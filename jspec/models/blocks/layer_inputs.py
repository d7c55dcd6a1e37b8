"""Inputs of each layer beside the residual stream, as of Gemma 4 E2B and E4B.

A token has one vector of P features for each of L layers: a row of a second embedding table plus a
projection of the first residual stream. Behind its feed-forward a layer adds a gated projection of
its own vector to the residual stream.
"""

import dataclasses

import jax
import jax.numpy as jnp
from flax import struct

from jspec import ops
from jspec.core.types import Array
from jspec.models.blocks.arithmetic import Linear, normal, over_listed
from jspec.models.blocks.block import Pass
from jspec.models.blocks.mlp import ACTIVATIONS
from jspec.models.blocks.norms import Norm
from jspec.models.blocks.tensors import Tensor, matrix, norm_of


@dataclasses.dataclass(frozen=True)
class LayerInputs:
    """The inputs of all layers of a decoder; static and hashable."""

    size: int  # P
    norm: Norm  # norm of the projection

    def init(
        self, key: Array, vocab: int, hidden: int, layers: int, dtype: jnp.dtype
    ) -> "LayerInputsParams":
        """Return random weights."""
        keys, wide = jax.random.split(key), layers * self.size
        return LayerInputsParams(
            embedding=normal(keys[0], (vocab, wide), dtype),
            projection=normal(keys[1], (hidden, wide), dtype),
            norm=self.norm.init(self.size, dtype),
        )

    def tensors(self, vocab: int, hidden: int, layers: int) -> tuple[Tensor, ...]:
        """Return the arrays of the weights, and the tensors of checkpoints that make them up."""
        wide, model = layers * self.size, "model.per_layer"
        return (
            Tensor(("embedding",), ("model.embed_tokens_per_layer.weight",), ((vocab, wide),)),
            matrix("projection", (f"{model}_model_projection",), (wide,), hidden, by_linear=True),
            *norm_of("norm", f"{model}_projection_norm", self.norm, self.size),
        )

    def over(self, params: "LayerInputsParams", tokens: Array | None, x: Array, run: Pass) -> Array:
        """Return the inputs [B, T, L, P] of int32 tokens [B, T] for the first residual stream x.

        Raises:
          ValueError: there are no tokens.
        """
        if tokens is None:
            raise ValueError(
                "a network with inputs of each layer (hidden_size_per_layer_input) runs over "
                "tokens, not over states alone; take one without them"
            )

        def of(tokens: Array, x: Array) -> Array:
            shape = *tokens.shape, -1, self.size
            projected = run.linear(x, params.projection) * x.shape[-1] ** -0.5
            projected = self.norm(projected.astype(x.dtype).reshape(shape), params.norm)
            embedded = ops.look_up(params.embedding, tokens).astype(x.dtype) * self.size**0.5
            return (projected + embedded.reshape(shape)) * 2**-0.5

        return over_listed(run.packing, params.projection, of, tokens, x)


@struct.dataclass
class LayerInputsParams:
    """Weights of the inputs of all layers."""

    embedding: Array  # [V, L * P]
    projection: Array  # [D, L * P]
    norm: Array  # [P]


@dataclasses.dataclass(frozen=True)
class InputGate:
    """The part of a layer that adds its input to the residual stream; static and hashable."""

    size: int  # P
    norm: Norm  # norm of the output
    activation: str = "silu"  # see ``GatedMlp``

    def init(self, key: Array, hidden: int, dtype: jnp.dtype) -> "InputGateParams":
        """Return random weights."""
        keys = jax.random.split(key)
        return InputGateParams(
            gate=normal(keys[0], (hidden, self.size), dtype),
            output=normal(keys[1], (self.size, hidden), dtype),
            norm=self.norm.init(hidden, dtype),
        )

    def tensors(self, hidden: int) -> tuple[Tensor, ...]:
        """Return the arrays of the weights, and the tensors of checkpoints that make them up."""
        return (
            matrix("gate", ("per_layer_input_gate",), (self.size,), hidden, by_linear=True),
            matrix("output", ("per_layer_projection",), (hidden,), self.size, by_linear=True),
            *norm_of("norm", "post_per_layer_input_norm", self.norm, hidden),
        )

    def apply(self, params: "InputGateParams", x: Array, inputs: Array, linear: Linear) -> Array:
        """Return x [B, T, D] plus the output for the layer's inputs [B, T, P]."""
        inner = ACTIVATIONS[self.activation](linear(x, params.gate)) * inputs
        return x + self.norm(linear(inner, params.output).astype(x.dtype), params.norm)


@struct.dataclass
class InputGateParams:
    """Weights of an ``InputGate``."""

    gate: Array  # [D, P]
    output: Array  # [P, D]
    norm: Array  # [D]

"""The gated MLP of Llama-like models: down(activation(gate x) * up x)."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from flax import struct
from jax.sharding import PartitionSpec

from jspec import sharding
from jspec.core.types import Array
from jspec.models.blocks.arithmetic import Linear, affine, normal
from jspec.models.blocks.block import FeedForward, Pass
from jspec.models.blocks.tensors import Tensor, matrix, vector

# By their names in config.json.
ACTIVATIONS = {
    "silu": jax.nn.silu,
    "gelu_pytorch_tanh": functools.partial(jax.nn.gelu, approximate=True),
}


@dataclasses.dataclass(frozen=True)
class GatedMlp(FeedForward):
    """A gated MLP; static and hashable."""

    intermediate_size: int  # F
    bias: bool = False
    column_parts: int = 1  # Each part of gate_up has columns of both.
    activation: str = "silu"  # a name of ``ACTIVATIONS``

    title = "a gated MLP"

    @property
    def dense_size(self) -> int:
        """See ``FeedForward``."""
        return self.intermediate_size

    def init(
        self, keys: Array, hidden: int, dtype: jnp.dtype, shrink: float = 1.0
    ) -> "GatedMlpParams":
        """See ``FeedForward``."""
        wide = self.intermediate_size
        return GatedMlpParams(
            gate_up=normal(keys[0], (hidden, 2 * wide), dtype),
            down=normal(keys[1], (wide, hidden), dtype, shrink),
            gate_up_bias=jnp.zeros((2 * wide,), dtype) if self.bias else None,
            down_bias=jnp.zeros((hidden,), dtype) if self.bias else None,
        )

    def tensors(self, hidden: int, field: str = "", module: str = "mlp") -> tuple[Tensor, ...]:
        """See ``FeedForward``; an MLP inside another part has a field and a module there."""
        wide, gate_up = self.intermediate_size, (f"{module}.gate_proj", f"{module}.up_proj")
        down = (f"{module}.down_proj",)
        tensors = (
            matrix(
                f"{field}gate_up", gate_up, (wide, wide), hidden, by_linear=True, divided="outputs"
            ),
            matrix(f"{field}down", down, (hidden,), wide, by_linear=True, divided="inputs"),
        )
        if not self.bias:
            return tensors
        return (
            *tensors,
            vector(f"{field}gate_up_bias", gate_up, (wide, wide), "bias", divided="outputs"),
            vector(f"{field}down_bias", down, (hidden,), "bias"),
        )

    def divides(self, ways: int) -> bool:
        """See ``Mixer``."""
        return self.intermediate_size % ways == 0

    def split(self, ways: int) -> "GatedMlp":
        """See ``Mixer``."""
        return dataclasses.replace(self, column_parts=ways)

    def apply(self, params: "GatedMlpParams", x: Array, run: Pass) -> Array:
        """See ``FeedForward``."""
        return gated(params, x, run.linear, self.column_parts, self.activation)


@struct.dataclass
class GatedMlpParams:
    """Weights of a gated MLP; None for biases that it lacks."""

    gate_up: Array  # [D, 2F]
    down: Array  # [F, D]
    gate_up_bias: Array | None = None  # [2F]
    down_bias: Array | None = None  # [D]


def gated(
    params: GatedMlpParams,
    x: Array,
    linear: Linear,
    column_parts: int = 1,
    activation: str = "silu",
) -> Array:
    """Return the gated MLP of x [..., D], in the dtype of ``linear``."""
    columns = affine(x, params.gate_up, params.gate_up_bias, linear)
    inner = gate(columns, column_parts, activation)
    return affine(inner, params.down, params.down_bias, linear)


def gate(columns: Array, parts: int = 1, activation: str = "silu") -> Array:
    """Return activation(gate) * up [..., F] of columns [..., 2F], which are in ``parts``."""
    act = ACTIVATIONS[activation]
    if parts == 1:
        first, second = jnp.split(columns, 2, axis=-1)
        return act(first) * second
    if sharding.num_shards() == parts:
        # Each device splits its own columns. For a reshape, XLA for TPU would relay the weight.
        spec = PartitionSpec(*[None] * (columns.ndim - 1), sharding.TENSOR)
        local = functools.partial(gate, activation=activation)
        return jax.shard_map(local, in_specs=spec, out_specs=spec, check_vma=False)(columns)
    both = columns.reshape(*columns.shape[:-1], parts, 2, -1)
    gated = act(both[..., 0, :]) * both[..., 1, :]
    return gated.reshape(*columns.shape[:-1], -1)

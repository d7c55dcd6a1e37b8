"""Experts beside an MLP, as of Gemma 4: each has norms of its input and of its output.

The shared expert of ``Experts`` is the MLP. The router reads the residual stream through a norm
and a vector of factors, and a learned number of each expert is a factor on its weight.
"""

import dataclasses

import jax.numpy as jnp
from flax import struct

from jspec.core.types import Array
from jspec.models.blocks.block import Pass
from jspec.models.blocks.experts import Experts, ExpertsParams, combine, route
from jspec.models.blocks.norms import Norm, RmsNorm
from jspec.models.blocks.tensors import Tensor, norm_of, vector

# The norms by their fields, and their modules under Llama's names or Gemma's.
_NORMS = {
    "mlp_norm": "post_attention_layernorm",
    "experts_norm": "pre_feedforward_layernorm_2",
    "mlp_output_norm": "post_feedforward_layernorm_1",
    "experts_output_norm": "post_feedforward_layernorm_2",
}


@dataclasses.dataclass(frozen=True)
class ExpertsBesideMlp(Experts):
    """A mixture of experts beside an MLP of ``shared_size``; static and hashable."""

    norm: Norm = RmsNorm(wide=True)  # noqa: RUF009 (frozen); of inputs and outputs

    title = "experts beside an MLP"
    norms_input = True

    def init(
        self, keys: Array, hidden: int, dtype: jnp.dtype, shrink: float = 1.0
    ) -> "ExpertsBesideMlpParams":
        """See ``FeedForward``."""
        return ExpertsBesideMlpParams(
            **vars(super().init(keys, hidden, dtype, shrink)),
            **{field: self.norm.init(hidden, dtype) for field in _NORMS},
            router_scale=jnp.ones((hidden,), dtype),
            expert_scale=jnp.ones((self.num_experts,), dtype),
        )

    def tensors(self, hidden: int) -> tuple[Tensor, ...]:
        """See ``FeedForward``."""
        router = (self.names.router.rpartition(".")[0],)
        tensors = [
            *super().tensors(hidden),
            vector("router_scale", router, (hidden,), "scale"),
            vector("expert_scale", router, (self.num_experts,), "per_expert_scale"),
        ]
        for field, module in _NORMS.items():
            tensors += norm_of(field, module, self.norm, hidden)
        return tuple(tensors)

    def apply(self, params: "ExpertsBesideMlpParams", x: Array, run: Pass) -> Array:
        """See ``FeedForward``; x is the residual stream."""
        narrow = self.shared.apply(params.shared, self.norm(x, params.mlp_norm), run)
        narrow = self.norm(narrow.astype(x.dtype), params.mlp_output_norm)
        rows = x.reshape(-1, x.shape[-1])
        # The router rounds the norm before the factors, as transformers does.
        scored = RmsNorm(self.norm.eps)(rows, params.router_scale) * x.shape[-1] ** -0.5
        experts, weights = route(params, self, scored)
        mixed = combine(
            params,
            self,
            self.norm(rows, params.experts_norm),
            experts,
            weights * params.expert_scale.astype(weights.dtype)[experts],
            count=None if run.packing is None else run.packing.count,
        )
        mixed = mixed.reshape(x.shape).astype(x.dtype)
        return narrow + self.norm(mixed, params.experts_output_norm)


@struct.dataclass
class ExpertsBesideMlpParams(ExpertsParams):
    """Weights of experts beside an MLP, which is ``shared``."""

    mlp_norm: Array | None = None  # [D]
    experts_norm: Array | None = None  # [D]
    mlp_output_norm: Array | None = None  # [D]
    experts_output_norm: Array | None = None  # [D]
    router_scale: Array | None = None  # [D]
    expert_scale: Array | None = None  # [E]

"""What drafters have in common that remember one hidden state of the target, the last one."""

import dataclasses

import jax.numpy as jnp
from flax import struct

from jspec.drafters.trees import TreeDrafter
from jspec.types import Array


@struct.dataclass
class FeatureMemory:
    """The target's hidden state at the last committed position but the root's."""

    hidden: Array  # [B, D]
    known: Array  # [B] bool: False until there is one


@dataclasses.dataclass(frozen=True)
class FeatureDrafter(TreeDrafter):
    """A head that starts from one hidden state; its config says ``hidden_size`` and dtype."""

    def init(self, params, request, capacity):
        """No hidden state yet."""
        batch = request.max_length.shape[0]
        hidden = jnp.zeros((batch, self.config.hidden_size), self.config.activation_dtype)
        return FeatureMemory(hidden, jnp.zeros((batch,), bool))

    def absorb(self, params, memory, tokens, features, start, valid):
        """Keeps the last hidden state of a chunk of the prompt."""
        return _keep(memory, features[0], valid - 1, valid > 0)

    def update(self, params, request, shared, memory, history, draft, verdict, out):
        """Keeps the hidden state at the end of the accepted path."""
        last = jnp.maximum(verdict.num_emitted - 1, 0)
        node = jnp.take_along_axis(verdict.path, last[:, None], 1)[:, 0]
        return _keep(memory, out.features[0], node, verdict.num_emitted > 0), shared


def _keep(memory: FeatureMemory, features: Array, row: Array, there: Array) -> FeatureMemory:
    row = jnp.maximum(row, 0)[:, None, None]
    hidden = jnp.take_along_axis(features, row, 1)[:, 0].astype(memory.hidden.dtype)
    return FeatureMemory(
        jnp.where(there[:, None], hidden, memory.hidden), memory.known | there
    )  # fmt: skip

"""Drafters whose head starts each round from the target's last hidden state alone."""

import dataclasses

import jax.numpy as jnp
from flax import struct

from jspec.core.types import Array
from jspec.drafters.base.tree_drafter import TreeDrafter, last_of
from jspec.models.layers import rows_at


@struct.dataclass
class FeatureMemory:
    """The target's hidden state at the position before the root."""

    hidden: Array  # [B, D]
    known: Array  # [B] bool: False until there is one


@dataclasses.dataclass(frozen=True)
class FeatureDrafter(TreeDrafter):
    """A head that starts from the target's last hidden state, of its config's size and dtype."""

    def init(self, params, request, capacity):
        """Return a memory without a hidden state."""
        batch = request.max_length.shape[0]
        hidden = jnp.zeros((batch, self.config.hidden_size), self.config.activation_dtype)
        return FeatureMemory(hidden, jnp.zeros((batch,), bool))

    def prefill(self, params, memory, tokens, features, start, valid):
        """Keep the last hidden state of a chunk of the prompt."""
        return _keep_last(memory, features[0], last_of(valid), valid > 0)

    def update(self, params, request, shared, memory, history, draft, verdict, out):
        """Keep the hidden state at the end of the accepted path."""
        node = rows_at(verdict.path, last_of(verdict.num_emitted))
        return _keep_last(memory, out.features[0], node, verdict.num_emitted > 0), shared


def _keep_last(memory: FeatureMemory, features: Array, row: Array, ran: Array) -> FeatureMemory:
    """Replace the hidden state by row ``row`` [B, 1] of the features in rows that ``ran`` [B]."""
    hidden = rows_at(features, row)[:, 0].astype(memory.hidden.dtype)
    return FeatureMemory(jnp.where(ran[:, None], hidden, memory.hidden), memory.known | ran)


def check_num_heads(max_depth: int, num_heads: int) -> None:
    """Refuse a tree that is deeper than there are heads, one for each depth."""
    if max_depth > num_heads:
        raise ValueError(
            f"the tree is {max_depth} deep, but there are {num_heads} heads, one for each depth."
        )

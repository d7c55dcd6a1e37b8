"""Drafters whose head starts each round from the target's last hidden state alone."""

import dataclasses

import jax
import jax.numpy as jnp
from flax import struct

from jspec.core.history import root_token
from jspec.core.types import Array
from jspec.drafters.base.tree_drafter import TreeDrafter, last_of, rows
from jspec.models.blocks.arithmetic import rows_at


@struct.dataclass
class FeatureMemory:
    """The target's hidden state at the position before the root."""

    hidden: Array  # [B, D]
    has_hidden: Array  # [B] bool: False until the target has computed one.


@dataclasses.dataclass(frozen=True)
class FeatureDrafter(TreeDrafter):
    """A head that starts from the target's last hidden state, of its config's size and dtype.

    ``_state`` returns the first states [B, 1, ...] of a round, and ``_advance`` the states after
    tokens [B, F], and their logits [B, F, Vd]. Its weights may depend on the depth.
    """

    unrolled = True
    lookahead = 0

    def init(self, params, request, capacity):
        """Return a memory without a hidden state."""
        batch = request.max_length.shape[0]
        hidden = jnp.zeros((batch, self.config.hidden_size), self.config.activation_dtype)
        return FeatureMemory(hidden, jnp.zeros((batch,), bool))

    def prefill(self, params, memory, tokens, features, start, valid):
        """Keep the last hidden state of a chunk of the prompt."""
        return _keep_last(memory, features[0], last_of(valid), valid > 0)

    def update(self, round):
        """Keep the hidden state at the end of the accepted path."""
        path, count = round.verdict.path, round.verdict.num_emitted
        node = rows_at(path, last_of(count))
        return _keep_last(round.memory, round.out.features[0], node, count > 0), round.shared

    def _start(self, params, memory, history):
        return self._advance(params, self._state(memory), root_token(history)[:, None], 0)

    def _feed(self, params, memory, history, frontier, drafted, parents, depth, slot):
        state = jax.tree.map(lambda x: rows(x, parents), frontier)
        return self._advance(params, state, drafted, depth)

    def _ready(self, memory):
        return memory.has_hidden

    def _check_depth(self):
        super()._check_depth()
        if not self.knows_depth and self.max_depth > self.config.num_heads:
            raise ValueError(
                f"the tree is {self.max_depth} deep, but there are {self.config.num_heads} heads, "
                "one for each depth."
            )


def _keep_last(memory: FeatureMemory, features: Array, row: Array, ran: Array) -> FeatureMemory:
    """Replace the hidden state by row ``row`` [B, 1] of the features in rows that ``ran`` [B]."""
    hidden = rows_at(features, row)[:, 0].astype(memory.hidden.dtype)
    return FeatureMemory(jnp.where(ran[:, None], hidden, memory.hidden), memory.has_hidden | ran)

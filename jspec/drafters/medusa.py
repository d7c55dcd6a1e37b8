"""Medusa: several heads guess the next tokens, all from one hidden state (arXiv 2401.10774).

With the root at position r, the heads read the target's feature at r - 1, the last one it has
computed: its own logits gave the root, so head i guesses the token at r + 1 + i. What a head
guesses does not depend on what another guessed, so all nodes of one depth share a law.
"""

import dataclasses

import jax.numpy as jnp
from flax import struct
from jax import lax

from jspec import growth
from jspec.drafters.trees import TreeDrafter
from jspec.models.heads import medusa as network
from jspec.models.heads.medusa import MedusaConfig
from jspec.types import Array


@struct.dataclass
class MedusaMemory:
    """The target's hidden state at the last committed position but the root's."""

    hidden: Array  # [B, D]
    known: Array  # [B] bool: False until there is one


@dataclasses.dataclass(frozen=True)
class Medusa(TreeDrafter):
    """Drafting by Medusa heads, a chain or a static tree, at most as deep as there are heads.

    Raises:
      ValueError: a setting is out of range, or does not go with the tree or the heads.
    """

    config: MedusaConfig

    def __post_init__(self):
        if self.tree == "eagle2":
            raise ValueError(
                "tree='eagle2' follows the confidence of a head that sees what it drafted; Medusa's"
                " heads do not: use 'chain', 'sampled', a published tree or paths."
            )
        super().__post_init__()
        if self.max_depth > self.config.num_heads:
            raise ValueError(
                f"the tree is {self.max_depth} deep, but there are {self.config.num_heads} heads, "
                "one for each depth."
            )

    def init(self, params, request, capacity):
        """No hidden state yet."""
        batch = request.max_length.shape[0]
        hidden = jnp.zeros((batch, self.config.hidden_size), self.config.activation_dtype)
        return MedusaMemory(hidden, jnp.zeros((batch,), bool))

    def absorb(self, params, memory, tokens, features, start, valid):
        """Keeps the last hidden state of a chunk of the prompt."""
        return self._keep(memory, features[0], valid - 1, valid > 0)

    def update(self, params, request, shared, memory, history, draft, verdict, out):
        """Keeps the hidden state at the end of the accepted path."""
        last = jnp.maximum(verdict.num_emitted - 1, 0)
        node = jnp.take_along_axis(verdict.path, last[:, None], 1)[:, 0]
        return self._keep(memory, out.features[0], node, verdict.num_emitted > 0), shared

    def propose(self, params, request, shared, memory, history):
        """Drafts from one pass of the heads."""
        used = params.drafter.replace(blocks=params.drafter.blocks[: self.max_depth])
        logits = network.heads(used, self.config, memory.hidden, self.target, params.target)
        drawing = growth.Drawing(
            request, history, self.method, self.noise, self.target.vocab_size,
            params.drafter.draft_to_target,
        )  # fmt: skip
        if max(self.shape.widths) == 1:
            draft = growth.chain(drawing, self.max_depth, logits[:, :1], _feed, logits)
        else:
            draft = growth.ranked(drawing, self.shape, logits[:, :1], _feed, logits)
        return self.limit(draft, history, memory.known), memory

    def _keep(self, memory: MedusaMemory, features: Array, row: Array, there: Array):
        row = jnp.maximum(row, 0)[:, None, None]
        hidden = jnp.take_along_axis(features, row, 1)[:, 0].astype(memory.hidden.dtype)
        return MedusaMemory(
            jnp.where(there[:, None], hidden, memory.hidden), memory.known | there
        )  # fmt: skip


def _feed(logits, drafted, parents, depth, slot):
    """The next head's logits, whatever was drafted."""
    del drafted, parents, slot
    return logits, lax.dynamic_slice_in_dim(logits, depth, 1, axis=1)

"""Medusa: several heads guess the next tokens, all from one hidden state (arXiv 2401.10774).

With the root at position r, the heads read the target's feature at r - 1, the last one it has
computed: its own logits gave the root, so head i guesses the token at r + 1 + i. What a head
guesses does not depend on what another guessed, so all nodes of one depth share a law.
"""

import dataclasses

from jax import lax

from jspec import growth
from jspec.drafters.features import FeatureDrafter
from jspec.models.heads import medusa as network
from jspec.models.heads.medusa import MedusaConfig


@dataclasses.dataclass(frozen=True)
class Medusa(FeatureDrafter):
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

    def propose(self, params, request, shared, memory, history):
        """Drafts from one pass of the heads."""
        used = params.drafter.replace(blocks=params.drafter.blocks[: self.max_depth])
        logits = network.heads(used, self.config, memory.hidden, self.target, params.target)
        drawing = self.drawing(request, history, params)
        draft = growth.grow(drawing, self.shape, logits[:, :1], _feed, logits)
        return self.limit(draft, history, memory.known), memory


def _feed(logits, drafted, parents, depth, slot):
    """The next head's logits, whatever was drafted."""
    del drafted, parents, slot
    return logits, lax.dynamic_slice_in_dim(logits, depth, 1, axis=1)

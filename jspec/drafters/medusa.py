"""Medusa: several heads guess the next tokens, all from one hidden state (arXiv 2401.10774).

With the root at position r, the heads read the target's feature at r - 1, the last one it has
computed: its own logits gave the root, so head i guesses the token at r + 1 + i. What a head
guesses does not depend on what another guessed, so all nodes of one depth share a law.
"""

import dataclasses

from jspec.drafters.base.features import FeatureDrafter
from jspec.drafters.trees import marginals
from jspec.models.heads import medusa as network
from jspec.models.heads.medusa import MedusaConfig, MedusaParams


@dataclasses.dataclass(frozen=True)
class Medusa(FeatureDrafter):
    """Drafting by Medusa heads, a chain or a static tree, at most as deep as there are heads.

    Raises:
      ValueError: a setting is out of range, or does not go with the tree or the heads.
    """

    weights = (MedusaParams,)

    config: MedusaConfig

    follows = "best_first"

    def __post_init__(self):
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
        draft = marginals.grow(drawing, self.draft_tree, logits)
        return self.limit(draft, history, memory.known), memory

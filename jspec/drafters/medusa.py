"""Medusa: several heads guess the next tokens, all from one hidden state (arXiv 2401.10774).

With the root at position r, the heads read the target's hidden state at r - 1, the last one that
it has computed. Its own logits gave the root, so head i guesses the token at r + 1 + i. No head
sees the guess of another, so all nodes of a depth share a distribution.

See ``jspec.models.heads.medusa`` for the network, ``jspec.checkpoints.heads.medusa`` for files,
``training.tasks.medusa`` for training.
"""

import dataclasses

from jspec.drafters.base.features import FeatureDrafter
from jspec.drafters.trees import marginals
from jspec.models.heads import medusa as network
from jspec.models.heads.medusa import MedusaConfig, MedusaParams


@dataclasses.dataclass(frozen=True)
class Medusa(FeatureDrafter):
    """Drafting by Medusa heads, a chain or a static tree, at most as deep as there are heads."""

    follows = "best_first"
    weights = (MedusaParams,)

    config: MedusaConfig

    def propose(self, params, request, shared, memory, history):
        """Draft from one pass of the heads."""
        used = params.drafter.replace(blocks=params.drafter.blocks[: self.max_depth])
        logits = network.heads(used, self.config, memory.hidden, self.target, params.target)
        drawing = self.drawing(request, history, params)
        draft = marginals.grow(drawing, self.draft_tree, logits)
        return self.limit(draft, history, memory.has_hidden), memory

"""P-EAGLE: an EAGLE-3 head drafts K tokens in one pass, behind mask rows (arXiv 2602.01469).

Behind the rows whose features have become true, which enter the head's cache, stand K - 1 rows of
the mask token and of the learned feature that goes with it, at the places of the rows that they are
there for. With the root at position r, so that row r - 1 is the last true one: ::

    row             ...   r-2       r-1    |   r        r+1    ...  r+K-2
    feature         ...  f_{r-2}   f_{r-1} |  masked   masked
    token           ...  t_{r-1}    root   |  mask     mask
    predicts                        x_1    |  x_2      x_3          x_K

Every row sees those before it. Left of the bar the rows stay; right of it they are forgotten, and
what they gave out is all that a round starts from: all nodes of a depth share a law.
"""

import dataclasses
from typing import ClassVar

import jax.numpy as jnp

from jspec.drafters.base.cached import CachedDrafter
from jspec.drafters.base.features import CachedMemory
from jspec.drafters.base.tree_drafter import last_of
from jspec.drafters.trees import marginals
from jspec.models.heads import eagle as head
from jspec.models.heads.eagle import EagleConfig, EagleParams
from jspec.models.heads.network import embed


@dataclasses.dataclass(frozen=True)
class ParallelEagle(CachedDrafter):
    """Drafting by a P-EAGLE head, a chain or a tree that needs no second pass.

    Its memory's ``hidden`` is [B, K, D]: what row r - 1 and the mask rows gave out.

    Raises:
      ValueError: a setting is out of range or does not go with the tree, or the head has no mask.
    """

    follows: ClassVar[str] = "best_first"
    weights = (EagleParams,)

    config: EagleConfig

    def __post_init__(self):
        super().__post_init__()
        if self.config.mask_token_id is None:
            raise ValueError(
                "For parallel drafting, the head must have a mask_hidden, and `pard_token`, "
                "`ptd_token_id` or `mask_token_id` specified in its config.json. Without them it "
                "was not trained for it: leave parallel_drafting out, or train one (python -m "
                "training.distill_eagle --parallel)."
            )

    def init(self, params, request, capacity):
        """An empty cache."""
        shape = request.max_length.shape[0], self.max_depth, self.config.hidden_size
        hidden = jnp.zeros(shape, self.config.network.activation_dtype)
        return CachedMemory(head.init_cache(self.config, shape[0], capacity), hidden)

    def propose(self, params, request, shared, memory, history):
        """Drafts from what the last pass gave out."""
        logits = head.unembed(
            params.drafter, self.config, memory.hidden, self.target, params.target
        )
        draft = marginals.grow(self.drawing(request, history, params), self.draft_tree, logits)
        # The first feature comes with the second token.
        return self.limit(draft, history, memory.cache.length > 0), memory

    def _take_in(self, params, memory, following, features, count):
        size = following.shape[1]
        behind = [(0, 0), (0, self.max_depth - 1)]
        true = jnp.arange(size + self.max_depth - 1) < count[:, None]
        tokens = jnp.where(true, jnp.pad(following, behind), self.config.mask_token_id)
        fused = jnp.where(
            true[..., None],
            jnp.pad(head.fuse(params.drafter, self.config, features), [*behind, (0, 0)]),
            head.mask_feature(params.drafter, self.config),
        )
        embedded = embed(params.drafter, self.config, tokens, self.target, params.target)
        guessing = last_of(count) + jnp.arange(self.max_depth)
        out, entries = head.take_in(
            params.drafter, self.config, embedded, fused, memory.cache, guessing
        )
        return memory.take_in(out, entries, count, size)

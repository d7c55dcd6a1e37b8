"""P-EAGLE: an EAGLE-3 head drafts K tokens in one pass, behind mask rows (arXiv 2602.01469).

K - 1 rows follow the rows of the target's features. Each pairs the mask token with a learned mask
feature, at the position of the row that it stands for. With the root at position r, so that row
r - 1 is the last row of the target's features: ::

    row             ...   r-2       r-1    |   r        r+1    ...  r+K-2
    feature         ...  f_{r-2}   f_{r-1} |  masked   masked
    token           ...  t_{r-1}    root   |  mask     mask
    predicts                        x_1    |  x_2      x_3          x_K

Every row sees the rows before it. The rows left of the bar enter the cache. Of the mask rows only
the outputs are kept, until the next round. So all nodes of a depth share a distribution.

See ``jspec.models.heads.eagle`` for the network, ``jspec.checkpoints.heads.eagle`` for files,
``training.tasks.eagle`` for training.
"""

import dataclasses
from typing import ClassVar

import jax.numpy as jnp

from jspec.drafters.base.cached import CachedDrafter, CachedMemory
from jspec.drafters.base.tree_drafter import last_of
from jspec.drafters.trees import marginals
from jspec.models import decoder
from jspec.models.heads import eagle as head
from jspec.models.heads.eagle import EagleConfig, EagleParams
from jspec.models.heads.network import embed


@dataclasses.dataclass(frozen=True)
class ParallelEagle(CachedDrafter):
    """Drafting by a P-EAGLE head, a chain or any tree that needs one pass.

    ``CachedMemory.hidden`` is [B, K, D]: the outputs of row r - 1 and of the mask rows.

    Raises:
      ValueError: a setting is out of range or contradicts the tree, or the head has no mask.
    """

    follows: ClassVar[str] = "best_first"
    weights = (EagleParams,)

    config: EagleConfig

    def _check_depth(self):
        if self.config.mask_token_id is None:
            raise ValueError(
                "For parallel drafting, the head must have a mask_hidden, and `pard_token`, "
                "`ptd_token_id` or `mask_token_id` specified in its config.json. Without them it "
                "was not trained for it: leave parallel_drafting out, or train one (python -m "
                "training.distill_eagle --parallel)."
            )

    def init(self, params, request, capacity):
        """Allocate an empty cache."""
        cache = decoder.init_cache(self.config.network, request.max_length.shape[0], capacity)
        return CachedMemory.empty(cache, self.max_depth, self.config)

    def propose(self, params, request, shared, memory, history):
        """Draft from the outputs of the last pass."""
        logits = head.unembed(
            params.drafter, self.config, memory.hidden, self.target, params.target
        )
        draft = marginals.grow(self.drawing(request, history, params), self.draft_tree, logits)
        return self.limit(draft, history, memory.cache.length > 0), memory

    def _commit(self, params, memory, following, features, count):
        size = following.shape[1]
        behind = [(0, 0), (0, self.max_depth - 1)]
        known = jnp.arange(size + self.max_depth - 1) < count[:, None]
        tokens = jnp.where(known, jnp.pad(following, behind), self.config.mask_token_id)
        fused = jnp.where(
            known[..., None],
            jnp.pad(head.fuse(params.drafter, self.config, features), [*behind, (0, 0)]),
            head.mask_feature(params.drafter, self.config),
        )
        embedded = embed(params.drafter, self.config, tokens, self.target, params.target)
        drafting = last_of(count) + jnp.arange(self.max_depth)
        out, entries = head.prefill(
            params.drafter, self.config, embedded, fused, memory.cache, drafting
        )
        return memory.commit(out, entries, count, size)

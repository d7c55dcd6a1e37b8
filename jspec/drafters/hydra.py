"""Hydra: heads that each look one token further, and see those drafted before (arXiv 2402.05109).

With the root at position r, the heads start from the target's feature at r - 1, the last one it has
computed, and its embedding of the root; head i also sees the i tokens drafted before, so every node
has a law of its own. What a node has read is forgotten after the round. From round to round stays
the target's feature alone or, where the heads have a prefix layer, that layer's rows of features.
"""

import dataclasses
import functools

import jax.numpy as jnp

from jspec.core.history import root_token
from jspec.drafters.base.features import CachedMemory, FeatureDrafter
from jspec.drafters.base.tree_drafter import last_of, rows
from jspec.drafters.trees import expand
from jspec.drafters.trees.tree_settings import Dynamic
from jspec.models import decoder
from jspec.models.heads import hydra as network
from jspec.models.heads.hydra import HydraConfig, HydraParams


@dataclasses.dataclass(frozen=True)
class Hydra(FeatureDrafter):
    """Drafting by Hydra heads, a chain or any tree, at most as deep as there are heads.

    Raises:
      ValueError: a setting is out of range, or does not go with the tree or the heads.
    """

    weights = (HydraParams,)

    config: HydraConfig

    def __post_init__(self):
        super().__post_init__()
        if self.max_depth > self.config.num_heads:
            raise ValueError(
                f"the tree is {self.max_depth} deep, but there are {self.config.num_heads} heads, "
                "one for each depth."
            )

    def init(self, params, request, capacity):
        """No hidden state yet, and an empty cache where there is a prefix layer."""
        memory = super().init(params, request, capacity)
        if self.config.network is None:
            return memory
        cache = decoder.init_cache(self.config.network, len(memory.known), capacity)
        return CachedMemory(cache, memory.hidden[:, None])

    def prefill(self, params, memory, tokens, features, start, valid):
        """Takes in a chunk of the prompt."""
        if self.config.network is None:
            return super().prefill(params, memory, tokens, features, start, valid)
        return self._take_in(params, memory, features[0], valid)

    def update(self, params, request, shared, memory, history, draft, verdict, out):
        """Takes in the rows of the accepted path, whose features are true."""
        if self.config.network is None:
            return super().update(params, request, shared, memory, history, draft, verdict, out)
        features = jnp.take_along_axis(out.features[0], verdict.path[..., None], 1)
        return self._take_in(params, memory, features, verdict.num_emitted), shared

    def propose(self, params, request, shared, memory, history):
        """Drafts from the last hidden state and the root."""
        root = root_token(history)[:, None]
        cached = isinstance(memory, CachedMemory)
        hidden = memory.hidden if cached else memory.hidden[:, None]
        frontier, logits = self._advance(params, hidden, root, 0)
        if isinstance(self.draft_tree, Dynamic):  # which wants the root at its full width
            frontier = jnp.repeat(frontier, self.draft_tree.top_k, 1)
        draft = expand.grow(
            self.drawing(request, history, params),
            self.draft_tree,
            logits,
            functools.partial(self._feed, params),
            frontier,
            unrolled=True,
        )
        known = memory.cache.length > 0 if cached else memory.known
        return self.limit(draft, history, known), memory

    def _take_in(self, params, memory, features, count):
        out, entries = network.take_in(
            params.drafter, self.config, features, memory.cache, last_of(count)
        )
        return memory.take_in(out, entries, count, features.shape[1])

    def _feed(self, params, frontier, drafted, parents, depth, slot):
        """What the heads after drafted tokens [B, F] have read, each after its parent's."""
        del slot
        return self._advance(params, rows(frontier, parents), drafted, depth)

    def _advance(self, params, state, drafted, head):
        embedded = self.target.embed(params.target, drafted)
        return network.advance(params.drafter, self.config, state, embedded, head)

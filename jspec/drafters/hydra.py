"""Hydra: heads that each look one token further, and see those drafted before (arXiv 2402.05109).

With the root at position r, the heads start from the target's hidden state at r - 1, the last one
that it has computed, and from the root's embedding. Head i also sees the i tokens drafted before,
so every node has a distribution of its own. The memory holds the target's hidden state or, if the
heads have a prefix layer, that layer's cache and last output.

See ``jspec.models.heads.hydra`` for the network, ``jspec.checkpoints.heads.hydra`` for files,
``training.tasks.hydra`` for training.
"""

import dataclasses

from jspec.drafters.base.cached import CachedMemory
from jspec.drafters.base.features import FeatureDrafter
from jspec.drafters.base.tree_drafter import along_path, last_of
from jspec.models import decoder
from jspec.models.heads import hydra as network
from jspec.models.heads.hydra import HydraConfig, HydraParams


@dataclasses.dataclass(frozen=True)
class Hydra(FeatureDrafter):
    """Drafting by Hydra heads, a chain or any tree, at most as deep as there are heads."""

    maps_vocabulary = False
    weights = (HydraParams,)

    config: HydraConfig

    def init(self, params, request, capacity):
        """Return a memory without a hidden state, or an empty cache of the prefix layer."""
        memory = super().init(params, request, capacity)
        if self.config.network is None:
            return memory
        cache = decoder.init_cache(self.config.network, len(memory.has_hidden), capacity)
        return CachedMemory(cache, memory.hidden[:, None])

    def prefill(self, params, memory, tokens, features, start, valid):
        """Keep the last hidden state of a chunk of the prompt, or commit it all."""
        if self.config.network is None:
            return super().prefill(params, memory, tokens, features, start, valid)
        return self._commit(params, memory, features[0], valid)

    def update(self, round):
        """Keep the last hidden state of the accepted path, or commit it all."""
        if self.config.network is None:
            return super().update(round)
        (features,) = along_path(round.out.features, round.verdict.path)
        count = round.verdict.num_emitted
        return self._commit(round.params, round.memory, features, count), round.shared

    def _state(self, memory):
        return memory.hidden[:, None] if self.config.network is None else memory.hidden

    def _ready(self, memory):
        return memory.has_hidden if self.config.network is None else memory.cache.length > 0

    def _commit(self, params, memory, features, count):
        out, entries = network.prefill(
            params.drafter, self.config, features, memory.cache, last_of(count)
        )
        return memory.commit(out, entries, count, features.shape[1])

    def _advance(self, params, state, drafted, head):
        embedded = self.target.embed(params.target, drafted)
        state, x = network.step(params.drafter, self.config, state, embedded, head)
        return state, network.unembed(params.drafter, x, head)

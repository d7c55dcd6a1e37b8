"""DFlash: a block of masked tokens filled in by one pass (arXiv 2602.06036).

With the root at position r, the head has a cache of what it made of the target's hidden states at
positions 0 .. r - 1, all that the target has computed. One pass over the root and K masks gives the
laws of the next K tokens, each as if those between were not known: so all nodes of one depth share
a law, and the likeliest paths are found without growing others (DDTree, arXiv 2604.12989). Once the
target has judged a draft, its hidden states along the accepted path enter the cache. After a prompt
of one token there are none, and the first round is a plain one.
"""

import dataclasses

import jax.numpy as jnp

from jspec import kv, marginals, tokens
from jspec.drafters.trees import TreeDrafter
from jspec.models.heads import dflash as head
from jspec.models.heads.dflash import DFlashConfig


@dataclasses.dataclass(frozen=True)
class DFlash(TreeDrafter):
    """Drafting by a DFlash head, a chain or any tree, at most as deep as its block.

    Raises:
      ValueError: a setting is out of range, or does not go with the tree or the head.
    """

    follows = "best_first"

    config: DFlashConfig

    def __post_init__(self):
        super().__post_init__()
        if self.max_depth > self.config.max_depth:
            raise ValueError(
                f"the tree is {self.max_depth} deep, but a block of {self.config.block_size} slots "
                f"drafts {self.config.max_depth} tokens: num_speculative_tokens must be at most "
                f"{self.config.max_depth}."
            )
        narrow = min((window for window in self.config.network.windows if window), default=None)
        slots = self.config.slots(self.max_depth)
        if narrow is not None and narrow < slots:
            raise ValueError(
                f"a block of {slots} slots does not fit into the head's sliding window of "
                f"{narrow}; draft at most {self.max_depth - slots + narrow} tokens."
            )

    def init(self, params, request, capacity):
        """An empty cache."""
        return head.init_cache(self.config, request.max_length.shape[0], capacity)

    def absorb(self, params, memory, tokens, features, start, valid):
        """Takes in a chunk of the prompt."""
        return self._take_in(params, memory, features, valid)

    def update(self, params, request, shared, memory, history, draft, verdict, out):
        """Takes in the target's hidden states along the accepted path."""
        features = tuple(
            jnp.take_along_axis(feature, verdict.path[..., None], 1) for feature in out.features
        )
        return self._take_in(params, memory, features, verdict.num_emitted), shared

    def propose(self, params, request, shared, memory, history):
        """Drafts from one pass over a block."""
        hidden = head.fill_in(
            params.drafter, self.config, tokens.root(history), self.max_depth, memory, self.target,
            params.target,
        )  # fmt: skip
        logits = head.unembed(params.drafter, self.config, hidden, self.target, params.target)
        draft = marginals.grow(self.drawing(request, history, params), self.shape, logits)
        return self.limit(draft, history, memory.length > 0), memory

    def _take_in(self, params, cache, features, count):
        """Commits the first ``count`` [B] of n rows of hidden states [B, n, D_target]."""
        context = head.fuse(params.drafter, self.config, features)
        rows = jnp.broadcast_to(jnp.arange(context.shape[1]), context.shape[:2])
        positions = cache.length[:, None] + rows
        entries = head.inject(params.drafter, self.config, context, positions)
        return kv.append(cache, entries, rows, count)

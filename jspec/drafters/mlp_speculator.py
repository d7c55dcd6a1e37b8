"""MLP speculators (arXiv 2404.19124): a recurrent net that starts from one hidden state.

With the root at position r, the net starts from the target's feature at r - 1, the last one it has
computed, and the root. Each stage guesses the token after the one it is fed, so a chain or a tree
grows by feeding drafted tokens; every node has a state of its own, forgotten after the round. What
stays from round to round is the target's feature alone.

The networks are IBM's and Snowflake's (Arctic): ``jspec.models.heads.mlp_speculator`` and
``jspec.models.heads.arctic``.
"""

import dataclasses
import functools
from typing import ClassVar

import jax
import jax.numpy as jnp

from jspec.core.history import root_token
from jspec.drafters.base.features import FeatureDrafter
from jspec.drafters.base.tree_drafter import rows
from jspec.drafters.trees import expand, tree_settings
from jspec.drafters.trees.tree_settings import Dynamic
from jspec.models.heads import arctic, mlp_speculator
from jspec.models.heads.arctic import LstmSpeculatorConfig, LstmSpeculatorParams
from jspec.models.heads.mlp_speculator import MlpSpeculatorConfig, MlpSpeculatorParams

_NETWORKS = {MlpSpeculatorConfig: mlp_speculator, LstmSpeculatorConfig: arctic}


@dataclasses.dataclass(frozen=True)
class MlpSpeculator(FeatureDrafter):
    """Drafting by an MLP speculator, a chain or any tree.

    ``num_speculative_tokens`` may be left out: it is then the speculator's ``n_predict``. Stages
    with weights of their own draft no further; where stages share their weights they may be used
    again, ``num_speculative_tokens`` then being a multiple of ``n_predict``, as in vLLM.

    Raises:
      ValueError: a setting is out of range, or does not go with the tree or the speculator.
    """

    knows_depth: ClassVar[bool] = True
    weights = (MlpSpeculatorParams, LstmSpeculatorParams)

    config: MlpSpeculatorConfig | LstmSpeculatorConfig

    def __post_init__(self):
        stages = self.config.n_predict
        any_depth = self.tree in tree_settings.OF_ANY_DEPTH
        if any_depth and self.num_speculative_tokens is None and self.tree_depth is None:
            object.__setattr__(self, "num_speculative_tokens", stages)
        super().__post_init__()
        if self.max_depth <= stages:
            return
        if not self.config.tie_weights:
            raise ValueError(
                f"the draft is {self.max_depth} deep, but the speculator has weights for n_predict="
                f"{stages} tokens and its stages share none: num_speculative_tokens must be at "
                f"most {stages}."
            )
        if self.max_depth % stages:
            raise ValueError(
                f"num_speculative_tokens:{self.max_depth} must be divisible by n_predict={stages} "
                "where it is more: use a multiple, or fewer tokens."
            )

    def propose(self, params, request, shared, memory, history):
        """Drafts from the last hidden state and the root."""
        state = self._network.start(self.config, memory.hidden[:, None])
        root = root_token(history)[:, None]
        frontier, logits = self._advance(params, state, root, 0)
        if isinstance(self.draft_tree, Dynamic):  # which wants the root at its full width
            frontier = jax.tree.map(lambda x: jnp.repeat(x, self.draft_tree.top_k, 1), frontier)
        draft = expand.grow(
            self.drawing(request, history, params),
            self.draft_tree,
            logits,
            functools.partial(self._feed, params),
            frontier,
            unrolled=True,
        )
        return self.limit(draft, history, memory.known), memory

    def _feed(self, params, frontier, drafted, parents, depth, slot):
        """The states after drafted tokens [B, F], each from its parent's."""
        del slot
        state = jax.tree.map(lambda x: rows(x, parents), frontier)
        return self._advance(params, state, drafted, depth)

    def _advance(self, params, state, drafted, stage):
        return self._network.advance(params.drafter, self.config, state, drafted, stage)

    @property
    def _network(self):
        return _NETWORKS[type(self.config)]

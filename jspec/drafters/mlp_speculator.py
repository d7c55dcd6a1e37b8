"""MLP speculators (arXiv 2404.19124): a recurrent net that starts from one hidden state.

With the root at position r, the net starts from the target's hidden state at r - 1, the last one
that it has computed, and the root. Each stage guesses the token after the one that it reads, so a
chain or a tree grows by feeding drafted tokens. Every node has a state of its own for the round.

See ``jspec.models.heads.mlp_speculator`` and ``jspec.models.heads.arctic`` for the networks,
``jspec.checkpoints.heads.mlp_speculator`` and ``jspec.checkpoints.heads.arctic`` for files,
``training.tasks.mlp_speculator`` for training.
"""

import dataclasses

from jspec.drafters.base.features import FeatureDrafter
from jspec.models.heads import arctic, mlp_speculator
from jspec.models.heads.arctic import LstmSpeculatorConfig, LstmSpeculatorParams
from jspec.models.heads.mlp_speculator import MlpSpeculatorConfig, MlpSpeculatorParams

_NETWORKS = {MlpSpeculatorConfig: mlp_speculator, LstmSpeculatorConfig: arctic}


@dataclasses.dataclass(frozen=True)
class MlpSpeculator(FeatureDrafter):
    """Drafting by an MLP speculator, a chain or any tree.

    ``num_speculative_tokens`` defaults to the speculator's ``n_predict``. If the stages share their
    weights it may be a multiple of that, as in vLLM; otherwise it is at most ``n_predict``.
    """

    knows_depth = True
    maps_vocabulary = False
    weights = (MlpSpeculatorParams, LstmSpeculatorParams)

    config: MlpSpeculatorConfig | LstmSpeculatorConfig

    def _check_depth(self):
        stages = self.config.n_predict
        if self.max_depth > stages and not self.config.tie_weights:
            raise ValueError(
                f"the draft is {self.max_depth} deep, but the speculator has weights for n_predict="
                f"{stages} tokens and its stages share none: num_speculative_tokens must be at "
                f"most {stages}."
            )
        super()._check_depth()

    def _state(self, memory):
        return self._network.start(self.config, memory.hidden[:, None])

    def _advance(self, params, state, drafted, stage):
        state, x = self._network.step(params.drafter, self.config, state, drafted, stage)
        return state, self._network.unembed(params.drafter, x, stage)

    @property
    def _network(self):
        return _NETWORKS[type(self.config)]

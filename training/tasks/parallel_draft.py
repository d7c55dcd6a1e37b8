"""Losses of a draft model that guesses K tokens in one pass: PARD (arXiv 2504.18583).

Guess (a, k) is made by the k-th mask token behind the text's token a, or by that token itself for
k = 0. It stands at position a + k and predicts token a + k + 1.
"""

import dataclasses

import jax.numpy as jnp

from jspec.core.types import Array
from jspec.models import decoder
from jspec.models.decoder import DecoderParams
from training.batches import Batch
from training.forward import head_of, packed_states
from training.linear import LINEARS
from training.losses import parallel
from training.slots import SlotRecipe, Slots, attend_to, choose
from training.task import Frozen, Metrics
from training.tasks.draft_task import DraftTask


@dataclasses.dataclass(frozen=True)
class ParallelDraftTask(DraftTask):
    """A draft model in training to guess behind masks: a ``training.task.Task``."""

    # number of tokens guessed in one pass, and which guesses are trained.
    slots: SlotRecipe = dataclasses.field(default_factory=SlotRecipe)
    mask_token_id: int = 0  # id of the masks

    def __post_init__(self):
        self.slots.check_windows(self.draft.windows)

    def loss(
        self, params: DecoderParams, frozen: Frozen, batch: Batch, key: Array | None
    ) -> tuple[Array, Metrics]:
        """Return ``loss`` and, over the guesses that count, means.

        They are ``next_token_loss`` of the text, ``kl``, and ``accepted_k``, the probability that a
        guess at depth k is accepted.
        """
        batch = self._continued(params, batch, key)
        length = batch.tokens.shape[1] - 1
        slots = choose(self.slots, batch.segments[:, :-1], batch.label_weights, length, 0, key)
        x = self._states(params, batch, slots)
        _, states = packed_states(frozen.target, self.target, batch, self.compute)
        output, linear = head_of(frozen.target), LINEARS[self.compute]
        common = min(self.draft.vocab_size, self.target.vocab_size)
        means = parallel.judge(
            x,
            head_of(params),
            lambda x, head: linear(x, head)[..., :common],
            slots=slots,
            states=states[:, :-1],
            labels=batch.tokens[:, 1:],
            target_logits=lambda states: linear(states, output)[..., :common],
            loss=self.recipe.loss,
            score=self.recipe.values,
        )
        return means["loss"], means

    def _states(self, params: DecoderParams, batch: Batch, slots: Slots) -> Array:
        """Return normed last hidden states [B, M, D] of all guesses."""
        tokens = jnp.where(slots.depths > 0, self.mask_token_id, slots.of_anchors(batch.tokens))
        x, _ = decoder.trunk(
            params,
            self.draft,
            decoder.embed(params, self.draft, tokens),
            slots.of_anchors(batch.positions) + slots.depths,
            attend_to(slots, batch.segments[:, :-1], self.draft.windows),
            linear=LINEARS[self.compute],
            remat=self.remat,
        )
        return self.draft.norm(x, params.norm)

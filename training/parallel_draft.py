"""Distilling a draft model that guesses K tokens in one pass: PARD (arXiv 2504.18583).

Guess (a, k) is made by the k-th of the mask tokens behind the text's token a (by that token itself
where k is 0), which stands at its place, a + k, and is about token a + k + 1.
"""

import dataclasses

import jax
import jax.numpy as jnp

from jspec.core.types import Array
from jspec.models import decoder
from jspec.models.decoder import DecoderParams
from training import guesses
from training.batches import Batch
from training.draft import DraftTask
from training.linear import LINEARS
from training.losses import LOSSES
from training.objective import head_of, packed_states, take
from training.slots import SlotRecipe, Slots, attend_to, choose
from training.task import Frozen, Metrics


@dataclasses.dataclass(frozen=True)
class ParallelDraftTask(DraftTask):
    """A draft model in training to guess behind masks: a ``training.task.Task``.

    Attributes:
      slots: how many tokens it guesses in one pass, and which guesses are trained.
      mask_token_id: of the masks.

    Raises:
      ValueError: a sliding window of the draft model is narrower than a draft is long.
    """

    slots: SlotRecipe = dataclasses.field(default_factory=SlotRecipe)
    mask_token_id: int = 0

    def __post_init__(self):
        self.slots.check_windows(self.draft.windows)

    def loss(
        self, params: DecoderParams, frozen: Frozen, batch: Batch, key: Array | None
    ) -> tuple[Array, Metrics]:
        """See ``Task``. Metrics: ``loss``; and over the guesses that count ``next_token_loss`` of
        the text, ``kl``, and ``accepted_k``, the chance that a guess at depth k is."""
        batch = self._continued(params, batch, key)
        length = batch.tokens.shape[1] - 1
        chosen = choose(self.slots, batch.segments[:, :-1], batch.label_weights, length, 0, key)
        x = self._states(params, batch, chosen)
        _, truth = packed_states(frozen.target, self.target, batch, self.compute)
        output, linear, recipe = head_of(frozen.target), LINEARS[self.compute], self.recipe
        common = min(self.draft.vocab_size, self.target.vocab_size)

        def distribution(truth: Array) -> tuple[Array, Array]:
            log_p = jax.nn.log_softmax(linear(truth, output)[..., :common])
            return log_p, jnp.ones(truth.shape[:-1])

        def score(log_p: Array, log_q: Array, labels: Array) -> dict[str, Array]:
            text = -take(log_q, labels)
            far = LOSSES[recipe.loss](log_p, log_q)
            return {
                "loss": (1 - recipe.text_weight) * far + recipe.text_weight * text,
                "next_token_loss": text,
                "kl": LOSSES["kl"](log_p, log_q),
            }

        means = guesses.judge(
            x,
            head_of(params),
            lambda x, head: linear(x, head)[..., :common],
            slots=chosen,
            truth=truth[:, :-1],
            labels=batch.tokens[:, 1:],
            distribution=distribution,
            score=score,
        )
        return means["loss"], means

    def _states(self, params: DecoderParams, batch: Batch, chosen: Slots) -> Array:
        """Normed last hidden states [B, M, D] of all guesses."""
        tokens = chosen.of_anchors(batch.tokens)
        fed = jnp.where(chosen.depths > 0, self.mask_token_id, tokens)
        positions = chosen.of_anchors(batch.positions) + chosen.depths
        attend = attend_to(chosen, batch.segments[:, :-1], self.draft.windows)
        x, _ = decoder.trunk(
            params,
            self.draft,
            decoder.embed(params, self.draft, fed),
            positions,
            attend,
            linear=LINEARS[self.compute],
            remat=self.remat,
        )
        return self.draft.norm(x, params.norm)

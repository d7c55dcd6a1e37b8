"""Losses of an EAGLE-3 head that guesses K tokens in one pass: P-EAGLE (arXiv 2602.01469).

Guess (a, k) is made at the row of the target's feature f_a and token t_{a+1} for k = 0, else at a
row of the mask token and the learned mask feature. It stands at position a + k and predicts
t_{a+k+2}, the token whose distribution the target computed at position a + k + 1.
"""

import dataclasses

import jax
import jax.numpy as jnp

from jspec.core.types import Array
from jspec.models.heads import eagle
from jspec.models.heads.eagle import EagleParams
from training.batches import Batch
from training.errors import bad_option
from training.forward import head_of
from training.linear import LINEARS
from training.losses import parallel, unrolled
from training.slots import SlotRecipe, Slots, attend_to, choose
from training.task import Frozen, Metrics
from training.tasks.eagle_task import (
    EagleTask,
    Recipe,
    distance,
    inputs_of,
    normed_output,
    states_of,
)

PARALLEL = Recipe(unroll=1, loss="kl")  # as published; one pass has no steps


@dataclasses.dataclass(frozen=True)
class ParallelEagleTask(EagleTask):
    """A P-EAGLE head in training: a ``training.task.Task``."""

    # number of tokens guessed in one pass, and which guesses are trained. The recipe's
    # ``step_decay`` is the weight of a depth relative to the one before.
    slots: SlotRecipe = dataclasses.field(default_factory=SlotRecipe)

    def __post_init__(self):
        super().__post_init__()
        if self.head.mask_token_id is None:
            raise ValueError("the head has no mask token (EagleConfig.mask_token_id); name one.")
        if self.recipe.unroll != 1:
            remedy = "one pass has no steps on its own outputs; take --depths"
            raise bad_option("unroll", self.recipe.unroll, remedy)
        self.slots.check_windows(self.head.network.windows)

    def loss(
        self, params: EagleParams, frozen: Frozen, batch: Batch, key: Array | None
    ) -> tuple[Array, Metrics]:
        """Return ``loss`` and, over guesses that count, ``accepted_k`` = mean sum(min(p, q))."""
        features, normed = states_of(self, frozen, batch)
        length = batch.tokens.shape[1] - 1
        weights = unrolled.guessed_weights(batch)
        slots = choose(self.slots, batch.segments, weights, length, 1, key)
        slots = slots._replace(weights=slots.weights * self.recipe.step_decay**slots.depths)
        output, linear = head_of(frozen.target), LINEARS[self.compute]
        means = parallel.judge(
            self._outputs(params, frozen, batch, features, slots, key),
            {} if params.head is None else {"head": params.head},
            lambda x, matrix: linear(x, matrix.get("head", output)),
            slots=slots,
            states=normed,
            labels=batch.tokens,
            target_logits=lambda states: linear(states, output),
            vocabulary=frozen.draft_to_target,
            loss=self.recipe.loss,
            score=lambda log_p, log_q, _: {"loss": distance(self.recipe, log_p, log_q)},
        )
        return means["loss"], means

    def _outputs(
        self,
        params: EagleParams,
        frozen: Frozen,
        batch: Batch,
        features: tuple[Array, ...],
        slots: Slots,
        key: Array | None,
    ) -> Array:
        """Return the input of the output matrix, [B, M, D], for all guesses."""
        config, linear = self.head, LINEARS[self.compute]
        (size, length), count = batch.tokens[:, 1:].shape, slots.depths.size
        fused, table = inputs_of(self, params, frozen, features, key)
        mask = eagle.mask_feature(params, config, linear=linear)
        masks = jnp.broadcast_to(mask, (size, count - length, config.hidden_size))
        tokens = jnp.pad(
            batch.tokens[:, 1:], ((0, 0), (0, count - length)), constant_values=config.mask_token_id
        )
        attend = attend_to(slots, batch.segments[:, :length], config.network.windows)
        positions = slots.of_anchors(batch.positions) + slots.depths
        run = lambda params, embedded, features: eagle.blocks(
            params, config, embedded, features, positions, attend, linear=linear
        )
        run = jax.checkpoint(run) if self.remat else run
        x = run(params, table[tokens].astype(fused.dtype), jnp.concatenate([fused, masks], 1))
        return normed_output(config, params, x)

"""Distilling an EAGLE-3 head that guesses K tokens in one pass: P-EAGLE (arXiv 2602.01469).

Guess (a, k) is made by the row of the target's feature f_a and token t_{a+1} where k is 0, else by
a row of the mask token and the learned mask feature; it stands at a + k and is about t_{a+k+2}, the
token whose law the target computed at position a + k + 1.
"""

import dataclasses

import jax
import jax.numpy as jnp

from jspec.core.types import Array
from jspec.models import decoder
from jspec.models.heads import eagle
from jspec.models.heads.eagle import EagleParams
from training import ahead, guesses
from training.batches import Batch
from training.eagle import EagleTask, Frozen, Recipe, Taught, noisy, taught_by, top_k_loss
from training.linear import LINEARS
from training.losses import LOSSES
from training.objective import head_of
from training.slots import SlotRecipe, Slots, attend_to, choose
from training.task import Metrics
from training.trainer.settings import bad_option

PARALLEL = Recipe(unroll=1, loss="kl")  # as published; one pass has no steps


@dataclasses.dataclass(frozen=True)
class ParallelEagleTask(EagleTask):
    """A P-EAGLE head in training: a ``training.task.Task``.

    Attributes:
      slots: how many tokens it guesses in one pass, and which guesses are trained. The recipe's
        ``step_decay`` is the weight of a depth relative to the one before.

    Raises:
      ValueError: the head has no mask token, the recipe asks for steps that one pass does not
        have, or a sliding window of the head is narrower than a draft is long.
    """

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
        """See ``Task``. Metrics: ``loss``, and ``accepted_k``: mean sum(min(p, q)) of the guesses
        at depth k that count."""
        taught = taught_by(self, frozen, batch)
        length = batch.tokens.shape[1] - 1
        learned = ahead.guessed_weights(batch)
        chosen = choose(self.slots, batch.segments, learned, length, 1, key)
        chosen = chosen._replace(weights=chosen.weights * self.recipe.step_decay**chosen.depths)
        x = self._states(params, frozen, batch, taught, chosen, key)
        output, linear = head_of(frozen.target), LINEARS[self.compute]
        matrix = {} if params.head is None else {"head": params.head}

        def score(log_p: Array, log_q: Array, labels: Array) -> dict[str, Array]:
            del labels
            value = self.recipe.loss_weight * LOSSES[self.recipe.loss](log_p, log_q)
            if self.recipe.top_k_weight:
                value += self.recipe.top_k_weight * top_k_loss(log_p, log_q)
            return {"loss": value}

        means = guesses.judge(
            x,
            matrix,
            lambda x, matrix: linear(x, matrix.get("head", output)),
            slots=chosen,
            truth=taught.normed,
            labels=batch.tokens,
            distribution=lambda normed: ahead.target_probs(
                linear(normed, output), frozen.draft_to_target, self.recipe.loss
            ),
            score=score,
        )
        return means["loss"], means

    def _states(
        self,
        params: EagleParams,
        frozen: Frozen,
        batch: Batch,
        taught: Taught,
        chosen: Slots,
        key: Array | None,
    ) -> Array:
        """What stands before the output matrix, [B, M, D], for all guesses."""
        config, linear = self.head, LINEARS[self.compute]
        (size, length), count = batch.tokens[:, 1:].shape, chosen.depths.size
        first = noisy(self.recipe, tuple(x[:, :length] for x in taught.features), key)
        fused = eagle.fuse(params, config, first, linear=linear)
        mask = eagle.mask_feature(params, config, linear=linear)
        masks = jnp.broadcast_to(mask, (size, count - length, config.hidden_size))
        tokens = jnp.pad(
            batch.tokens[:, 1:], ((0, 0), (0, count - length)), constant_values=config.mask_token_id
        )
        table = frozen.target.embedding if params.embedding is None else params.embedding
        windows = config.network.windows
        attend = attend_to(chosen, batch.segments[:, :length], windows)
        positions = chosen.of_anchors(batch.positions) + chosen.depths

        def run(params: EagleParams, embedded: Array, features: Array) -> Array:
            return eagle.blocks(
                params, config, embedded, features, positions, attend, linear=linear
            )

        run = jax.checkpoint(run) if self.remat else run
        x = run(params, table[tokens].astype(fused.dtype), jnp.concatenate([fused, masks], 1))
        if params.norm is not None and not config.norm_output:
            x = decoder.rms_norm(x, params.norm, config.network.norm_eps)
        return x

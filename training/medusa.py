"""Training Medusa heads (arXiv 2401.10774): on a frozen target, or together with it.

Head i reads the target's last hidden state h_j, after its norm, and guesses t_{j+2+i}.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from jspec.core.types import Array
from jspec.models.decoder import DecoderConfig, DecoderParams
from jspec.models.heads import medusa
from jspec.models.heads.medusa import MedusaConfig, MedusaParams
from training import ahead
from training.batches import Batch
from training.linear import LINEARS
from training.objective import head_of, mean_by_chunks, packed_states, take
from training.task import Metrics
from training.trainer.settings import bad_option


@dataclasses.dataclass(frozen=True)
class MedusaRecipe:
    """How heads are trained; the defaults are the paper's.

    Attributes:
      medusa_loss: labels (cross-entropy with the text, as published) or a distance from the
        target's law at the guessed token
      head_decay: weight of a head's loss relative to the head before
      heads_weight: of the heads' loss beside the target's own next-token loss (Medusa-2)

    Raises:
      ValueError: a value is out of range.
    """

    medusa_loss: ahead.GuessLoss = "labels"
    head_decay: float = 0.8
    heads_weight: float = 0.2

    def __post_init__(self):
        ahead.check_loss("medusa_loss", self.medusa_loss)
        for name in ("head_decay", "heads_weight"):
            if not 0 <= getattr(self, name) < float("inf"):
                raise bad_option(name, getattr(self, name), "it must be at least 0")


@struct.dataclass
class FrozenTarget:
    """What is not trained.

    Attributes:
      target: the target's weights; those of the start where it is trained too.
      heads: heads to start from, or None for fresh ones.
      draft_to_target: int32 [Vd], ascending, where the heads know only some tokens; else None.
    """

    target: DecoderParams
    heads: MedusaParams | None = None
    draft_to_target: Array | None = None


@struct.dataclass
class JointParams:
    """Weights of Medusa-2: ``target`` is None where it stays frozen (Medusa-1)."""

    heads: MedusaParams
    target: DecoderParams | None = None


@dataclasses.dataclass(frozen=True)
class MedusaTask:
    """Medusa heads in training: a ``training.task.Task``.

    Attributes:
      heads: sizes of the heads.
      target: sizes of the target.
      recipe: losses.
      joint: whether the target is trained too (Medusa-2).
      compute: factors of every matmul, a name in ``linear.LINEARS``.
      remat: whether the backward pass computes the target's blocks again, to save memory.
    """

    heads: MedusaConfig
    target: DecoderConfig
    recipe: MedusaRecipe
    joint: bool = False
    compute: str = "bfloat16"
    remat: bool = False

    def init(self, key: Array, frozen: FrozenTarget) -> JointParams:
        """Heads that say what the target's own output matrix would, or those given."""
        wide = lambda tree: jax.tree.map(lambda x: jnp.array(x, jnp.float32), tree)
        heads = frozen.heads
        if heads is None:
            heads = medusa.init_params(key, self.heads)
            output, kept = head_of(frozen.target), frozen.draft_to_target
            output = output if kept is None else output[:, kept]
            heads = heads.replace(outputs=(output,) * self.heads.num_outputs)
        heads = wide(heads.replace(draft_to_target=None))
        return JointParams(heads, wide(frozen.target) if self.joint else None)

    def loss(
        self, params: JointParams, frozen: FrozenTarget, batch: Batch, key: Array
    ) -> tuple[Array, Metrics]:
        """See ``Task``. Metrics: ``heads_loss``, ``accepted_i`` of head i, and with ``joint`` the
        target's ``next_token_loss``."""
        states = lambda weights: packed_states(
            weights, self.target, batch, self.compute, remat=self.remat
        )[1]
        normed = states(frozen.target if params.target is None else params.target)
        original = normed if params.target is None else states(frozen.target)
        means = self._heads(params.heads, frozen, batch, normed, jax.lax.stop_gradient(original))
        means["heads_loss"] = heads_loss = means.pop("loss")
        if params.target is None:
            return heads_loss, means | {"loss": heads_loss}
        own = self._next_token(params.target, normed, batch)
        loss = own + self.recipe.heads_weight * heads_loss
        return loss, means | {"next_token_loss": own, "loss": loss}

    def _heads(
        self, heads: MedusaParams, frozen: FrozenTarget, batch: Batch, normed: Array, truth: Array
    ) -> Metrics:
        linear = LINEARS[self.compute]
        given = normed[:, :-1].astype(jnp.float32)
        return ahead.teach(
            ahead.align([medusa.stream(blocks, given, linear) for blocks in heads.blocks]),
            heads.outputs,
            loss=self.recipe.medusa_loss,
            decay=self.recipe.head_decay,
            linear=linear,
            target_output=head_of(frozen.target),
            normed=truth,
            batch=batch,
            kept=frozen.draft_to_target,
        )

    def _next_token(self, params: DecoderParams, normed: Array, batch: Batch) -> Array:
        """Cross-entropy of the target itself, weighed by its labels."""
        linear = LINEARS[self.compute]

        def score(x: Array, head: Array, given: Any) -> dict[str, Array]:
            labels, weight = given
            return {"loss": -weight * take(jax.nn.log_softmax(linear(x, head)), labels)}

        given = (batch.tokens[:, 1:], batch.label_weights)
        return mean_by_chunks(score, normed[:, :-1], head_of(params), given)["loss"]

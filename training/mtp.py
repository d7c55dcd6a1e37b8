"""Training modules for later tokens (MTP) on a frozen target.

The modules are unrolled on their own outputs, as they will draft. Step k is run by module k modulo
their number: row i reads what step k - 1 gave out there (at step 0 the target's f_i) and the true
token t_{i+1+k}, and stands at position i + k. It attends to the first rows of its module up to i,
which are those that its cache will hold, and to its own later ones. It guesses t_{i+2+k}.

With one module that is the recursion of FastMTP (arXiv 2509.18362), whose recipe the defaults are;
with as many modules as steps, DeepSeek-V3's own training (arXiv 2412.19437, section 2.2).
"""

import dataclasses
from typing import Literal

import jax
import jax.numpy as jnp

from jspec import ops
from jspec.core.types import Array
from jspec.models.decoder import DecoderConfig
from jspec.models.heads import mtp
from jspec.models.heads.mtp import MtpConfig, MtpParams
from training import ahead
from training.attention import causal
from training.batches import Batch
from training.linear import LINEARS
from training.objective import feature_scale, head_of, packed_states
from training.task import Frozen, Metrics
from training.trainer.settings import bad_option


@dataclasses.dataclass(frozen=True)
class MtpRecipe:
    """How modules are trained.

    Attributes:
      unroll: steps of the modules on their own outputs, S.
      step_decay: weight of a step's loss relative to the one before; the weights add up to 1
      mtp_loss: labels (cross-entropy with the text, as published) or a distance from the target's
        law at the guessed token
      loss_factor: on the whole loss; MaxText trains with 0.1 beside the target's own loss
      through_steps: whether gradients flow from a step into the one before.

    Raises:
      ValueError: a value is out of range.
    """

    unroll: int = 3
    step_decay: float = 0.6
    mtp_loss: ahead.GuessLoss = "labels"
    loss_factor: float = 1.0
    through_steps: bool = True

    def __post_init__(self):
        if self.unroll < 1:
            raise bad_option("unroll", self.unroll, "it must be at least 1")
        if not 0 <= self.step_decay < float("inf"):
            raise bad_option("step_decay", self.step_decay, "it must be at least 0")
        if not 0 < self.loss_factor < float("inf"):
            raise bad_option("loss_factor", self.loss_factor, "it must be above 0")
        ahead.check_loss("mtp_loss", self.mtp_loss)


@dataclasses.dataclass(frozen=True)
class MtpTask:
    """Modules in training: a ``training.task.Task``.

    Attributes:
      modules: their sizes.
      target: sizes of the target.
      recipe: losses and unrolling.
      compute: factors of every matmul, a name in ``linear.LINEARS``.
      fresh: how modules begin that start from nothing, see ``early_exit``.
      remat: whether the backward pass computes the modules again, to save memory.

    Raises:
      ValueError: the modules have experts, through which there is no gradient on every device.
    """

    modules: MtpConfig
    target: DecoderConfig
    recipe: MtpRecipe
    compute: str = "bfloat16"
    fresh: Literal["early_exit", "random"] = "early_exit"
    remat: bool = False

    def __post_init__(self):
        if self.modules.network.moe is not None:
            raise ValueError(
                "modules with experts are not trained yet; those of DeepSeek-V3, GLM-4.5 and "
                "Qwen3-Next draft as they were published"
            )

    def init(self, key: Array, frozen: Frozen) -> MtpParams:
        """First weights."""
        if frozen.start is not None:
            return jax.tree.map(lambda x: jnp.array(x, jnp.float32), frozen.start)
        params = mtp.init_params(key, self.modules)
        return early_exit(params, self.modules, frozen) if self.fresh == "early_exit" else params

    def loss(
        self, params: MtpParams, frozen: Frozen, batch: Batch, key: Array
    ) -> tuple[Array, Metrics]:
        """See ``Task``. Metrics: ``loss``, and ``accepted_k`` = mean sum(min(p, q)) of step k, over
        the rows that count."""
        del key
        _, normed = packed_states(frozen.target, self.target, batch, self.compute)
        normed = jax.lax.stop_gradient(normed)
        recipe, outputs = self.recipe, _unroll(self, params, frozen, batch, normed)
        means = ahead.teach(
            ahead.align(outputs),
            (),
            loss=recipe.mtp_loss,
            decay=recipe.step_decay,
            linear=LINEARS[self.compute],
            target_output=head_of(frozen.target),
            normed=normed,
            batch=batch,
        )
        whole = sum(recipe.step_decay**step for step in range(recipe.unroll))
        loss = recipe.loss_factor / whole * means["loss"]
        return loss, means | {"loss": loss}


def early_exit(params: MtpParams, config: MtpConfig, frozen: Frozen) -> MtpParams:
    """Modules whose blocks are still random, but which hand on what they read of a position.

    So training begins where the target left off, and not at the uniform law.
    """
    size = config.hidden_size
    rows = slice(0, size) if config.hidden_first else slice(size, 2 * size)
    norm = config.network.norm_weight(
        size, jnp.float32, feature_scale(frozen.target, config.network)
    )
    modules = tuple(
        module.replace(
            projection=module.projection.at[rows].add(jnp.eye(size)),
            norm=norm,
        )
        for module in params.modules
    )
    return params.replace(modules=modules)


def _unroll(
    task: MtpTask, params: MtpParams, frozen: Frozen, batch: Batch, normed: Array
) -> list[Array]:
    """What each step gives out [B, T, D], as the output matrix takes it; rows those of step 0."""
    config, linear = task.modules, LINEARS[task.compute]
    length = batch.tokens.shape[1] - 1
    embedded = ops.look_up(frozen.target.embedding, batch.tokens).astype(jnp.float32)
    segments, positions = batch.segments[:, :length], batch.positions[:, :length]

    def step_of(module: int):
        def run(params: MtpParams, tokens: Array, features: Array, positions: Array, kept):
            """One step, and the keys and values ``kept`` of the module with its own behind."""
            kept = list(kept)

            def attend(_, q: Array, k: Array, v: Array) -> Array:
                kept.append((k, v))
                (keys, values), *own = kept
                return causal(q, keys, values, segments=segments, own=own)

            out = mtp.run(
                params, config, module, tokens, features, positions, attend, linear=linear
            )
            return out, kept

        return jax.checkpoint(run) if task.remat else run

    features, outputs = normed[:, :length].astype(jnp.float32), []
    kept: list[list] = [[] for _ in params.layers]
    for step in range(task.recipe.unroll):
        module = step % config.n_predict
        ahead_of = jnp.pad(embedded[:, step + 1 :], ((0, 0), (0, step), (0, 0)))
        features, kept[module] = step_of(module)(
            params, ahead_of, features, positions + step, kept[module]
        )
        outputs.append(mtp.normed(params, config, module, features))
        if not task.recipe.through_steps:
            features = jax.lax.stop_gradient(features)
    return outputs

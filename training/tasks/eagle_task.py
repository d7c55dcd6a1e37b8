"""Losses of EAGLE heads on a frozen target: EAGLE-1, HASS and EAGLE-3.

All three unroll the head on its own outputs, as it drafts (EAGLE-1 takes one step). At step k, row
i reads its own output of step k - 1 (at step 0, the target's f_i) and the true token t_{i+1+k}. It
stands at position i + k and attends to the step-0 rows up to i and to its own later rows. Its loss
compares it with the target at position j = i + 1 + k: with the distribution of t_{j+1} and, for
EAGLE-1 and HASS, with the feature f_j.

HASS computes the same rows in another order (row i + k at pass k). Its first k rows of pass k have
no predicted feature and repeat true ones; they are left out here.
"""

import dataclasses
from typing import Literal

import jax
import jax.numpy as jnp
import optax

from jspec.core.types import Array
from jspec.models.decoder import DecoderConfig, DecoderParams
from jspec.models.heads import eagle
from jspec.models.heads.eagle import EagleConfig, EagleParams
from training.data.batch import Batch
from training.data.features import TaughtBatch
from training.losses import unrolled
from training.losses.chunks import loss_chunk
from training.losses.distances import LOSSES, LossName
from training.losses.guesses import Rows, judge
from training.losses.slots import SlotRecipe, attend_to, choose
from training.networks.forward import Frozen, draft_output, head_of, packed_states
from training.networks.linear import LINEARS
from training.tasks.method import float32
from training.trainer.task import Metrics
from training.util.errors import bad_option, check_choice, check_least

VARIANTS = ("eagle1", "hass", "eagle3")
HASS_TOP_K = 10  # tokens of the target in HASS's extra loss


@dataclasses.dataclass(frozen=True)
class Recipe:
    """Losses of the head; the defaults are the published settings of the variant."""

    unroll: int  # steps of the head on its own outputs, S
    step_decay: float = 1.0  # weight of a step's loss relative to the one before
    # distance between the target's distribution and the head's; tvd, lk and overlap train the
    # probability of acceptance
    loss: LossName = "ce"
    loss_weight: float = 1.0  # weight of that loss
    feature_weight: float = 0.0  # weight of smooth L1 between predicted and true feature
    top_k_weight: float = 0.0  # weight of the cross-entropy over the target's ten likeliest tokens
    # half-width of the uniform noise on the target's features, at 512 tokens a window; it shrinks
    # with longer windows
    noise: float = 0.0
    through_steps: bool = True  # whether gradients flow from a step into the one before

    def __post_init__(self):
        check_least(self, 1, "unroll")
        check_least(self, 0, "step_decay", "loss_weight", "feature_weight", "top_k_weight", "noise")
        if not self.loss_weight + self.feature_weight + self.top_k_weight:
            remedy = "nothing is left to learn; give it or --feature-weight a value above 0"
            raise bad_option("loss_weight", self.loss_weight, remedy)
        check_choice(self, "loss", LOSSES)


PUBLISHED = {
    # arXiv 2401.15077, section 3.2
    "eagle1": Recipe(unroll=1, loss_weight=0.1, feature_weight=1.0, noise=0.1),
    # arXiv 2408.15766, section 3
    "hass": Recipe(
        unroll=3,
        loss_weight=0.1,
        feature_weight=1.0,
        top_k_weight=1.0,
        noise=0.1,
        through_steps=False,
    ),
    # arXiv 2503.01840, section 3.2
    "eagle3": Recipe(unroll=7, step_decay=0.8),
}

PARALLEL = Recipe(unroll=1, loss="kl")  # as published; one pass has no steps


@dataclasses.dataclass(frozen=True)
class EagleTask:
    """An EAGLE head in training: a ``training.trainer.task.Task``."""

    head: EagleConfig  # sizes of the head
    target: DecoderConfig  # sizes of the target
    recipe: Recipe  # losses and unrolling
    compute: str = "bfloat16"
    # how a fresh head begins: "random", or "early_exit", see ``early_exit``.
    start: Literal["early_exit", "random"] = "early_exit"
    remat: bool = False

    def __post_init__(self):
        if self.recipe.feature_weight and self.head.generation == 3:
            remedy = "the output of an EAGLE-3 head is no feature of the target; leave it out"
            raise bad_option("feature_weight", self.recipe.feature_weight, remedy)

    def init(self, key: Array, frozen: Frozen) -> EagleParams:
        """Return initial weights, without the token map of a reduced vocabulary."""
        if frozen.start is not None:
            return float32(frozen.start.replace(draft_to_target=None))
        params = eagle.init_params(key, self.head)
        if self.start == "early_exit":
            params = early_exit(params, self.head, frozen)
        return params.replace(draft_to_target=None)

    def loss(
        self, params: EagleParams, frozen: Frozen, batch: Batch, key: Array | None
    ) -> tuple[Array, Metrics]:
        """Return ``loss`` and, over the rows that count, ``accepted_k`` = mean sum(min(p, q))."""
        features, normed = states_of(self, frozen, batch)
        features, recipe = tuple(x[:, :-1] for x in features), self.recipe
        if key is not None and recipe.noise:
            width = recipe.noise * 512 / features[0].shape[1]
            features = tuple(
                x + jax.random.uniform(k, x.shape, x.dtype, -width, width)
                for x, k in zip(features, jax.random.split(key, len(features)), strict=True)
            )
        fused = eagle.fuse(params, self.head, features, linear=LINEARS[self.compute])
        table = frozen.target.embedding if params.embedding is None else params.embedding

        def values(log_p: Array, log_q: Array, x: Array, normed: Array, _) -> dict[str, Array]:
            value = distance(recipe, log_p, log_q)
            if recipe.feature_weight:
                value += recipe.feature_weight * optax.huber_loss(x, normed[:, :, None]).mean(-1)
            return {"loss": value}

        guesses, rows = self._guesses(params, batch, fused, table, normed, key)
        means = judge(
            normed_output(self.head, params, guesses),
            rows,
            () if params.head is None else (params.head,),
            frozen=frozen,
            linear=LINEARS[self.compute],
            loss=recipe.loss,
            values=values,
        )
        return means["loss"], means

    def _guesses(
        self,
        params: EagleParams,
        batch: Batch,
        fused: Array,
        table: Array,
        normed: Array,
        key: Array | None,
    ) -> tuple[Array, Rows]:
        """Return the head's outputs [B, R, S, D], and the target's R rows beside them.

        ``fused`` are the head's inputs [B, T, D], ``table`` its embeddings [V, D], and ``normed``
        the target's last hidden states [B, T + 1, D].
        """
        config, recipe, linear = self.head, self.recipe, LINEARS[self.compute]
        outputs = unrolled.unroll(
            lambda _, params, *step: eagle.blocks(params, config, *step, linear=linear),
            params,
            table[batch.tokens].astype(fused.dtype),
            fused,
            batch,
            steps=recipe.unroll,
            layers=len(params.layers),
            through_steps=recipe.through_steps,
            remat=self.remat,
            alike=True,
        )
        rows = unrolled.rows_of(normed, batch, recipe.unroll, recipe.step_decay)
        if totals := totals_in(batch):
            log_total, likeliest = (x[:, 1:] for x in totals)
            rows = rows._replace(log_total=log_total, likeliest=likeliest)
        return unrolled.align(outputs), rows


@dataclasses.dataclass(frozen=True)
class ParallelEagleTask(EagleTask):
    """An EAGLE-3 head that learns to guess K tokens in one pass: P-EAGLE (arXiv 2602.01469).

    Guess (a, k) is made at the row of the target's feature f_a and token t_{a+1} for k = 0, else at
    a row of the mask token and the learned mask feature. It stands at position a + k and predicts
    t_{a+k+2}, the token whose distribution the target computed at position a + k + 1.
    """

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

    def _guesses(
        self,
        params: EagleParams,
        batch: Batch,
        fused: Array,
        table: Array,
        normed: Array,
        key: Array | None,
    ) -> tuple[Array, Rows]:
        config, linear = self.head, LINEARS[self.compute]
        size, length = batch.tokens[:, 1:].shape
        weights = unrolled.guessed_weights(batch)
        slots = choose(self.slots, batch.segments, weights, length, 1, key)
        slots = slots._replace(weights=slots.weights * self.recipe.step_decay**slots.depths)
        count = slots.depths.size
        mask = eagle.mask_feature(params, config, linear=linear)
        masks = jnp.broadcast_to(mask, (size, count - length, config.hidden_size))
        tokens = jnp.pad(
            batch.tokens[:, 1:], ((0, 0), (0, count - length)), constant_values=config.mask_token_id
        )
        attend = attend_to(slots, batch.segments[:, :length])
        positions = slots.of_anchors(batch.positions) + slots.depths
        run = lambda params, embedded, features: eagle.blocks(
            params, config, embedded, features, positions, attend, linear=linear
        )
        run = jax.checkpoint(run) if self.remat else run
        x = run(params, table[tokens].astype(fused.dtype), jnp.concatenate([fused, masks], 1))
        labels = jnp.pad(batch.tokens[:, 1:], ((0, 0), (0, 1)))  # 0 behind the last
        return x[:, :, None], slots.rows_of(normed, labels, totals_in(batch))


def early_exit(params: EagleParams, config: EagleConfig, frozen: Frozen) -> EagleParams:
    """Return a head with random blocks whose residual is the deepest feature that it reads.

    Norm, embedding and output matrix are the target's, so training begins near the target's
    distribution and not at the uniform one. The widths must agree; other heads stay unchanged.
    """
    target, size = frozen.target, config.target_hidden_size
    if config.hidden_size != size:
        return params
    params = params.replace(fc=params.fc.at[-size:].add(jnp.eye(size)))
    if params.norm is not None:
        params = params.replace(norm=float32(target.norm))
    if params.embedding is not None:
        params = params.replace(embedding=float32(target.embedding))
    if params.head is not None:
        params = params.replace(head=draft_output(frozen))
    return params


def states_of(task: EagleTask, frozen: Frozen, batch: Batch) -> tuple[tuple[Array, ...], Array]:
    """Return the head's inputs, and the target's last hidden states [B, T + 1, D] after the norm.

    A ``TaughtBatch`` holds them; for other batches the target runs.
    """
    if isinstance(batch, TaughtBatch):
        normed = batch.normed.astype(jnp.float32)
        captured = tuple(jnp.unstack(batch.captured.astype(jnp.float32), axis=2))
    else:
        captured, normed = target_states(task, frozen, batch)
    features = (normed,) if task.head.generation == 1 else captured
    return jax.lax.stop_gradient((features, normed))


def target_states(task: EagleTask, frozen: Frozen, batch: Batch) -> tuple[tuple[Array, ...], Array]:
    """Return the target's hidden states that the head captures, and the last ones after the norm.

    Each is [B, T + 1, D]; only EAGLE-3 heads capture any.
    """
    layers = task.head.capture_layers if task.head.generation == 3 else ()
    return packed_states(frozen.target, task.target, batch, task.compute, capture_layers=layers)


def totals_in(batch: Batch) -> tuple[Array, ...]:
    """Return ``log_total`` and ``likeliest`` [B, T + 1] of a batch; () if it holds none."""
    if not isinstance(batch, TaughtBatch) or batch.log_total is None:
        return ()
    return batch.log_total, batch.likeliest


def totals_of(weights: DecoderParams, normed: Array, compute: str) -> tuple[Array, Array]:
    """Return ``log_total`` and ``likeliest`` of a ``TaughtBatch``, given its normed states."""
    output, linear = head_of(weights), LINEARS[compute]

    def of_row(row: Array) -> tuple[Array, Array]:
        logits = linear(row.astype(jnp.float32), output)
        ids = jnp.arange(logits.shape[-1])
        # ``argmax`` takes XLA's CPU backend several times as long.
        likeliest = jnp.where(logits == logits.max(), ids, ids[-1]).min()
        return jax.nn.logsumexp(logits), likeliest

    rows = normed.reshape(-1, normed.shape[-1])
    totals = jax.lax.map(of_row, rows, batch_size=loss_chunk())
    return tuple(x.reshape(normed.shape[:-1]) for x in totals)


def normed_output(config: EagleConfig, params: EagleParams, x: Array) -> Array:
    """Return the input of the output matrix."""
    if params.norm is None or config.norm_output:
        return x
    return config.network.norm(x, params.norm)


def distance(recipe: Recipe, log_p: Array, log_q: Array) -> Array:
    """Return the weighted distances between distributions [..., V], without the feature loss.

    HASS adds the cross-entropy over the target's likeliest tokens, with p not renormalised (arXiv
    2408.15766).
    """
    value = recipe.loss_weight * LOSSES[recipe.loss](log_p, log_q)
    if recipe.top_k_weight:
        top, ids = jax.lax.top_k(log_p, min(HASS_TOP_K, log_p.shape[-1]))
        ids = jnp.broadcast_to(ids, (*log_q.shape[:-1], ids.shape[-1]))
        top_k_loss = -(jnp.exp(top) * jnp.take_along_axis(log_q, ids, -1)).sum(-1)
        value += recipe.top_k_weight * top_k_loss
    return value

"""Distilling EAGLE heads from a frozen target: EAGLE-1, HASS and EAGLE-3.

All three unroll the head on its own outputs, as it will draft (one step is EAGLE-1). At step k, row
i reads the feature that it gave out at step k - 1 (at step 0, the target's f_i) and the true token
t_{i+1+k}, stands at position i + k, and attends to the step-0 rows up to i and to its own later
ones. It is judged by what the target computed at position j = i + 1 + k: its law of t_{j+1} and,
for EAGLE-1 and HASS, its feature f_j.

HASS writes the same rows in another order (row i + k at pass k), and lets the first k rows of pass
k, which have no predicted feature to read, repeat true ones; here they are left out.
"""

import dataclasses
from typing import Literal

import jax
import jax.numpy as jnp
from flax import struct

from jspec.core.types import Array
from jspec.models import decoder
from jspec.models.decoder import DecoderConfig, DecoderParams
from jspec.models.heads import eagle
from jspec.models.heads.eagle import EagleConfig, EagleParams
from training import ahead
from training.attention import causal
from training.batches import Batch
from training.features import TaughtBatch
from training.linear import LINEARS
from training.losses import LOSSES, LossName
from training.objective import head_of, packed_states
from training.task import Metrics
from training.trainer.settings import bad_option

VARIANTS = ("eagle1", "hass", "eagle3")
HASS_TOP_K = 10  # of the target's tokens, in HASS's extra loss


@dataclasses.dataclass(frozen=True)
class Recipe:
    """What the published variants differ in; ``PUBLISHED`` has their settings.

    Attributes:
      unroll: steps of the head on its own outputs, S.
      step_decay: weight of a step's loss relative to the one before.
      loss: distance between the target's law and the head's; tvd, lk and overlap are made of the
        chance of acceptance itself
      loss_weight: of that loss.
      feature_weight: of smooth L1 between predicted and true feature.
      top_k_weight: of the cross-entropy over the target's ten likeliest tokens.
      noise: half-width of the uniform noise on the target's features, at 512 tokens a window; it
        shrinks with longer windows.
      through_steps: whether gradients flow from a step into the one before.

    Raises:
      ValueError: a value is out of range.
    """

    unroll: int
    step_decay: float = 1.0
    loss: LossName = "ce"
    loss_weight: float = 1.0
    feature_weight: float = 0.0
    top_k_weight: float = 0.0
    noise: float = 0.0
    through_steps: bool = True

    def __post_init__(self):
        if self.unroll < 1:
            raise bad_option("unroll", self.unroll, "it must be at least 1")
        for name in ("step_decay", "loss_weight", "feature_weight", "top_k_weight", "noise"):
            if not 0 <= getattr(self, name) < float("inf"):
                raise bad_option(name, getattr(self, name), "it must be at least 0")
        if not self.loss_weight + self.feature_weight + self.top_k_weight:
            remedy = "nothing is left to learn; give it or --feature-weight a value above 0"
            raise bad_option("loss_weight", self.loss_weight, remedy)
        if self.loss not in LOSSES:
            raise bad_option("loss", self.loss, f"choose one of {', '.join(LOSSES)}")


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


@struct.dataclass
class Frozen:
    """What is not trained.

    Attributes:
      target: the target's weights.
      draft_to_target: int32 [Vd], ascending, where the head knows only some tokens; else None.
      start: a head to start from, or None for a fresh one.
    """

    target: DecoderParams
    draft_to_target: Array | None = None
    start: EagleParams | None = None


@dataclasses.dataclass(frozen=True)
class EagleTask:
    """An EAGLE head in training: a ``training.task.Task``.

    Attributes:
      head: sizes of the head.
      target: sizes of the target.
      recipe: losses and unrolling.
      compute: factors of every matmul, a name in ``linear.LINEARS``.
      start: "early_exit" begins as an early exit of the target, see ``early_exit``; "random" does
        not.
      remat: whether the backward pass computes the head's blocks again, to save memory.
    """

    head: EagleConfig
    target: DecoderConfig
    recipe: Recipe
    compute: str = "bfloat16"
    start: Literal["early_exit", "random"] = "early_exit"
    remat: bool = False

    def __post_init__(self):
        if self.recipe.feature_weight and self.head.generation == 3:
            remedy = "what an EAGLE-3 head gives out is no feature of the target; leave it out"
            raise bad_option("feature_weight", self.recipe.feature_weight, remedy)

    def init(self, key: Array, frozen: Frozen) -> EagleParams:
        """First weights; the mapping of a reduced vocabulary is no weight and stays out."""
        if frozen.start is not None:
            start = frozen.start.replace(draft_to_target=None)
            return jax.tree.map(lambda x: jnp.array(x, jnp.float32), start)
        params = eagle.init_params(key, self.head)
        if self.start == "early_exit":
            params = early_exit(params, self.head, frozen, self.target)
        return params.replace(draft_to_target=None)

    def loss(
        self, params: EagleParams, frozen: Frozen, batch: Batch, key: Array | None
    ) -> tuple[Array, Metrics]:
        """See ``Task``. Metrics: ``loss``, and ``accepted_k`` = mean sum(min(p, q)) of step k, over
        the rows that count."""
        taught = taught_by(self, frozen, batch)
        outputs = _unroll(self, params, frozen, batch, taught, key)
        return _judge(self, params, frozen, batch, taught, outputs)


@struct.dataclass
class Taught:
    """What the target computed: rows 0 to T."""

    features: tuple[Array, ...]  # [B, T + 1, D] each, what the head reads
    normed: Array  # [B, T + 1, D], last hidden states after the norm


def early_exit(
    params: EagleParams, config: EagleConfig, frozen: Frozen, sizes: DecoderConfig
) -> EagleParams:
    """A head whose blocks are still random, but which hands on the deepest feature that it reads.

    The residual starts as that feature, norm and output matrix are the target's, whose ``sizes``
    are given: so training begins where the target's own layer left off, not at the uniform law.
    Only where widths agree.
    """
    target, size = frozen.target, config.target_hidden_size
    if config.hidden_size != size:
        return params
    wide = lambda x: jnp.array(x, jnp.float32)  # a copy: the trained weights are donated
    fc = params.fc.at[-size:].add(jnp.eye(size))
    params = params.replace(fc=fc)
    if params.norm is not None:
        params = params.replace(norm=wide(sizes.norm_factor(target.norm)))
    if params.embedding is not None:
        params = params.replace(embedding=wide(target.embedding))
    if params.head is not None:
        head = wide(head_of(target))
        kept = frozen.draft_to_target
        params = params.replace(head=head if kept is None else head[:, kept])
    return params


def taught_by(task: EagleTask, frozen: Frozen, batch: Batch) -> Taught:
    """What the target computes of a batch, or has computed before."""
    if isinstance(batch, TaughtBatch):
        normed = batch.normed.astype(jnp.float32)
        layers = range(batch.captured.shape[2])
        captured = tuple(batch.captured[:, :, layer].astype(jnp.float32) for layer in layers)
        return Taught((normed,) if task.head.generation == 1 else captured, normed)
    captured, normed = teach(task, frozen, batch)
    features = (normed,) if task.head.generation == 1 else captured
    return jax.lax.stop_gradient(Taught(features, normed))


def teach(task: EagleTask, frozen: Frozen, batch: Batch) -> tuple[tuple[Array, ...], Array]:
    """What the target computes of a batch: hidden states that an EAGLE-3 head reads, () for others,
    and the last ones after the norm, [B, T + 1, D] each."""
    layers = task.head.capture_layers if task.head.generation == 3 else ()
    return packed_states(frozen.target, task.target, batch, task.compute, capture_layers=layers)


def noisy(recipe: Recipe, features: tuple[Array, ...], key: Array | None) -> tuple[Array, ...]:
    """The features [B, T, D] with the recipe's noise; without on held-out text."""
    if key is None or not recipe.noise:
        return features
    width = recipe.noise * 512 / features[0].shape[1]
    keys = jax.random.split(key, len(features))
    return tuple(
        x + jax.random.uniform(k, x.shape, x.dtype, -width, width)
        for x, k in zip(features, keys, strict=True)
    )


def _unroll(
    task: EagleTask,
    params: EagleParams,
    frozen: Frozen,
    batch: Batch,
    taught: Taught,
    key: Array | None,
) -> list[Array]:
    """Outputs f' [B, T, D] of each step, rows in the order of step 0."""
    config, recipe, linear = task.head, task.recipe, LINEARS[task.compute]
    length = batch.tokens.shape[1] - 1
    first = noisy(recipe, tuple(x[:, :length] for x in taught.features), key)
    features = eagle.fuse(params, config, first, linear=linear)
    table = frozen.target.embedding if params.embedding is None else params.embedding
    embedded = table[batch.tokens].astype(features.dtype)
    segments, positions = batch.segments[:, :length], batch.positions[:, :length]
    windows = config.network.windows

    def pass_head(params: EagleParams, tokens: Array, features: Array, positions: Array, kept):
        """One step, and the keys and values ``kept`` a layer with its own behind them."""
        kept = [list(layer) for layer in kept]

        def attend(layer: int, q: Array, k: Array, v: Array) -> Array:
            kept[layer].append((k, v))
            (keys, values), *own = kept[layer]
            window = windows[layer] if windows else None
            return causal(q, keys, values, segments=segments, window=window, own=own)

        out = eagle.blocks(params, config, tokens, features, positions, attend, linear=linear)
        return out, kept

    if task.remat:
        pass_head = jax.checkpoint(pass_head)
    outputs, kept = [], [[] for _ in params.layers]
    for step in range(recipe.unroll):
        tokens_ahead = jnp.pad(embedded[:, step + 1 :], ((0, 0), (0, step), (0, 0)))
        features, kept = pass_head(params, tokens_ahead, features, positions + step, kept)
        outputs.append(features)
        if not recipe.through_steps:
            features = jax.lax.stop_gradient(features)
    return outputs


def _judge(
    task: EagleTask,
    params: EagleParams,
    frozen: Frozen,
    batch: Batch,
    taught: Taught,
    outputs: list[Array],
) -> tuple[Array, Metrics]:
    """Loss and metrics of the outputs of all steps."""
    config, recipe, linear = task.head, task.recipe, LINEARS[task.compute]
    x = ahead.align(outputs)
    if params.norm is not None and not config.norm_output:
        x = decoder.rms_norm(x, params.norm, config.network.norm_eps)
    output = head_of(frozen.target)
    matrix = {} if params.head is None else {"head": params.head}

    def values(log_p: Array, log_q: Array, beside: ahead.Beside) -> Array:
        value = recipe.loss_weight * LOSSES[recipe.loss](log_p, log_q)
        if recipe.top_k_weight:
            value += recipe.top_k_weight * top_k_loss(log_p, log_q)
        if recipe.feature_weight:
            value += recipe.feature_weight * _smooth_l1(beside.x, beside.normed[:, :, None])
        return value

    means = ahead.judge(
        x,
        matrix,
        lambda x, matrix: linear(x, matrix.get("head", output)),
        distribution=lambda normed: ahead.target_probs(
            linear(normed, output), frozen.draft_to_target, recipe.loss
        ),
        values=values,
        normed=taught.normed,
        batch=batch,
        weights=ahead.row_weights(batch, recipe.unroll, recipe.step_decay),
    )
    return means["loss"], means


def top_k_loss(log_p: Array, log_q: Array) -> Array:
    """HASS: cross-entropy over the target's likeliest tokens, p as it is (arXiv 2408.15766)."""
    top, ids = jax.lax.top_k(log_p, min(HASS_TOP_K, log_p.shape[-1]))
    ids = jnp.broadcast_to(ids, (*log_q.shape[:-1], ids.shape[-1]))
    return -(jnp.exp(top) * jnp.take_along_axis(log_q, ids, -1)).sum(-1)


def _smooth_l1(x: Array, y: Array) -> Array:
    """Mean over the last axis of the Huber loss at 1."""
    distance = jnp.abs(x - y)
    return jnp.where(distance < 1, 0.5 * distance**2, distance - 0.5).mean(-1)

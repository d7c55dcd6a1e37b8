"""Distilling DFlash and DSpark heads from a frozen target (arXiv 2602.06036, 2607.05147).

A window holds many blocks at once, each as it will be drafted: an anchor token, masks behind it,
the target's hidden states of everything before the anchor, and no other block. Row d of a block
guesses the token d + 1 places behind the anchor; of DSpark it also reads the true token before it.

Anchors are drawn anew in every step (on held-out text always the same ones) among the tokens that
have something before them and whose next one is learned from. The authors' programs also want the
anchor itself to be learned from, and so never train the draft behind a prompt.
"""

import dataclasses
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax

from jspec.core.types import Array
from jspec.models.decoder import DecoderConfig, DecoderParams
from jspec.models.heads import dflash, dspark
from jspec.models.heads.dflash import DFlashConfig, DFlashParams
from training.batches import Batch
from training.block_attention import over_context
from training.linear import LINEARS
from training.losses import LOSSES, LossName, overlap_of
from training.objective import head_of, loss_chunk, mean_by_chunks, packed_states, places, take
from training.task import Metrics, Ratio, drawing_key
from training.trainer.settings import bad_option

VARIANTS = ("dflash", "dspark")


@dataclasses.dataclass(frozen=True)
class Recipe:
    """What the published variants differ in; ``PUBLISHED`` has their settings.

    Attributes:
      anchors: blocks of a window, at most
      label_weight: of the cross-entropy with the text
      loss: distance between the target's law and the head's
      loss_weight: of that distance
      confidence_weight: of the cross-entropy between guessed and true chance of acceptance (dspark)
      weighing: of a block's rows: decay (by place) or dpace (by how far a draft is expected to
        reach, and how much of it hangs on that row)
      gamma: rows after which the weight has fallen to 1/e (decay; 0: all weigh the same)
      dpace_alpha: what is added to chances so that late rows are learned from, too (dpace)

    Raises:
      ValueError: a value is out of range.
    """

    anchors: int = 512
    label_weight: float = 1.0
    loss: LossName = "tvd"
    loss_weight: float = 0.0
    confidence_weight: float = 0.0
    weighing: Literal["decay", "dpace"] = "decay"
    gamma: float = 7.0
    dpace_alpha: float = 0.5

    def __post_init__(self):
        if self.anchors < 1:
            raise bad_option("anchors", self.anchors, "it must be at least 1")
        for name in ("label_weight", "loss_weight", "confidence_weight", "gamma"):
            if not 0 <= getattr(self, name) < float("inf"):
                raise bad_option(name, getattr(self, name), "it must be at least 0")
        if not self.label_weight + self.loss_weight:
            raise bad_option("label_weight", 0.0, "give it or --loss-weight a value above 0")
        if not 0 <= self.dpace_alpha <= 1:
            raise bad_option("dpace_alpha", self.dpace_alpha, "take 0 to 1")
        if self.loss not in LOSSES:
            raise bad_option("loss", self.loss, f"choose one of {', '.join(LOSSES)}")

    @property
    def needs_distribution(self) -> bool:
        """Whether the target's law is looked at."""
        return self.loss_weight > 0 or self.confidence_weight > 0


PUBLISHED = {
    # arXiv 2602.06036; the decay is that of SpecForge's recipe for blocks of 16
    "dflash": Recipe(),
    # arXiv 2607.05147; the L1 distance of SpecForge's recipe is twice the total variation
    "dspark": Recipe(label_weight=0.1, loss_weight=1.8, confidence_weight=1.0, gamma=4.0),
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
    start: DFlashParams | None = None


@struct.dataclass
class Blocks:
    """The blocks of a batch, A a window and K guesses each.

    Attributes:
      anchors: int32 [B, A], places in the window, ascending; 0 where there are too few.
      labels: int32 [B, A, K], the tokens to be guessed.
      before: int32 [B, A, K], the token before each.
      weights: float32 [B, A, K]: of the labels, 0 from the first on that does not count.
    """

    anchors: Array
    labels: Array
    before: Array
    weights: Array


@dataclasses.dataclass(frozen=True)
class DFlashTask:
    """A DFlash or DSpark head in training: a ``training.task.Task``.

    Attributes:
      head: sizes of the head.
      target: sizes of the target.
      recipe: losses and blocks.
      compute: factors of every matmul, a name in ``linear.LINEARS``.
      remat: whether the backward pass computes the head's blocks again, to save memory.
    """

    head: DFlashConfig
    target: DecoderConfig
    recipe: Recipe
    compute: str = "bfloat16"
    remat: bool = False

    def init(self, key: Array, frozen: Frozen) -> DFlashParams:
        """First weights; an output matrix of the head's own begins as the target's."""
        wide = lambda tree: jax.tree.map(lambda x: jnp.array(x, jnp.float32), tree)
        if frozen.start is not None:
            return wide(frozen.start.replace(draft_to_target=None))
        params = dflash.init_params(key, self.head).replace(draft_to_target=None)
        if params.head is None:
            return params
        output, kept = head_of(frozen.target), frozen.draft_to_target
        return params.replace(head=wide(output if kept is None else output[:, kept]))

    def loss(
        self, params: DFlashParams, frozen: Frozen, batch: Batch, key: Array | None
    ) -> tuple[Array, Metrics]:
        """See ``Task``: means over all blocks, of what is divided by all that its rows could weigh.

        Metrics, as ``Ratio`` over the rows that count: ``likely_d``, the probability of the label
        at row d; where the target's law is looked at, also ``accepted_d`` = mean sum(min(p, q)).
        """
        captured, normed = jax.lax.stop_gradient(
            packed_states(
                frozen.target,
                self.target,
                batch,
                self.compute,
                capture_layers=self.head.capture_layers,
            )
        )
        blocks = pick(batch, key, self.recipe.anchors, self.head.max_depth)
        hidden = _fill_in(self, params, frozen, batch, captured, blocks)
        return _judge(self, params, frozen, normed, blocks, hidden)


def pick(batch: Batch, key: Array | None, anchors: int, depth: int) -> Blocks:
    """Draws the blocks of every window."""
    length = batch.tokens.shape[1] - 1
    candidate = (batch.label_weights > 0) & (batch.positions[:, :-1] > 0)
    noise = jax.random.uniform(drawing_key(key), candidate.shape)
    heights, drawn = lax.top_k(jnp.where(candidate, noise, -1), min(anchors, length))
    drawn = jnp.sort(jnp.where(heights >= 0, drawn, length))
    there, drawn = drawn < length, jnp.where(drawn < length, drawn, 0)
    index = drawn[..., None] + jnp.arange(depth + 1)
    flat = index.reshape(len(index), -1)
    row = lambda x: jnp.take_along_axis(x, flat, 1, mode="clip").reshape(index.shape)
    segments, tokens, weights = row(batch.segments), row(batch.tokens), row(batch.weights)[..., 1:]
    inside = (index[..., 1:] <= length) & (segments[..., 1:] == segments[..., :1])
    counts = jnp.cumprod((inside & (weights > 0) & there[..., None]).astype(weights.dtype), -1)
    return Blocks(drawn, tokens[..., 1:], tokens[..., :-1], weights * counts)


def _fill_in(
    task: DFlashTask,
    params: DFlashParams,
    frozen: Frozen,
    batch: Batch,
    captured: tuple[Array, ...],
    blocks: Blocks,
) -> Array:
    """What the rows of all blocks give out, [B, A, K, D]."""
    config, linear, slots = task.head, LINEARS[task.compute], task.head.block_size
    count = blocks.anchors.shape
    masks = jnp.full((*count, slots - 1), config.mask_token)
    tokens = jnp.concatenate([blocks.before[..., :1], masks], -1).reshape(count[0], -1)
    at_anchor = jnp.take_along_axis(batch.positions, blocks.anchors, 1)
    positions = (at_anchor[..., None] + jnp.arange(slots)).reshape(tokens.shape)

    def run(params: DFlashParams) -> Array:
        context = dflash.fuse(params, config, captured, linear=linear)
        entries = dflash.inject(params, config, context, batch.positions, linear=linear)
        table = frozen.target.embedding if params.embedding is None else params.embedding

        def attend(layer: int, q: Array, k: Array, v: Array) -> Array:
            windows = config.network.windows
            return over_context(
                q,
                k,
                v,
                entries[layer].k,
                entries[layer].v,
                blocks.anchors,
                batch.segments,
                causal=dflash.is_causal(config, layer),
                window=windows[layer] if windows else None,
            )

        embedded = table[tokens].astype(context.dtype)
        return dflash.blocks(params, config, embedded, positions, attend, linear=linear)

    hidden = (jax.checkpoint(run) if task.remat else run)(params)
    return hidden.reshape(*count, slots, -1)[:, :, slots - config.max_depth :]


def _judge(
    task: DFlashTask,
    params: DFlashParams,
    frozen: Frozen,
    normed: Array,
    blocks: Blocks,
    hidden: Array,
) -> tuple[Array, Metrics]:
    recipe, config, linear = task.recipe, task.head, LINEARS[task.compute]
    depth, kept, output = config.max_depth, frozen.draft_to_target, head_of(frozen.target)

    def distribution_at(anchors: Array) -> Array:
        """The target's log-probabilities [B, a, K, Vd] of what is guessed, not renormalised."""
        rows = (anchors[..., None] + jnp.arange(depth)).reshape(len(anchors), -1, 1)
        truth = jnp.take_along_axis(normed, rows, 1, mode="clip")
        log_p = jax.nn.log_softmax(linear(truth, output))
        log_p = log_p if kept is None else log_p[..., kept]
        return log_p.reshape(*anchors.shape, depth, -1)

    def score(x: Array, weights: Any, given: Any) -> dict[str, Array]:
        head, spark = weights
        anchors, labels, before, counts = given
        log_q = jax.nn.log_softmax(
            linear(x, output if head is None else head) + _bias(config, spark, x, before, linear)
        )
        place, known = places(labels, kept)
        likely = take(log_q, place)
        value, found = -recipe.label_weight * known * likely, {"likely": known * jnp.exp(likely)}
        if recipe.needs_distribution:
            log_p = distribution_at(anchors)
            found["accepted"] = chance = lax.stop_gradient(overlap_of(log_p, log_q))
            value += recipe.loss_weight * LOSSES[recipe.loss](log_p, log_q)
            if recipe.confidence_weight and config.spark and config.spark.confidence:
                guess = dspark.confidence(spark, config.spark, x, before, linear=linear)
                value += recipe.confidence_weight * (jax.nn.softplus(guess) - chance * guess)
        share = row_weights(recipe, lax.stop_gradient(found["likely"]), counts)
        means, there = {"loss": (counts * share * value).sum(-1)}, (counts > 0).astype(x.dtype)
        for name, rows in found.items():
            rows = lax.stop_gradient(there * rows)
            means |= {f"{name}_{row}": rows[..., row] for row in range(depth)}
        return means | {f"rows_{row}": there[..., row] for row in range(depth)}

    given = lax.stop_gradient((blocks.anchors, blocks.labels, blocks.before, blocks.weights))
    means = mean_by_chunks(
        score, hidden, (params.head, params.spark), given, rows=max(loss_chunk() // depth, 1)
    )
    for row in range(depth):
        count = means.pop(f"rows_{row}")
        for name in ("likely", "accepted") if recipe.needs_distribution else ("likely",):
            means[f"{name}_{row}"] = Ratio(means[f"{name}_{row}"], count)
    return means["loss"], means


def _bias(config: DFlashConfig, spark: Any, x: Array, before: Array, linear) -> Array:
    """What DSpark adds to the logits of rows x [B, a, K, D], [B, a, K, Vd or 1]."""
    if config.spark is None:
        return jnp.zeros((1,))
    state = dspark.start(config.spark, 1, x.dtype)
    state = jnp.broadcast_to(state, (*x.shape[:2], state.shape[-1]))
    if not state.shape[-1]:  # no state to hand on: all rows at once
        state = jnp.broadcast_to(state[:, :, None], (*x.shape[:3], 0))
        return dspark.advance(spark, config.spark, state, x, before, linear=linear)[1]
    found = []
    for row in range(x.shape[2]):
        state, bias = dspark.advance(
            spark, config.spark, state, x[:, :, row], before[..., row], linear=linear
        )
        found.append(bias)
    return jnp.stack(found, 2)


def row_weights(recipe: Recipe, likely: Array, counts: Array) -> Array:
    """Weights of a block's rows that add up to at most 1, from how likely each label is [..., K].

    D-PACE weighs a row by the chance that a draft reaches it and all that hangs on it: suffix sums
    of the products of smoothed chances. Rows of which ``counts`` is 0 are passed over.
    """
    depth = likely.shape[-1]
    if recipe.weighing == "decay":
        rate = 1 / recipe.gamma if recipe.gamma else 0.0
        weights = jnp.exp(-rate * jnp.arange(depth))
        return weights / weights.sum()
    there = counts > 0
    smooth = (1 - recipe.dpace_alpha) * likely + recipe.dpace_alpha
    reached = jnp.cumprod(jnp.where(there, smooth, 1), -1) * there
    return jnp.cumsum(reached[..., ::-1], -1)[..., ::-1] / (depth * (depth + 1) / 2)

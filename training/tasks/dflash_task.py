"""Losses of DFlash and DSpark heads on a frozen target (arXiv 2602.06036, 2607.05147).

A window holds many blocks at once, each as it will be drafted: an anchor token, masks behind it,
the target's hidden states of everything before the anchor, and no other block. Row d of a block
predicts the token d + 1 positions behind the anchor; a DSpark row also reads the true token before.

Every step draws new anchors (held-out text always has the same ones) among the tokens that have
something before them and whose next token has a weight. The authors' programs also require a weight
of the anchor itself, and so never train the draft behind a prompt.
"""

import dataclasses
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax

from jspec.core.types import Array
from jspec.models.decoder import DecoderConfig
from jspec.models.heads import dflash, dspark
from jspec.models.heads.dflash import DFlashConfig, DFlashParams
from training.batches import Batch
from training.block_attention import over_context
from training.errors import bad_option, check_choice, check_each, check_least
from training.forward import draft_output, head_of, packed_states
from training.linear import LINEARS
from training.losses.chunks import columns, loss_chunk, mean_by_chunks, take
from training.losses.distances import LOSSES, LossName, overlap_of
from training.task import Frozen, Metrics, Ratio, drawing_key
from training.tasks.method import float32

VARIANTS = ("dflash", "dspark")


@dataclasses.dataclass(frozen=True)
class Recipe:
    """Losses and blocks; the defaults are the published settings of the variant."""

    anchors: int = 512  # maximum number of blocks of a window
    label_weight: float = 1.0  # weight of the cross-entropy with the text
    loss: LossName = "tvd"  # distance between the target's distribution and the head's
    loss_weight: float = 0.0  # weight of that distance
    # weight of the cross-entropy between guessed and true probability of acceptance (dspark)
    confidence_weight: float = 0.0
    # weights of a block's rows: decay (by position) or dpace (by the expected gain of accepting the
    # row)
    weighing: Literal["decay", "dpace"] = "decay"
    gamma: float = 7.0  # rows after which the weight falls to 1/e (decay; 0: all weigh the same)
    # smoothing of probabilities towards 1, so that late rows are trained too (dpace)
    dpace_alpha: float = 0.5

    def __post_init__(self):
        check_least(self, 1, "anchors")
        check_least(self, 0, "label_weight", "loss_weight", "confidence_weight", "gamma")
        if not self.label_weight + self.loss_weight:
            raise bad_option("label_weight", 0.0, "give it or --loss-weight a value above 0")
        check_each(self, ["dpace_alpha"], lambda x: 0 <= x <= 1, "take 0 to 1")
        check_choice(self, "loss", LOSSES)

    @property
    def needs_distribution(self) -> bool:
        """True if the target's distribution is needed."""
        return self.loss_weight > 0 or self.confidence_weight > 0


PUBLISHED = {
    # arXiv 2602.06036; the decay is that of SpecForge's recipe for blocks of 16
    "dflash": Recipe(),
    # arXiv 2607.05147; the L1 distance of SpecForge's recipe is twice the total variation
    "dspark": Recipe(label_weight=0.1, loss_weight=1.8, confidence_weight=1.0, gamma=4.0),
}


@struct.dataclass
class Blocks:
    """The blocks of a batch, A a window and K guesses each."""

    anchors: Array  # int32 [B, A], positions in the window, ascending; 0 for missing blocks
    labels: Array  # int32 [B, A, K], the tokens to guess
    before: Array  # int32 [B, A, K], the token before each
    weights: Array  # float32 [B, A, K], of labels: 0 from the first label on that does not count


@dataclasses.dataclass(frozen=True)
class DFlashTask:
    """A DFlash or DSpark head in training: a ``training.task.Task``."""

    head: DFlashConfig  # sizes of the head
    target: DecoderConfig  # sizes of the target
    recipe: Recipe  # losses and blocks
    compute: str = "bfloat16"
    remat: bool = False

    def init(self, key: Array, frozen: Frozen) -> DFlashParams:
        """Return initial weights; a separate output matrix begins as the target's."""
        if frozen.start is not None:
            return float32(frozen.start.replace(draft_to_target=None))
        params = dflash.init_params(key, self.head).replace(draft_to_target=None)
        return params if params.head is None else params.replace(head=draft_output(frozen))

    def loss(
        self, params: DFlashParams, frozen: Frozen, batch: Batch, key: Array | None
    ) -> tuple[Array, Metrics]:
        """Return means over all blocks.

        Metrics, as ``Ratio`` over the rows that count: ``likely_d``, the probability of the label
        at row d, and ``accepted_d`` = mean sum(min(p, q)) if the target's distribution is needed.
        """
        layers = self.head.capture_layers
        captured, normed = lax.stop_gradient(
            packed_states(frozen.target, self.target, batch, self.compute, capture_layers=layers)
        )
        blocks = draw_blocks(batch, key, self.recipe.anchors, self.head.max_depth)
        hidden = _hidden(self, params, frozen, batch, captured, blocks)
        return _judge(self, params, frozen, normed, blocks, hidden)


def draw_blocks(batch: Batch, key: Array | None, anchors: int, depth: int) -> Blocks:
    """Draw the blocks of every window."""
    length = batch.tokens.shape[1] - 1
    candidate = (batch.label_weights > 0) & (batch.positions[:, :-1] > 0)
    noise = jax.random.uniform(drawing_key(key), candidate.shape)
    heights, drawn = lax.top_k(jnp.where(candidate, noise, -1), min(anchors, length))
    drawn = jnp.sort(jnp.where(heights >= 0, drawn, length))
    valid, drawn = drawn < length, jnp.where(drawn < length, drawn, 0)
    index = drawn[..., None] + jnp.arange(depth + 1)
    flat = index.reshape(len(index), -1)
    row = lambda x: jnp.take_along_axis(x, flat, 1, mode="clip").reshape(index.shape)
    segments, tokens, weights = row(batch.segments), row(batch.tokens), row(batch.weights)[..., 1:]
    inside = (index[..., 1:] <= length) & (segments[..., 1:] == segments[..., :1])
    counts = jnp.cumprod((inside & (weights > 0) & valid[..., None]).astype(weights.dtype), -1)
    return Blocks(drawn, tokens[..., 1:], tokens[..., :-1], weights * counts)


def _hidden(
    task: DFlashTask,
    params: DFlashParams,
    frozen: Frozen,
    batch: Batch,
    captured: tuple[Array, ...],
    blocks: Blocks,
) -> Array:
    """Return the hidden states of the rows of all blocks, [B, A, K, D]."""
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
            windows, entry = config.network.windows, entries[layer]
            where = (entry.k, entry.v, blocks.anchors, batch.segments)
            causal = dflash.is_causal(config, layer)
            window = windows[layer] if windows else None
            return over_context(q, k, v, *where, causal=causal, window=window)

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
    depth, vocabulary, output = config.max_depth, frozen.draft_to_target, head_of(frozen.target)

    def distribution_at(anchors: Array) -> Array:
        """Return the target's log p [B, a, K, Vd] of the guessed tokens, not renormalised."""
        rows = (anchors[..., None] + jnp.arange(depth)).reshape(len(anchors), -1, 1)
        states = jnp.take_along_axis(normed, rows, 1, mode="clip")
        log_p = jax.nn.log_softmax(linear(states, output))
        log_p = log_p if vocabulary is None else log_p[..., vocabulary]
        return log_p.reshape(*anchors.shape, depth, -1)

    def score(x: Array, weights: Any, fixed: Any) -> Metrics:
        head, spark = weights
        anchors, labels, before, counts = fixed
        logits = linear(x, output if head is None else head)
        log_q = jax.nn.log_softmax(logits + _bias(config, spark, x, before, linear))
        column, known = columns(labels, vocabulary)
        likely = take(log_q, column)
        value, rows = -recipe.label_weight * known * likely, {"likely": known * jnp.exp(likely)}
        if recipe.needs_distribution:
            log_p = distribution_at(anchors)
            rows["accepted"] = alpha = lax.stop_gradient(overlap_of(log_p, log_q))
            value += recipe.loss_weight * LOSSES[recipe.loss](log_p, log_q)
            if recipe.confidence_weight and config.spark and config.spark.confidence:
                guess = dspark.confidence(spark, config.spark, x, before, linear=linear)
                value += recipe.confidence_weight * (jax.nn.softplus(guess) - alpha * guess)
        share = row_weights(recipe, lax.stop_gradient(rows["likely"]), counts)
        means, valid = {"loss": (counts * share * value).sum(-1)}, (counts > 0).astype(x.dtype)
        for name, metric in rows.items():
            metric = lax.stop_gradient(valid * metric)
            for row in range(depth):
                means[f"{name}_{row}"] = Ratio(metric[..., row], valid[..., row])
        return means

    fixed = lax.stop_gradient((blocks.anchors, blocks.labels, blocks.before, blocks.weights))
    weights, rows = (params.head, params.spark), max(loss_chunk() // depth, 1)
    means = mean_by_chunks(score, hidden, weights, fixed, rows=rows)
    return means["loss"], means


def _bias(config: DFlashConfig, spark: Any, x: Array, before: Array, linear) -> Array:
    """Return DSpark's addition to the logits of rows x [B, a, K, D], [B, a, K, Vd or 1]."""
    if config.spark is None:
        return jnp.zeros((1,))
    advance = lambda *arrays: dspark.advance(spark, config.spark, *arrays, linear=linear)
    state = dspark.start(config.spark, 1, x.dtype)
    state = jnp.broadcast_to(state, (*x.shape[:2], state.shape[-1]))
    if not state.shape[-1]:  # without a recurrent state all rows run at once
        state = jnp.broadcast_to(state[:, :, None], (*x.shape[:3], 0))
        return advance(state, x, before)[1]
    biases = []
    for row in range(x.shape[2]):
        state, bias = advance(state, x[:, :, row], before[..., row])
        biases.append(bias)
    return jnp.stack(biases, 2)


def row_weights(recipe: Recipe, likely: Array, counts: Array) -> Array:
    """Return weights [..., K] of a block's rows; their sum is at most 1.

    D-PACE weights row d by the expected number of accepted tokens from d on: suffix sums of the
    products of smoothed label probabilities [..., K]. It passes over labels with ``counts`` 0.
    """
    depth = likely.shape[-1]
    if recipe.weighing == "decay":
        rate = 1 / recipe.gamma if recipe.gamma else 0.0
        weights = jnp.exp(-rate * jnp.arange(depth))
        return weights / weights.sum()
    valid = counts > 0
    smooth = (1 - recipe.dpace_alpha) * likely + recipe.dpace_alpha
    reached = jnp.cumprod(jnp.where(valid, smooth, 1), -1) * valid
    return jnp.cumsum(reached[..., ::-1], -1)[..., ::-1] / (depth * (depth + 1) / 2)

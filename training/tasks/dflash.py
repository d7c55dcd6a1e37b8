"""The method ``dflash``: DFlash and DSpark heads (arXiv 2602.06036, 2607.05147).

A window holds many blocks at once, each as it will be drafted: an anchor token, masks behind it,
the target's hidden states of everything before the anchor, and no other block. Row d of a block
predicts the token d + 1 positions behind the anchor; a DSpark row also reads the true token before.

Every step draws new anchors (held-out text always has the same ones) among the tokens that have
something before them and whose next token has a weight. The authors' programs also require a weight
of the anchor itself, and so never train the draft behind a prompt. Drafter:
``jspec.drafters.dflash``.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax

from jspec.checkpoints import loading
from jspec.checkpoints.heads.dflash import default_capture_layers
from jspec.checkpoints.loading import LoadedModel
from jspec.core.types import Array
from jspec.drafters.dflash import DFlash, DSpark
from jspec.models.decoder import DecoderConfig
from jspec.models.heads import dflash, dspark
from jspec.models.heads.dflash import DFlashConfig, DFlashParams
from jspec.models.heads.dspark import SparkConfig
from training.data.batch import Batch
from training.data.settings import Data
from training.export import DFlashFormat
from training.losses.chunks import columns, loss_chunk, mean_by_chunks, take
from training.losses.distances import LOSSES, LossName, overlap_of
from training.networks.attention import over_context
from training.networks.forward import Frozen, draft_output, head_of, packed_states
from training.networks.linear import LINEARS
from training.tasks import method
from training.trainer.task import Metrics, Ratio, drawing_key
from training.util.errors import bad_option, check_choice, check_each, check_least

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
    """A DFlash or DSpark head in training: a ``training.trainer.task.Task``."""

    head: DFlashConfig  # sizes of the head
    target: DecoderConfig  # sizes of the target
    recipe: Recipe  # losses and blocks
    compute: str = "bfloat16"
    remat: bool = False

    def init(self, key: Array, frozen: Frozen) -> DFlashParams:
        """Return initial weights; a separate output matrix begins as the target's."""
        if frozen.start is not None:
            return method.float32(frozen.start.replace(draft_to_target=None))
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

        def attend(layer: int, q: Array, k: Array, v: Array, window: int | None = None) -> Array:
            return over_context(
                q,
                k,
                v,
                entries[layer].k,
                entries[layer].v,
                blocks.anchors,
                batch.segments,
                causal=dflash.is_causal(config, layer),
                window=window,
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


_DRAFTERS = {"dflash": DFlash, "dspark": DSpark}


@dataclasses.dataclass(frozen=True)
class HeadSettings:
    """The network of the head; other sizes are the target's."""

    block_size: int = 16  # slots of a block, including the root's
    head_layers: int = 5  # blocks of the network
    # hidden states of the target that the head reads, as Hugging Face counts them (default: one for
    # each layer of the head, spread evenly)
    capture_layers: tuple[int, ...] = ()
    # id in the slots to be filled in, which texts must not hold (default: the last one that the
    # data does not hold)
    mask_token: int = -1
    intermediate_size: int = 0  # width of the feed-forward (0: as in the target)
    draft_vocab_size: int = 0  # size of the head's vocabulary, the data's most frequent (0: all)
    # how a DSpark head reads the previous token
    markov: Literal["vanilla", "gated", "rnn"] = "vanilla"
    markov_rank: int = 256  # width of that token's vector (0: it is not read)
    head: str = ""  # folder of a head to start from, which then decides all of the above

    def __post_init__(self):
        check_least(self, 2, "block_size")
        check_least(self, 1, "head_layers")
        check_least(self, 0, "intermediate_size", "draft_vocab_size", "markov_rank")
        check_least(self, -1, "mask_token")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings(method.DistillSettings):
    """One run; every field, and every field of its parts, is an option of the command line."""

    head: HeadSettings
    recipe: Recipe
    variant: Literal["dflash", "dspark"] = "dflash"  # dflash or dspark; decides the defaults
    # layout of the exported head: dflash (the authors') or dflash-speculators
    format: DFlashFormat = "dflash"

    def __post_init__(self):
        super().__post_init__()
        deepest = self.head.block_size - (self.variant == "dflash")
        if not self.head.head and self.depth > deepest:
            remedy = f"a block of --block-size {self.head.block_size} drafts {deepest} tokens"
            raise bad_option("num_speculative_tokens", self.depth, remedy)
        if not self.head.head:  # no block begins at the first token
            method.check_length(self, deepest + 1, f"--block-size {self.head.block_size}")
        if self.format == "dflash" and self.head.draft_vocab_size:
            remedy = "the authors' layout knows all tokens; take --format dflash-speculators"
            raise bad_option("draft_vocab_size", self.head.draft_vocab_size, remedy)

    def idle(self) -> dict[str, dict[str, str]]:
        """See ``DistillSettings``."""
        head = method.decided(self.head, "head")
        if not self.head.markov_rank:
            head["markov"] = "--markov-rank 0 reads no previous token; leave it out"
        recipe, weighing = {}, self.recipe.weighing
        unused = "gamma" if weighing == "dpace" else "dpace_alpha"
        recipe[unused] = f"--weighing {weighing} does not use it; leave it out"
        if not self.recipe.loss_weight:
            recipe["loss"] = "it weighs nothing: give --loss-weight too"
        if self.variant == "dflash":
            remedy = "only dspark heads have it; leave it out"
            head |= dict.fromkeys(("markov", "markov_rank"), remedy)
            remedy = "only dspark heads guess the probability of acceptance; leave it out"
            recipe["confidence_weight"] = remedy
        return super().idle() | {"head": head, "recipe": recipe}


# Rate, schedule, warm-up and clipping of SpecForge's recipes; the numbers of steps are ours.
_TRAINER = dataclasses.replace(
    method.HEADS, steps=100_000, accumulate=8, learning_rate=6e-4, warmup=4000
)
_HEADS = {"dflash": HeadSettings(), "dspark": HeadSettings(block_size=7)}


def defaults(argv: Sequence[str]) -> dict[str, Any]:
    """Return the published settings of the variant."""
    variant = method.variant_of(argv, VARIANTS, Settings.variant)
    parts = {"head": _HEADS[variant], "recipe": PUBLISHED[variant]}
    return parts | {"trainer": _TRAINER, "variant": variant}


def head_config(
    head: HeadSettings, variant: str, target: DecoderConfig, mask: int, confidence: bool
) -> DFlashConfig:
    """Return the sizes of the head."""
    network = method.plain_network(target, head, head.head_layers, qk_norm=True)
    spark = None
    if variant == "dspark":
        reads_token = confidence and head.markov_rank > 0
        spark = SparkConfig(head.markov_rank, head.markov, confidence, reads_token)
    published = default_capture_layers(target.num_layers, head.head_layers)
    captured = method.capture_layers(head.capture_layers, published, target.num_layers, first=1)
    return DFlashConfig(
        network=network,
        capture_layers=captured,
        target_hidden_size=target.hidden_size,
        target_vocab_size=target.vocab_size,
        block_size=head.block_size,
        mask_token=mask,
        from_anchor=spark is not None,
        separate_head=network.vocab_size != target.vocab_size,
        spark=spark,
    )


def build(settings: Settings, target: LoadedModel, data: Data) -> method.Build:
    """Prepare a run; see ``Method``."""
    config, start, vocabulary = _head(settings, target, data)
    return method.head_build(
        settings,
        target,
        config,
        start,
        DFlashTask,
        _DRAFTERS[settings.variant],
        identity={"variant": settings.variant},
        vocabulary=vocabulary,
        format=settings.format,
    )


def _head(settings: Settings, target: LoadedModel, data: Data):
    """Return the sizes of the head, initial weights or None, and its vocabulary or None."""
    folder, sizes, weight = settings.head.head, target.config, settings.recipe.confidence_weight
    if not folder:
        mask = method.mask_token(settings.head.mask_token, data, sizes.vocab_size)
        config = head_config(settings.head, settings.variant, sizes, mask, weight > 0)
        return config, None, method.frequent_tokens(data, config.vocab_size, sizes.vocab_size)
    head = loading.load_head(folder, sizes, kind=settings.variant, dtype="float32")
    head = loading.sharing(head, target.params.embedding)
    config = method.in_float32(head.config)
    method.check_length(settings, config.max_depth + 1, f"--head {folder}")
    if weight and not config.spark.confidence:
        remedy = "this head guesses no probability of acceptance; take 0"
        raise bad_option("confidence_weight", weight, remedy)
    return config, head.params, head.params.draft_to_target


METHOD = method.Method(
    "Distil a DFlash or DSpark head from a frozen target.", Settings, build, defaults
)

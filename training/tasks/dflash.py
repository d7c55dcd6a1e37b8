"""The method ``dflash``: DFlash and DSpark heads."""

import dataclasses
from collections.abc import Sequence
from typing import Any, Literal

from jspec.checkpoints import loading
from jspec.checkpoints.heads.dflash import default_capture_layers
from jspec.checkpoints.loading import LoadedModel
from jspec.drafters.dflash import DFlash, DSpark
from jspec.models.decoder import DecoderConfig
from jspec.models.heads.dflash import DFlashConfig
from jspec.models.heads.dspark import SparkConfig
from training.data.settings import Data
from training.errors import bad_option, check_least
from training.export import DFlashFormat
from training.tasks import method
from training.tasks.dflash_task import PUBLISHED, VARIANTS, DFlashTask, Recipe

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
    draft_vocab_size: int = 0  # tokens that the head knows, the most frequent of the data (0: all)
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

"""Distils a DFlash or DSpark head from a frozen target: ``python -m training.distill_dflash``.

    python -m training.distill_dflash --target DIR --data TEXT... --held-out-share 0.02 --output RUN

Target forward, features, all blocks of a window and their loss are one compiled program. At every
evaluation the acceptance length is measured on held-out prompts by the ``decode`` that serves. Run
the same command again to resume; at the end ``RUN/export`` holds the head, its best weights, in a
layout that jspec and vLLM read, with a provenance file.
"""

import dataclasses
import sys
from collections.abc import Sequence
from typing import Literal

from jspec.checkpoints.heads.dflash import default_capture_layers
from jspec.drafters.dflash import DFlash, DSpark
from jspec.engine import loading
from jspec.engine.loading import LoadedModel
from jspec.models.decoder import DecoderConfig
from jspec.models.heads.dflash import DFlashConfig
from jspec.models.heads.dspark import SparkConfig
from training import trainer
from training.data.settings import Data
from training.dflash import PUBLISHED, VARIANTS, DFlashTask, Frozen, Recipe
from training.distilling import (
    DistillSettings,
    described,
    distil,
    export_of,
    frequent_tokens,
    mask_token,
    open_target,
    variant_of,
    with_defaults,
)
from training.export import DFlashFormat
from training.trainer import TrainerSettings, bad_option

_DRAFTERS = {"dflash": DFlash, "dspark": DSpark}


@dataclasses.dataclass(frozen=True)
class HeadSettings:
    """The network of the head; all else is as in the target.

    Attributes:
      block_size: slots of a block, the root's included
      head_layers: blocks of the network
      capture_layers: hidden states of the target that the head reads, as Hugging Face counts them
        (default: one for each layer of the head, spread evenly)
      mask_token: id that stands in slots to be filled in, which texts must not hold (default: the
        last one that the data does not)
      intermediate_size: width of the feed-forward (0: as in the target)
      draft_vocab_size: tokens that the head knows, the most frequent ones of the data (0: all)
      markov: how a DSpark head reads the token before
      markov_rank: width of that token (0: it is not read)
      head: folder of a head to start from instead, which then decides all of the above
    """

    block_size: int = 16
    head_layers: int = 5
    capture_layers: tuple[int, ...] = ()
    mask_token: int = -1
    intermediate_size: int = 0
    draft_vocab_size: int = 0
    markov: Literal["vanilla", "gated", "rnn"] = "vanilla"
    markov_rank: int = 256
    head: str = ""

    def __post_init__(self):
        for name, least in (
            ("block_size", 2),
            ("head_layers", 1),
            ("mask_token", -1),
            ("intermediate_size", 0),
            ("draft_vocab_size", 0),
            ("markov_rank", 0),
        ):
            if getattr(self, name) < least:
                raise bad_option(name, getattr(self, name), f"it must be at least {least}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings(DistillSettings):
    """One run; every field, and every field of its parts, is an option of the command line.

    Attributes:
      variant: dflash or dspark; decides the defaults
      format: of the exported head: dflash (the authors') or dflash-speculators

    Raises:
      ValueError: a value is out of range; the message names option, value and remedy.
    """

    head: HeadSettings
    recipe: Recipe
    variant: Literal["dflash", "dspark"] = "dflash"
    format: DFlashFormat = "dflash"

    def __post_init__(self):
        super().__post_init__()
        deepest = self.head.block_size - (self.variant == "dflash")
        depth = self.depth
        if not self.head.head and depth > deepest:
            remedy = f"a block of --block-size {self.head.block_size} drafts {deepest} tokens"
            raise bad_option("num_speculative_tokens", depth, remedy)
        if self.format == "dflash" and self.head.draft_vocab_size:
            remedy = "the authors' layout knows all tokens; take --format dflash-speculators"
            raise bad_option("draft_vocab_size", self.head.draft_vocab_size, remedy)

    def idle(self) -> dict[str, dict[str, str]]:
        """See ``DistillSettings``."""
        head = dict.fromkeys(vars(self.head), "leave it out: --head decides it")
        del head["head"]
        head = head if self.head.head else {}
        if not self.head.markov_rank:
            head["markov"] = "a token of --markov-rank 0 is not read; leave it out"
        recipe, weighing = {}, self.recipe.weighing
        unused = "gamma" if weighing == "dpace" else "dpace_alpha"
        recipe[unused] = f"--weighing {weighing} does not use it; leave it out"
        if not self.recipe.loss_weight:
            recipe["loss"] = "it weighs nothing: give --loss-weight too"
        if self.variant == "dflash":
            remedy = "only dspark heads have it; leave it out"
            head |= dict.fromkeys(("markov", "markov_rank"), remedy)
            remedy = "only dspark heads guess chances of acceptance; leave it out"
            recipe["confidence_weight"] = remedy
        return super().idle() | {"head": head, "recipe": recipe}


# Rate, schedule, warm-up and clipping of SpecForge's recipes; the numbers of steps are ours.
_TRAINER = TrainerSettings(
    steps=100_000,
    batch=32,
    accumulate=8,
    schedule="cosine",
    learning_rate=6e-4,
    warmup=4000,
    learning_rate_floor=0.0,
    beta1=0.9,
    beta2=0.999,
    weight_decay=0.0,
    clip="norm",
    clip_at=1.0,
    eval_every=1000,
)
_HEADS = {"dflash": HeadSettings(), "dspark": HeadSettings(block_size=7)}


def settings_of(variant: str) -> type[Settings]:
    """``Settings`` with the variant's published defaults."""
    return with_defaults(
        Settings,
        head=_HEADS[variant],
        recipe=PUBLISHED[variant],
        trainer=_TRAINER,
        variant=variant,
    )


def head_config(
    head: HeadSettings, variant: str, target: DecoderConfig, mask: int, confidence: bool
) -> DFlashConfig:
    """Sizes of the head.

    Raises:
      ValueError: the target has fewer tokens.
    """
    vocab = head.draft_vocab_size or target.vocab_size
    if vocab > target.vocab_size:
        raise bad_option("draft_vocab_size", vocab, f"the target has {target.vocab_size} tokens")
    network = dataclasses.replace(
        target.with_plain_blocks(),
        vocab_size=vocab,
        num_layers=head.head_layers,
        qkv_bias=False,
        output_bias=False,
        mlp_bias=False,
        qk_norm=True,
        tie_embeddings=False,
        intermediate_size=head.intermediate_size or target.intermediate_size,
        activation_dtype="float32",
        cache_dtype="float32",
    )
    spark = None
    if variant == "dspark":
        sees = confidence and head.markov_rank > 0
        spark = SparkConfig(head.markov_rank, head.markov, confidence, sees)
    captured = default_capture_layers(target.num_layers, head.head_layers)
    return DFlashConfig(
        network=network,
        capture_layers=head.capture_layers or captured,
        target_hidden_size=target.hidden_size,
        target_vocab_size=target.vocab_size,
        block_size=head.block_size,
        mask_token=mask,
        from_anchor=spark is not None,
        separate_head=vocab != target.vocab_size,
        spark=spark,
    )


def run(
    settings: Settings, argv: Sequence[str] = (), *, stop_after: int | None = None
) -> trainer.Result:
    """Prepares the data, trains to the end or to a signal, exports a finished run.

    Args:
      settings: of the run.
      argv: words of the command line, for the provenance.
      stop_after: most steps of this call.
    """
    target, data = open_target(settings)
    config, start, kept = _head(settings, target, data)
    finished = lambda params: params.replace(draft_to_target=kept)
    export = export_of(settings, target, config, settings.format, finished)
    drafter = _DRAFTERS[settings.variant](
        config, target.target, num_speculative_tokens=settings.depth
    )
    task = DFlashTask(
        config, target.config, settings.recipe, settings.trainer.compute, settings.trainer.remat
    )

    return distil(
        settings,
        task,
        Frozen(target.params, kept, start),
        target,
        data,
        module="training.distill_dflash",
        argv=argv,
        export=export,
        stop_after=stop_after,
        identity=dataclasses.asdict(settings.recipe)
        | {"variant": settings.variant, "head": described(config, start)},
        drafter=drafter,
        weights_of=lambda params: (target.params, finished(params)),
    )


def _head(settings: Settings, target: LoadedModel, data: Data):
    """The head's sizes, the weights to start from or None, and the ids it knows or None.

    Raises:
      ValueError: the given head cannot be read, is of another method or was made for another
        target.
    """
    head, sizes = settings.head, target.config
    if not head.head:
        mask = mask_token(head.mask_token, data, sizes.vocab_size)
        guesses = settings.recipe.confidence_weight > 0
        config = head_config(head, settings.variant, sizes, mask, guesses)
        return config, None, frequent_tokens(data, config.vocab_size, sizes.vocab_size)
    found = loading.load_head(head.head, sizes, kind=settings.variant, dtype="float32")
    found = loading.sharing(found, target.params.embedding)
    network = dataclasses.replace(
        found.config.network, activation_dtype="float32", cache_dtype="float32"
    )
    config = dataclasses.replace(found.config, network=network)
    given = settings.recipe.confidence_weight
    if given and not config.spark.confidence:
        raise bad_option("confidence_weight", given, "this head guesses no chances; take 0")
    return config, found.params, found.params.draft_to_target


def main(argv: Sequence[str] | None = None) -> int:
    """The command; see ``trainer.run_command`` for its exit code."""
    argv = list(sys.argv[1:] if argv is None else argv)
    kind = settings_of(variant_of(argv, VARIANTS, Settings.variant))
    return trainer.run_command(
        kind,
        run,
        argv,
        module="training.distill_dflash",
        description="Distils a DFlash or DSpark head from a frozen target; run it again with the "
        "same options to resume.",
    )


if __name__ == "__main__":
    sys.exit(main())

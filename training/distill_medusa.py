"""Trains Medusa heads on a target: ``python -m training.distill_medusa``.

    python -m training.distill_medusa --target DIR --data TEXT... --held-out-share 0.02 --output RUN

Medusa-1 leaves the target as it is. Medusa-2 (``--joint``) trains it too, from heads that an
earlier run has warmed up (``--heads RUN/export``), and exports both. Run the same command again to
resume.
"""

import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path

from jspec.checkpoints import checkpoint
from jspec.drafters import Medusa
from jspec.engine import loading
from jspec.models.decoder import DecoderConfig
from jspec.models.heads.medusa import MedusaConfig
from training import trainer
from training.distilling import (
    DistillSettings,
    described,
    distil,
    export_of,
    frequent_tokens,
    open_target,
)
from training.export import MedusaFormat
from training.medusa import FrozenTarget, JointParams, MedusaRecipe, MedusaTask
from training.trainer import TrainerSettings, bad_option

# The authors' rate and schedule; the number of steps is ours.
_TRAINER = TrainerSettings(
    steps=20_000,
    batch=32,
    accumulate=1,
    schedule="cosine",
    learning_rate=1e-3,
    warmup=2000,
    learning_rate_floor=0.0,
    beta1=0.9,
    beta2=0.999,
    weight_decay=0.0,
    eval_every=1000,
)


@dataclasses.dataclass(frozen=True)
class HeadSettings:
    """The network of the heads.

    Attributes:
      num_heads: tokens guessed ahead, beside the target's own next one
      head_layers: residual blocks of each head
      draft_vocab_size: tokens that the heads know, the most frequent ones of the data (0: all)
      heads: folder of heads to start from, which then decide all of the above
    """

    num_heads: int = 5
    head_layers: int = 1
    draft_vocab_size: int = 0
    heads: str = ""

    def __post_init__(self):
        for name, least in (("num_heads", 1), ("head_layers", 1), ("draft_vocab_size", 0)):
            if getattr(self, name) < least:
                raise bad_option(name, getattr(self, name), f"it must be at least {least}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings(DistillSettings):
    """One run; every field, and every field of its parts, is an option of the command line.

    Attributes:
      joint: whether the target is trained too (Medusa-2)
      format: of the exported heads: medusa-vllm, or medusa (the authors')

    Raises:
      ValueError: a value is out of range; the message names option, value and remedy.
    """

    trainer: TrainerSettings = _TRAINER
    head: HeadSettings = dataclasses.field(default_factory=HeadSettings)
    recipe: MedusaRecipe = dataclasses.field(default_factory=MedusaRecipe)
    joint: bool = False
    format: MedusaFormat = "medusa-vllm"

    def __post_init__(self):
        super().__post_init__()
        if self.joint and self.target_dtype == "bfloat16":
            raise bad_option("target_dtype", "bfloat16", "a target that is trained needs float32")
        if self.format == "medusa" and self.head.draft_vocab_size:
            remedy = "the authors' layout has no reduced vocabulary; take --format medusa-vllm"
            raise bad_option("draft_vocab_size", self.head.draft_vocab_size, remedy)
        depth = self.depth
        if not self.head.heads and depth > self.head.num_heads:
            remedy = f"there are --num-heads {self.head.num_heads}, one for each token"
            raise bad_option("num_speculative_tokens", depth, remedy)

    def idle(self) -> dict[str, dict[str, str]]:
        """See ``DistillSettings``."""
        recipe, head = {}, {}
        if self.head.heads:
            names = ("num_heads", "head_layers", "draft_vocab_size")
            head = dict.fromkeys(names, "leave it out: --heads decides it")
        elif self.head.num_heads == 1:
            recipe["head_decay"] = "there is one head; leave it out"
        if not self.joint:
            recipe["heads_weight"] = "only --joint has another loss beside theirs; leave it out"
        return super().idle() | {"head": head, "recipe": recipe}


def heads_config(settings: HeadSettings, target: DecoderConfig) -> MedusaConfig:
    """Sizes of fresh heads.

    Raises:
      ValueError: the target has fewer tokens.
    """
    vocab = settings.draft_vocab_size or target.vocab_size
    if vocab > target.vocab_size:
        raise bad_option("draft_vocab_size", vocab, f"the target has {target.vocab_size} tokens")
    return MedusaConfig(
        num_heads=settings.num_heads,
        num_layers=settings.head_layers,
        hidden_size=target.hidden_size,
        vocab_size=vocab,
        target_vocab_size=target.vocab_size,
        capture_layers=(target.num_layers,),
        num_outputs=settings.num_heads,
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
    if settings.joint and settings.target_dtype == "auto":
        settings = dataclasses.replace(settings, target_dtype="float32")
    target, data = open_target(settings)
    if settings.head.heads:
        start = loading.load_head(
            settings.head.heads, target.config, kind="medusa", dtype="float32"
        )
        config, heads, kept = start.config, start.params, start.params.draft_to_target
    else:
        config, heads = heads_config(settings.head, target.config), None
        kept = frequent_tokens(data, config.vocab_size, config.target_vocab_size)
    finished = lambda params: params.heads.replace(draft_to_target=kept)
    write = export_of(settings, target, config, settings.format, finished)
    task = MedusaTask(
        config,
        target.config,
        settings.recipe,
        settings.joint,
        settings.trainer.compute,
        settings.trainer.remat,
    )

    def export(params: JointParams, directory: Path) -> None:
        write(params, directory / "heads" if settings.joint else directory)
        if settings.joint:
            checkpoint.save_pretrained(
                directory / "target",
                target.config,
                params.target,
                target.raw_config,
                settings.export_dtype,
            )
            target.tokenizer.save_pretrained(directory / "target")

    return distil(
        settings,
        task,
        FrozenTarget(target.params, heads, kept),
        target,
        data,
        module="training.distill_medusa",
        argv=argv,
        export=export,
        stop_after=stop_after,
        identity=dataclasses.asdict(settings.recipe)
        | {"joint": settings.joint, "heads": described(config, heads)},
        drafter=Medusa(config, target.target, num_speculative_tokens=settings.depth),
        weights_of=lambda params: (
            target.params if params.target is None else trainer.gather(params.target),
            finished(params),
        ),
    )


def main(argv: Sequence[str] | None = None) -> int:
    """The command; see ``trainer.run_command`` for its exit code."""
    return trainer.run_command(
        Settings,
        run,
        argv,
        module="training.distill_medusa",
        description="Trains Medusa heads on a target; run it again with the same options to "
        "resume.",
    )


if __name__ == "__main__":
    sys.exit(main())

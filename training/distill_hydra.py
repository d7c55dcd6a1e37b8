"""Trains Hydra heads on a frozen target: ``python -m training.distill_hydra``.

    python -m training.distill_hydra --target DIR --data TEXT... --held-out-share 0.02 --output RUN

Each head learns to guess one token further from the tokens before it; with ``--variant hydra++``
they read the text through a layer with attention, are deeper, and learn the target's law. Run the
same command again to resume; at the end ``RUN/export`` holds the best heads in the authors' layout.
"""

import dataclasses
import sys
from collections.abc import Sequence
from typing import Literal

from jspec.checkpoints.heads import hydra
from jspec.drafters import Hydra
from jspec.engine import loading
from jspec.engine.loading import LoadedModel
from jspec.models.heads.hydra import HydraConfig, HydraParams
from training import trainer
from training.distilling import (
    DistillSettings,
    described,
    distil,
    export_of,
    open_target,
    variant_of,
    with_defaults,
)
from training.stages import PUBLISHED, StagesRecipe, StagesTask
from training.task import Frozen
from training.trainer import TrainerSettings, bad_option

VARIANTS = ("hydra", "hydra++")

# Rate, schedule, warm-up and decay of the authors' program; the number of steps is ours.
_TRAINER = TrainerSettings(
    steps=20_000,
    batch=32,
    accumulate=1,
    schedule="cosine",
    learning_rate=5e-4,
    warmup=100,
    learning_rate_floor=0.33,
    beta1=0.9,
    beta2=0.999,
    weight_decay=0.1,
    eval_every=1000,
)


@dataclasses.dataclass(frozen=True)
class HeadSettings:
    """The network of the heads.

    Attributes:
      num_heads: tokens guessed ahead, beside the target's own next one
      head_layers: residual blocks of each head; those after the first share their weights, as in
        the authors' program
      heads: folder of heads to start from instead, which then decide all of the above
    """

    num_heads: int = 4
    head_layers: int = 1
    heads: str = ""

    def __post_init__(self):
        for name in ("num_heads", "head_layers"):
            if getattr(self, name) < 1:
                raise bad_option(name, getattr(self, name), "it must be at least 1")


_HEADS = {"hydra": HeadSettings(), "hydra++": HeadSettings(head_layers=4)}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings(DistillSettings):
    """One run; every field, and every field of its parts, is an option of the command line.

    Attributes:
      variant: hydra, or hydra++ with its layer of attention; decides the defaults

    Raises:
      ValueError: a value is out of range; the message names option, value and remedy.
    """

    trainer: TrainerSettings = _TRAINER
    head: HeadSettings
    recipe: StagesRecipe
    variant: Literal["hydra", "hydra++"] = "hydra"

    def __post_init__(self):
        super().__post_init__()
        depth = self.depth
        if not self.head.heads and depth > self.head.num_heads:
            remedy = f"there are --num-heads {self.head.num_heads}, one for each token"
            raise bad_option("num_speculative_tokens", depth, remedy)

    def idle(self) -> dict[str, dict[str, str]]:
        """See ``DistillSettings``."""
        decided, one = "leave it out: --heads decides it", "there is one head; leave it out"
        head = dict.fromkeys(("num_heads", "head_layers"), decided) if self.head.heads else {}
        recipe = {"stage_decay": one} if not head and self.head.num_heads == 1 else {}
        return super().idle() | {"head": head, "recipe": recipe}


def settings_of(variant: str) -> type[Settings]:
    """``Settings`` with the variant's published defaults."""
    return with_defaults(Settings, head=_HEADS[variant], recipe=PUBLISHED[variant], variant=variant)


def heads_of(settings: Settings, target: LoadedModel) -> tuple[HydraConfig, HydraParams | None]:
    """Sizes of the heads, and those to start from in float32, None for fresh ones.

    Raises:
      ValueError: those to start from cannot be read, were made for another target or are of the
        other variant.
    """
    head, prefixed = settings.head, settings.variant == "hydra++"
    if head.heads:
        found = loading.load_head(head.heads, target.config, kind="hydra", dtype="float32")
        config = dataclasses.replace(found.config, activation_dtype="float32")
        if (config.network is not None) != prefixed:
            other = VARIANTS[not prefixed]
            raise bad_option("heads", head.heads, f"they are of the other kind: --variant {other}")
    else:
        config, found = (
            HydraConfig(
                num_heads=head.num_heads,
                num_layers=head.head_layers,
                hidden_size=target.config.hidden_size,
                vocab_size=target.config.vocab_size,
                capture_layers=(target.config.num_layers,),
                tie_blocks=head.head_layers > 2,
                network=hydra.network(target.config) if prefixed else None,
            ),
            None,
        )
    if prefixed:
        network = dataclasses.replace(
            config.network, activation_dtype="float32", cache_dtype="float32"
        )
        config = dataclasses.replace(config, network=network)
    return config, found and found.params


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
    config, start = heads_of(settings, target)
    task = StagesTask(
        config, target.config, settings.recipe, settings.trainer.compute, settings.trainer.remat
    )
    return distil(
        settings,
        task,
        Frozen(target.params, start),
        target,
        data,
        module="training.distill_hydra",
        argv=argv,
        stop_after=stop_after,
        identity=dataclasses.asdict(settings.recipe) | {"heads": described(config, start)},
        drafter=Hydra(config, target.target, num_speculative_tokens=settings.depth),
        export=export_of(settings, target, config),
    )


def main(argv: Sequence[str] | None = None) -> int:
    """The command; see ``trainer.run_command`` for its exit code."""
    argv = list(sys.argv[1:] if argv is None else argv)
    return trainer.run_command(
        settings_of(variant_of(argv, VARIANTS, Settings.variant)),
        run,
        argv,
        module="training.distill_hydra",
        description="Trains Hydra heads on a frozen target; run it again with the same options to "
        "resume.",
    )


if __name__ == "__main__":
    sys.exit(main())

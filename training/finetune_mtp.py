"""Trains modules for later tokens (MTP) on a frozen target: ``python -m training.finetune_mtp``.

    python -m training.finetune_mtp --target DIR --data TEXT... --held-out-share 0.02 --output RUN

It goes on from the modules in the target's files, where there are some, and makes one otherwise:
any target of plain blocks can have them. The published recipe is FastMTP's: one module is used
three times over. Run the same command again to resume; at the end ``RUN/export`` holds the best
modules, in a file of their own, and with ``--stitch`` ``RUN/export/target`` the target with the
modules in its files, where servers look for them.
"""

import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from jspec.checkpoints.heads import mtp, stitching
from jspec.drafters import Mtp
from jspec.engine import loading
from jspec.engine.loading import LoadedModel
from jspec.models.heads.mtp import MtpConfig, MtpParams
from training import trainer
from training.distilling import DistillSettings, described, distil, export_of, open_target
from training.mtp import MtpRecipe, MtpTask
from training.task import Frozen
from training.trainer import TrainerSettings, bad_option

# Rates as for other heads; published recipes say them for far larger batches.
_TRAINER = TrainerSettings(
    steps=20_000,
    batch=16,
    accumulate=1,
    schedule="cosine",
    learning_rate=1e-4,
    warmup=500,
    learning_rate_floor=0.0,
    beta1=0.9,
    beta2=0.95,
    weight_decay=0.0,
    clip="norm",
    clip_at=1.0,
    eval_every=1000,
)


@dataclasses.dataclass(frozen=True)
class ModuleSettings:
    """The modules; their blocks are of the target's kind and size.

    Attributes:
      modules: folder of modules to start from (default: the target's own files)
      fresh: how modules begin: early_exit hands on what it reads of a position, random does not;
        none goes on from those of the files (default: none where there are some, else early_exit)
      num_modules: of fresh ones
    """

    modules: str = ""
    fresh: Literal["", "none", "early_exit", "random"] = ""
    num_modules: int = 1

    def __post_init__(self):
        if self.num_modules < 1:
            raise bad_option("num_modules", self.num_modules, "it must be at least 1")
        if self.modules and self.fresh not in ("", "none"):
            raise bad_option("fresh", self.fresh, "--modules says where to start; leave out one")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings(DistillSettings):
    """One run; every field, and every field of its parts, is an option of the command line.

    Attributes:
      stitch: whether the target, with the modules in its files, is written too

    Raises:
      ValueError: a value is out of range; the message names option, value and remedy.
    """

    trainer: TrainerSettings = _TRAINER
    head: ModuleSettings = dataclasses.field(default_factory=ModuleSettings)
    recipe: MtpRecipe = dataclasses.field(default_factory=MtpRecipe)
    stitch: bool = False

    def idle(self) -> dict[str, dict[str, str]]:
        """See ``DistillSettings``."""
        names = ("step_decay", "through_steps") if self.recipe.unroll == 1 else ()
        remedy = "--unroll 1 has no step after the first; leave it out"
        return super().idle() | {"recipe": dict.fromkeys(names, remedy)}


def modules_of(settings: ModuleSettings, target: LoadedModel) -> tuple[MtpConfig, MtpParams | None]:
    """Sizes of the modules, and those to start from in float32, None for fresh ones.

    Raises:
      ValueError: there should be some and there are none, or they are for another target.
    """
    count = target.raw_config.get("num_nextn_predict_layers") or 0
    place = settings.modules or (target.path if settings.fresh == "none" or count else "")
    if settings.fresh in ("early_exit", "random") or not place:
        sizes = dataclasses.replace(
            target.config, activation_dtype="float32", cache_dtype="float32"
        )
        layout = mtp.natural_layout(sizes)
        return mtp.config_for(sizes, layout, settings.num_modules), None
    if settings.num_modules != 1:
        remedy = "the modules to start from decide it; leave it out"
        raise bad_option("num_modules", settings.num_modules, remedy)
    found = loading.load_head(place, target.config, kind="mtp", dtype="float32")
    network = dataclasses.replace(
        found.config.network, activation_dtype="float32", cache_dtype="float32"
    )
    return dataclasses.replace(found.config, network=network), found.params


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
    config, start = modules_of(settings.head, target)
    if config.n_predict > settings.recipe.unroll:
        remedy = f"there are {config.n_predict} modules, one a step; take at least as many steps"
        raise bad_option("unroll", settings.recipe.unroll, remedy)
    write = export_of(settings, target, config)
    fresh = "random" if settings.head.fresh == "random" else "early_exit"
    task = MtpTask(
        config,
        target.config,
        settings.recipe,
        settings.trainer.compute,
        fresh,
        settings.trainer.remat,
    )

    def export(params: MtpParams, directory: Path) -> None:
        write(params, directory)
        if settings.stitch:
            stitching.stitch(
                directory / "target", target.path, config, params, dtype=settings.export_dtype
            )

    return distil(
        settings,
        task,
        Frozen(target.params, start),
        target,
        data,
        module="training.finetune_mtp",
        argv=argv,
        export=export,
        stop_after=stop_after,
        identity=dataclasses.asdict(settings.recipe)
        | {"modules": described(config, start), "fresh": fresh},
        drafter=Mtp(config, target.target, num_speculative_tokens=settings.depth),
    )


def main(argv: Sequence[str] | None = None) -> int:
    """The command; see ``trainer.run_command`` for its exit code."""
    return trainer.run_command(
        Settings,
        run,
        argv,
        module="training.finetune_mtp",
        description="Trains modules for later tokens (MTP) on a frozen target; run it again with "
        "the same options to resume.",
    )


if __name__ == "__main__":
    sys.exit(main())

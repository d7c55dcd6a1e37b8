"""Trains an MLP speculator on a frozen target: ``python -m training.distill_mlp_speculator``.

    python -m training.distill_mlp_speculator --target DIR --data TEXT... --held-out-share 0.02 \\
        --output RUN

IBM's recipe has two stages: text, then answers of the target (``training.generate_data``), with a
tenth of the rate, in a second run that starts from the first (``--head RUN/export``). Snowflake's
variants learn from such answers alone. Run the same command again to resume; at the end
``RUN/export`` holds the best speculator in the layout of its variant.
"""

import dataclasses
import sys
from collections.abc import Sequence
from typing import Literal

from jspec.checkpoints.heads.head_formats import Layout
from jspec.drafters import MlpSpeculator
from jspec.engine import loading
from jspec.engine.loading import LoadedModel
from jspec.models.heads.arctic import LstmSpeculatorConfig
from jspec.models.heads.mlp_speculator import MlpSpeculatorConfig
from training import trainer
from training.acceptance import AcceptanceSettings
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

# Layouts of the variants' files.
_LAYOUTS: dict[str, Layout] = {
    "ibm": "mlp_speculator",
    "arctic": "arctic-rnn",
    "arctic-lstm": "arctic-lstm",
}
VARIANTS = tuple(_LAYOUTS)

# Rates, schedules and decay of the programs of IBM (fms-fsdp, its first stage) and Snowflake
# (ArcticTraining), which train on more tokens a step.
_IBM = TrainerSettings(
    steps=15_000,
    batch=64,
    accumulate=4,
    schedule="cosine",
    learning_rate=1e-3,
    warmup=750,
    learning_rate_floor=0.1,
    beta1=0.9,
    beta2=0.95,
    weight_decay=0.1,
    clip="norm",
    clip_at=1.0,
    eval_every=1000,
)
_ARCTIC = dataclasses.replace(
    _IBM,
    steps=3000,
    batch=256,
    accumulate=16,
    warmup=150,
    learning_rate_floor=0.0,
    beta2=0.999,
    eval_every=500,
)


@dataclasses.dataclass(frozen=True)
class HeadSettings:
    """The network of the speculator.

    Attributes:
      n_predict: stages, one for each token guessed
      inner_dim: width of the state and the embeddings (0: as the target's)
      tie_weights: whether the stages share their weights, as those of an LSTM always do
      tie_embeddings: whether one embedding serves an LSTM's gates and cell
      scale_input: whether the target's hidden state is normed first
      head: folder of a speculator to start from instead, which then decides all of the above
    """

    n_predict: int = 3
    inner_dim: int = 0
    tie_weights: bool = True
    tie_embeddings: bool = True
    scale_input: bool = True
    head: str = ""

    def __post_init__(self):
        for name, least in (("n_predict", 1), ("inner_dim", 0)):
            if getattr(self, name) < least:
                raise bad_option(name, getattr(self, name), f"it must be at least {least}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings(DistillSettings):
    """One run; every field, and every field of its parts, is an option of the command line.

    Attributes:
      variant: ibm, arctic (Snowflake's name for the same network, in its own files) or arctic-lstm;
        decides the defaults and the layout of the exported files

    Raises:
      ValueError: a value is out of range; the message names option, value and remedy.
    """

    acceptance: AcceptanceSettings = dataclasses.field(
        default_factory=lambda: AcceptanceSettings(num_speculative_tokens=HeadSettings.n_predict)
    )
    head: HeadSettings = dataclasses.field(default_factory=HeadSettings)
    recipe: StagesRecipe
    variant: Literal["ibm", "arctic", "arctic-lstm"] = "ibm"

    def __post_init__(self):
        super().__post_init__()
        head, lstm = self.head, self.variant == "arctic-lstm"
        if lstm and not head.tie_weights:
            raise bad_option("tie_weights", False, "the stages of an LSTM are always one")
        if not lstm and not head.tie_embeddings:
            remedy = "only an LSTM (--variant arctic-lstm) has several embeddings a stage"
            raise bad_option("tie_embeddings", False, remedy)
        if not lstm and not head.head and head.tie_weights and head.n_predict < 2:
            remedy = "one stage shares no weights: add --no-tie-weights"
            raise bad_option("n_predict", head.n_predict, remedy)
        depth, stages = self.depth, head.n_predict
        if not head.head and depth > stages and (depth % stages or not head.tie_weights):
            remedy = f"there are --n-predict {stages} stages; take as many tokens or fewer"
            raise bad_option("num_speculative_tokens", depth, remedy)

    def idle(self) -> dict[str, dict[str, str]]:
        """See ``DistillSettings``."""
        head = {name: "leave it out: --head decides it" for name in vars(self.head)}
        del head["head"]
        recipe = {}
        if not self.head.head:
            head = {}
            if self.head.n_predict == 1:
                recipe["stage_decay"] = "there is one stage; leave it out"
        return super().idle() | {"head": head, "recipe": recipe}


def settings_of(variant: str) -> type[Settings]:
    """``Settings`` with the variant's published defaults."""
    return with_defaults(
        Settings,
        trainer=_IBM if variant == "ibm" else _ARCTIC,
        recipe=PUBLISHED[variant],
        variant=variant,
    )


def head_of(settings: Settings, target: LoadedModel):
    """Sizes of the speculator, and the weights to start from in float32, None for fresh ones.

    Raises:
      ValueError: the one to start from cannot be read, was made for another target or is of
        another variant.
    """
    head, lstm = settings.head, settings.variant == "arctic-lstm"
    if head.head:
        found = loading.load_head(head.head, target.config, kind="mlp_speculator", dtype="float32")
        if isinstance(found.config, LstmSpeculatorConfig) != lstm:
            other = "ibm or arctic" if lstm else "arctic-lstm"
            raise bad_option("head", head.head, f"it is of another kind: --variant {other}")
        return dataclasses.replace(found.config, activation_dtype="float32"), found.params
    sizes = {
        "n_predict": head.n_predict,
        "hidden_size": target.config.hidden_size,
        "inner_dim": head.inner_dim or target.config.hidden_size,
        "vocab_size": target.config.vocab_size,
        "capture_layers": (target.config.num_layers,),
        "scale_input": head.scale_input,
    }
    if lstm:
        return LstmSpeculatorConfig(**sizes, tie_embeddings=head.tie_embeddings), None
    return MlpSpeculatorConfig(**sizes, tie_weights=head.tie_weights), None


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
    config, start = head_of(settings, target)
    task = StagesTask(
        config, target.config, settings.recipe, settings.trainer.compute, settings.trainer.remat
    )
    return distil(
        settings,
        task,
        Frozen(target.params, start),
        target,
        data,
        module="training.distill_mlp_speculator",
        argv=argv,
        stop_after=stop_after,
        identity=dataclasses.asdict(settings.recipe)
        | {"variant": settings.variant, "head": described(config, start)},
        drafter=MlpSpeculator(config, target.target, num_speculative_tokens=settings.depth),
        export=export_of(settings, target, config, _LAYOUTS[settings.variant]),
    )


def main(argv: Sequence[str] | None = None) -> int:
    """The command; see ``trainer.run_command`` for its exit code."""
    argv = list(sys.argv[1:] if argv is None else argv)
    return trainer.run_command(
        settings_of(variant_of(argv, VARIANTS, Settings.variant)),
        run,
        argv,
        module="training.distill_mlp_speculator",
        description="Trains an MLP speculator on a frozen target; run it again with the same "
        "options to resume.",
    )


if __name__ == "__main__":
    sys.exit(main())

"""The method ``mlp_speculator``: speculators of IBM and Snowflake.

IBM's recipe (arXiv 2404.19124) has two stages: text, then answers of the target
(``training.generate_data``) with a tenth of the rate, in a second run that starts from the first
(``--head RUN/export``). Snowflake's variants are trained on such answers alone. Drafter:
``jspec.drafters.mlp_speculator``.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, Literal

from jspec.checkpoints import loading
from jspec.checkpoints.loading import LoadedModel
from jspec.drafters.mlp_speculator import MlpSpeculator
from jspec.models.heads.arctic import LstmSpeculatorConfig
from jspec.models.heads.mlp_speculator import MlpSpeculatorConfig
from training.data.settings import Data
from training.tasks import method
from training.tasks.acceptance import AcceptanceSettings
from training.tasks.stages import StagesRecipe, StagesTask
from training.util.errors import bad_option, check_least

# Layouts of the variants' files.
_LAYOUTS = {"ibm": "mlp_speculator", "arctic": "arctic-rnn", "arctic-lstm": "arctic-lstm"}

# Rates, schedules and decay of the programs of IBM (fms-fsdp, its first stage) and Snowflake
# (ArcticTraining), which train on more tokens a step.
_IBM = dataclasses.replace(
    method.HEADS,
    steps=15_000,
    batch=64,
    accumulate=4,
    learning_rate=1e-3,
    warmup=750,
    learning_rate_floor=0.1,
    beta2=0.95,
    weight_decay=0.1,
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
    """The network of the speculator."""

    n_predict: int = 3  # stages, one for each token guessed
    inner_dim: int = 0  # width of the state and the embeddings (0: as the target's)
    tie_weights: bool = True  # whether the stages share their weights; those of an LSTM always do
    tie_embeddings: bool = True  # whether one embedding serves an LSTM's gates and cell
    scale_input: bool = True  # whether the target's hidden state is normed first
    head: str = ""  # folder of a speculator to start from, which then decides all of the above

    def __post_init__(self):
        check_least(self, 1, "n_predict")
        check_least(self, 0, "inner_dim")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings(method.DistillSettings):
    """One run; every field, and every field of its parts, is an option of the command line."""

    acceptance: AcceptanceSettings = dataclasses.field(
        default_factory=lambda: AcceptanceSettings(num_speculative_tokens=HeadSettings.n_predict)
    )
    head: HeadSettings = dataclasses.field(default_factory=HeadSettings)
    recipe: StagesRecipe = dataclasses.field(default_factory=StagesRecipe)
    # ibm, arctic (Snowflake's name for the same network, in its own files) or arctic-lstm; decides
    # the defaults and the layout of the exported files
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
        if not head.head:
            method.check_length(self, stages + 1, f"--n-predict {stages}")

    def idle(self) -> dict[str, dict[str, str]]:
        """See ``DistillSettings``."""
        head, recipe = method.decided(self.head, "head"), {}
        if not head and self.head.n_predict == 1:
            recipe["stage_decay"] = "there is one stage; leave it out"
        return super().idle() | {"head": head, "recipe": recipe}


def defaults(argv: Sequence[str]) -> dict[str, Any]:
    """Return the published settings of the variant."""
    variant = method.variant_of(argv, tuple(_LAYOUTS), Settings.variant)
    return {"trainer": _IBM if variant == "ibm" else _ARCTIC, "variant": variant}


def head_of(settings: Settings, target: LoadedModel):
    """Return the sizes of the speculator, and initial weights in float32 or None."""
    head, lstm, sizes = settings.head, settings.variant == "arctic-lstm", target.config
    if head.head:
        loaded = loading.load_head(head.head, sizes, kind="mlp_speculator", dtype="float32")
        if isinstance(loaded.config, LstmSpeculatorConfig) != lstm:
            other = "ibm or arctic" if lstm else "arctic-lstm"
            raise bad_option("head", head.head, f"it is of another kind: --variant {other}")
        method.check_length(settings, loaded.config.n_predict + 1, f"--head {head.head}")
        return dataclasses.replace(loaded.config, activation_dtype="float32"), loaded.params
    fields = {
        "n_predict": head.n_predict,
        "hidden_size": sizes.hidden_size,
        "inner_dim": head.inner_dim or sizes.hidden_size,
        "vocab_size": sizes.vocab_size,
        "capture_layers": (sizes.num_layers,),
        "scale_input": head.scale_input,
    }
    if lstm:
        return LstmSpeculatorConfig(**fields, tie_embeddings=head.tie_embeddings), None
    return MlpSpeculatorConfig(**fields, tie_weights=head.tie_weights), None


def build(settings: Settings, target: LoadedModel, _: Data) -> method.Build:
    """Prepare a run; see ``Method``."""
    config, start = head_of(settings, target)
    return method.head_build(
        settings,
        target,
        config,
        start,
        StagesTask,
        MlpSpeculator,
        identity={"variant": settings.variant},
        format=_LAYOUTS[settings.variant],
    )


METHOD = method.Method("Train an MLP speculator on a frozen target.", Settings, build, defaults)

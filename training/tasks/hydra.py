"""The method ``hydra``: Hydra heads, each of which guesses one token further.

``--variant hydra++`` gives them a prefix layer with attention and more blocks, and trains them on
the target's distribution. Drafter: ``jspec.drafters.hydra``.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, Literal

from jspec.checkpoints import loading
from jspec.checkpoints.heads import hydra
from jspec.checkpoints.loading import LoadedModel
from jspec.drafters.hydra import Hydra
from jspec.models.heads.hydra import HydraConfig, HydraParams
from training.data.settings import Data
from training.tasks import method
from training.tasks.stages import StagesRecipe, StagesTask
from training.trainer import TrainerSettings
from training.util.errors import bad_option, check_least

VARIANTS = ("hydra", "hydra++")
# arXiv 2402.05109, sections 3 and 4
PUBLISHED = {"hydra": StagesRecipe(), "hydra++": StagesRecipe(loss="ce")}

# Rate, schedule, warm-up and decay of the authors' program; the number of steps is ours.
_TRAINER = dataclasses.replace(
    method.HEADS, learning_rate=5e-4, warmup=100, learning_rate_floor=0.33, weight_decay=0.1
)


@dataclasses.dataclass(frozen=True)
class HeadSettings:
    """The network of the heads."""

    num_heads: int = 4  # tokens guessed ahead, beside the target's own next one
    # residual blocks of each head; blocks after the first share their weights, as in the authors'
    # program
    head_layers: int = 1
    heads: str = ""  # folder of heads to start from, which then decide all of the above

    def __post_init__(self):
        check_least(self, 1, "num_heads", "head_layers")


_HEADS = {"hydra": HeadSettings(), "hydra++": HeadSettings(head_layers=4)}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings(method.DistillSettings):
    """One run; every field, and every field of its parts, is an option of the command line."""

    trainer: TrainerSettings = _TRAINER
    head: HeadSettings
    recipe: StagesRecipe
    # hydra, or hydra++ with its layer of attention; decides the defaults
    variant: Literal["hydra", "hydra++"] = "hydra"

    def __post_init__(self):
        super().__post_init__()
        if not self.head.heads:
            method.check_heads(self, self.head.num_heads)

    def idle(self) -> dict[str, dict[str, str]]:
        """See ``DistillSettings``."""
        head, recipe = method.decided(self.head, "heads"), {}
        if not head and self.head.num_heads == 1:
            recipe["stage_decay"] = "there is one head; leave it out"
        return super().idle() | {"head": head, "recipe": recipe}


def defaults(argv: Sequence[str]) -> dict[str, Any]:
    """Return the published settings of the variant."""
    variant = method.variant_of(argv, VARIANTS, Settings.variant)
    return {"head": _HEADS[variant], "recipe": PUBLISHED[variant], "variant": variant}


def heads_of(settings: Settings, target: LoadedModel) -> tuple[HydraConfig, HydraParams | None]:
    """Return the sizes of the heads, and initial weights in float32 or None."""
    head, prefixed, sizes = settings.head, settings.variant == "hydra++", target.config
    config, params = None, None
    if head.heads:
        loaded = loading.load_head(head.heads, sizes, kind="hydra", dtype="float32")
        config = dataclasses.replace(loaded.config, activation_dtype="float32")
        params = loaded.params
        method.check_length(settings, config.num_heads + 1, f"--heads {head.heads}")
        if (config.network is not None) != prefixed:
            other = VARIANTS[not prefixed]
            raise bad_option("heads", head.heads, f"they are of the other kind: --variant {other}")
    config = config or HydraConfig(
        num_heads=head.num_heads,
        num_layers=head.head_layers,
        hidden_size=sizes.hidden_size,
        vocab_size=sizes.vocab_size,
        capture_layers=(sizes.num_layers,),
        tie_blocks=head.head_layers > 2,
        network=hydra.network(sizes) if prefixed else None,
    )
    return method.in_float32(config) if prefixed else config, params


def build(settings: Settings, target: LoadedModel, _: Data) -> method.Build:
    """Prepare a run; see ``Method``."""
    config, start = heads_of(settings, target)
    return method.head_build(settings, target, config, start, StagesTask, Hydra, name="heads")


METHOD = method.Method("Train Hydra heads on a frozen target.", Settings, build, defaults)

"""The method ``mtp``: modules for later tokens (MTP) on a frozen target.

Training continues with the modules in the target's files, or makes one for a target of plain blocks
that has none. The modules are unrolled on their own outputs, as they draft. Module k modulo their
number runs step k: row i reads the output of step k - 1 (at step 0 the target's f_i) and the true
token t_{i+1+k}, and stands at position i + k. It attends to the first rows of its module up to i,
which its cache will hold, and to its own later rows. It predicts t_{i+2+k}.

With one module that is the recursion of FastMTP (arXiv 2509.18362), whose recipe the defaults are;
with as many modules as steps, DeepSeek-V3's own training (arXiv 2412.19437, section 2.2). Drafter:
``jspec.drafters.mtp``.
"""

import dataclasses
import functools
from pathlib import Path
from typing import Literal

import jax
import jax.numpy as jnp

from jspec import ops
from jspec.checkpoints import loading, stitching
from jspec.checkpoints.heads import mtp as mtp_files
from jspec.checkpoints.loading import LoadedModel
from jspec.core.types import Array
from jspec.drafters.mtp import Mtp
from jspec.models.decoder import DecoderConfig
from jspec.models.heads import mtp
from jspec.models.heads.mtp import MtpConfig, MtpParams
from training.data.batch import Batch
from training.data.settings import Data
from training.losses import unrolled
from training.losses.distances import GUESS_LOSSES, GuessLoss
from training.losses.guesses import judge
from training.networks.forward import Frozen, feature_scale, packed_states
from training.networks.linear import LINEARS
from training.tasks import method
from training.trainer import TrainerSettings
from training.trainer.task import Metrics
from training.util.errors import bad_option, check_choice, check_least, check_positive

# Rates as for other heads; published recipes give them for far larger batches.
_TRAINER = dataclasses.replace(method.HEADS, batch=16, learning_rate=1e-4, warmup=500, beta2=0.95)


@dataclasses.dataclass(frozen=True)
class MtpRecipe:
    """Losses of the modules."""

    unroll: int = 3  # steps of the modules on their own outputs, S
    # weight of a step's loss relative to the one before; the weights add up to 1
    step_decay: float = 0.6
    # labels (cross-entropy with the text, as published) or a distance from the target's
    # distribution
    mtp_loss: GuessLoss = "labels"
    # factor of the whole loss; MaxText trains with 0.1 beside the target's own loss
    loss_factor: float = 1.0
    through_steps: bool = True  # whether gradients flow from a step into the one before

    def __post_init__(self):
        check_least(self, 1, "unroll")
        check_least(self, 0, "step_decay")
        check_positive(self, "loss_factor")
        check_choice(self, "mtp_loss", GUESS_LOSSES)


@dataclasses.dataclass(frozen=True)
class MtpTask:
    """Modules in training: a ``training.trainer.task.Task``."""

    modules: MtpConfig  # sizes of the modules
    target: DecoderConfig  # sizes of the target
    recipe: MtpRecipe  # losses and unrolling
    compute: str = "bfloat16"
    # how fresh modules begin: "random", or "early_exit", see ``early_exit``.
    fresh: Literal["early_exit", "random"] = "early_exit"
    remat: bool = False

    def __post_init__(self):
        if self.modules.network.has_experts:
            raise ValueError(
                "modules with experts cannot be trained; those of DeepSeek-V3 and GLM-4.5 draft as "
                "they were published"
            )

    def init(self, key: Array, frozen: Frozen) -> MtpParams:
        """Return initial weights."""
        if frozen.start is not None:
            return method.float32(frozen.start)
        params = mtp.init_params(key, self.modules)
        return early_exit(params, self.modules, frozen) if self.fresh == "early_exit" else params

    def loss(
        self, params: MtpParams, frozen: Frozen, batch: Batch, key: Array
    ) -> tuple[Array, Metrics]:
        """Return ``loss`` and, over the rows that count, ``accepted_k`` = mean sum(min(p, q))."""
        _, normed = packed_states(frozen.target, self.target, batch, self.compute)
        normed, recipe = jax.lax.stop_gradient(normed), self.recipe
        config, linear = self.modules, LINEARS[self.compute]

        def run(step: int, params: MtpParams, tokens, features, positions, attend) -> Array:
            module = step % config.n_predict
            return mtp.run(
                params,
                config,
                module,
                tokens,
                features,
                positions,
                lambda _, q, k, v, window: attend(module, q, k, v, window),
                linear=linear,
            )

        outputs = unrolled.unroll(
            run,
            params,
            ops.look_up(frozen.target.embedding, batch.tokens).astype(jnp.float32),
            normed[:, :-1].astype(jnp.float32),
            batch,
            steps=recipe.unroll,
            layers=config.n_predict,
            through_steps=recipe.through_steps,
            remat=self.remat,
        )
        guesses = [
            mtp.normed(params, config, step % config.n_predict, x) for step, x in enumerate(outputs)
        ]
        means = judge(
            unrolled.align(guesses),
            unrolled.rows_of(normed, batch, recipe.unroll, recipe.step_decay),
            (),
            frozen=frozen,
            linear=linear,
            loss=recipe.mtp_loss,
        )
        total = sum(recipe.step_decay**step for step in range(recipe.unroll))
        loss = recipe.loss_factor / total * means["loss"]
        return loss, means | {"loss": loss}


def early_exit(params: MtpParams, config: MtpConfig, frozen: Frozen) -> MtpParams:
    """Return modules with random blocks that pass on the features of a position.

    So training begins near the target's distribution and not at the uniform one.
    """
    size = config.hidden_size
    rows = slice(0, size) if config.hidden_first else slice(size, 2 * size)
    norm = jnp.full((size,), feature_scale(frozen.target), jnp.float32)
    return params.replace(
        modules=tuple(
            module.replace(projection=module.projection.at[rows].add(jnp.eye(size)), norm=norm)
            for module in params.modules
        )
    )


@dataclasses.dataclass(frozen=True)
class ModuleSettings:
    """The modules; their blocks have the target's kind and size."""

    modules: str = ""  # folder of modules to start from (default: the target's own files)
    # how modules begin: early_exit passes on the features of a position, random does not; none
    # continues with those of the files (default: none if there are some, else early_exit)
    fresh: Literal["", "none", "early_exit", "random"] = ""
    num_modules: int = 1  # number of fresh modules

    def __post_init__(self):
        check_least(self, 1, "num_modules")
        if self.modules and self.fresh not in ("", "none"):
            raise bad_option("fresh", self.fresh, "--modules says where to start; leave out one")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings(method.DistillSettings):
    """One run; every field, and every field of its parts, is an option of the command line."""

    trainer: TrainerSettings = _TRAINER
    head: ModuleSettings = dataclasses.field(default_factory=ModuleSettings)
    recipe: MtpRecipe = dataclasses.field(default_factory=MtpRecipe)
    stitch: bool = False  # whether to export a copy of the target with the modules in its files too

    def __post_init__(self):
        super().__post_init__()
        method.check_length(self, self.recipe.unroll + 1, f"--unroll {self.recipe.unroll}")

    def idle(self) -> dict[str, dict[str, str]]:
        """See ``DistillSettings``."""
        names = ("step_decay", "through_steps") if self.recipe.unroll == 1 else ()
        remedy = "--unroll 1 has no step after the first; leave it out"
        return super().idle() | {"recipe": dict.fromkeys(names, remedy)}


def modules_of(settings: ModuleSettings, target: LoadedModel) -> tuple[MtpConfig, MtpParams | None]:
    """Return the sizes of the modules, and initial weights in float32 or None."""
    count = target.raw_config.get("num_nextn_predict_layers") or 0
    folder = settings.modules or (target.path if settings.fresh == "none" or count else "")
    if settings.fresh in ("early_exit", "random") or not folder:
        sizes = dataclasses.replace(
            target.config, activation_dtype="float32", cache_dtype="float32"
        )
        layout = mtp_files.natural_layout(sizes)
        return mtp_files.config_for(sizes, layout, settings.num_modules), None
    if settings.num_modules != 1:
        remedy = "the modules to start from decide it; leave it out"
        raise bad_option("num_modules", settings.num_modules, remedy)
    head = loading.load_head(folder, target.config, kind="mtp", dtype="float32")
    return method.in_float32(head.config), head.params


def build(settings: Settings, target: LoadedModel, _: Data) -> method.Build:
    """Prepare a run; see ``Method``."""
    config, start = modules_of(settings.head, target)
    if config.n_predict > settings.recipe.unroll:
        remedy = f"there are {config.n_predict} modules, one a step; take at least as many steps"
        raise bad_option("unroll", settings.recipe.unroll, remedy)
    fresh = "random" if settings.head.fresh == "random" else "early_exit"
    modules = method.head_build(
        settings,
        target,
        config,
        start,
        functools.partial(MtpTask, fresh=fresh),
        Mtp,
        name="modules",
        identity={"fresh": fresh},
    )
    if not settings.stitch:
        return modules

    def export(params: MtpParams, directory: Path) -> None:
        modules.export(params, directory)
        folder, dtype = directory / "target", settings.export_dtype
        stitching.stitch(folder, target.path, config, params, dtype=dtype)

    return dataclasses.replace(modules, export=export)


METHOD = method.Method("Train modules for later tokens (MTP) on a frozen target.", Settings, build)

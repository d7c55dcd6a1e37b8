"""The method ``draft``: a small decoder learns the distribution of a larger one.

The draft model is a checkpoint with the target's vocabulary (``--draft DIR``), or starts as a few
layers of the target. It is trained on text, on answers of the target, or on its own continuations
(on-policy, arXiv 2310.08461), which the weights of the step sample inside the step. With
``--parallel`` it learns to guess several tokens in one pass (PARD).
"""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jspec.api.vocabularies import check_same
from jspec.checkpoints import checkpoint
from jspec.checkpoints.heads.mask_token import SERVED, mask_token_id
from jspec.drafters import DraftModel, ParallelDraftModel
from jspec.engine import loading
from jspec.engine.loading import LoadedModel
from jspec.models.decoder import DecoderConfig, DecoderParams
from training.data.settings import Data
from training.errors import bad_option
from training.task import Frozen
from training.tasks import method
from training.tasks.draft_task import DraftRecipe, DraftTask
from training.tasks.parallel_draft import ParallelDraftTask
from training.trainer import TrainerSettings

_TRAINER = dataclasses.replace(
    method.HEADS,
    learning_rate=3e-4,
    warmup=500,
    learning_rate_floor=0.1,
    beta2=0.95,
    weight_decay=0.1,
)
# With --parallel: PARD's (arXiv 2504.18583), which is trained on text that the target wrote.
_PARALLEL = {
    "trainer": dataclasses.replace(
        _TRAINER, schedule="constant", learning_rate=3e-5, weight_decay=0.0
    ),
    "recipe": DraftRecipe(text_weight=1.0),
    "parallel": method.ParallelSettings(parallel=True),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings(method.DistillSettings):
    """One run; every field, and every field of its parts, is an option of the command line."""

    trainer: TrainerSettings = _TRAINER
    recipe: DraftRecipe = dataclasses.field(default_factory=DraftRecipe)
    parallel: method.ParallelSettings = dataclasses.field(default_factory=method.ParallelSettings)
    draft: str = ""  # model to start from, with the target's vocabulary
    draft_layers: tuple[int, ...] = ()  # layers of the target to start from instead, from 0 on

    def __post_init__(self):
        super().__post_init__()
        self.parallel.check(self.depth)
        if bool(self.draft) == bool(self.draft_layers):
            remedy = "give either --draft DIR or --draft-layers 0 3 ..."
            raise bad_option("draft", self.draft, remedy)
        recipe, part = self.recipe, self.trainer.batch // self.trainer.accumulate
        if recipe.on_policy and not round(recipe.on_policy * part):
            remedy = f"that is none of the {part} windows of --batch / --accumulate"
            raise bad_option("on_policy", recipe.on_policy, remedy)
        if recipe.on_policy and recipe.on_policy_prompt >= self.data.length:
            remedy = f"keep fewer than --length {self.data.length}"
            raise bad_option("on_policy_prompt", recipe.on_policy_prompt, remedy)

    def idle(self) -> dict[str, dict[str, str]]:
        """See ``DistillSettings``."""
        recipe = {}
        if self.recipe.text_weight == 1:
            recipe["loss"] = "--text-weight 1 trains on the text alone; leave one out"
        if not self.recipe.on_policy:
            remedy = "the draft model writes nothing without --on-policy; leave it out"
            recipe |= dict.fromkeys(("on_policy_prompt", "on_policy_temperature"), remedy)
        return super().idle() | {"recipe": recipe}


def initial_model(
    settings: Settings, target: LoadedModel
) -> tuple[DecoderConfig, DecoderParams, dict]:
    """Return sizes, weights and config.json of the draft model before training."""
    if settings.draft:
        draft = loading.load(settings.draft, "float32")
        sizes = target.config.vocab_size, draft.config.vocab_size
        check_same(*sizes, target.tokenizer, draft.tokenizer)
        return draft.config, draft.params, draft.raw_config
    picked, layers = settings.draft_layers, target.config.num_layers
    if not all(0 <= layer < layers for layer in picked) or list(picked) != sorted(set(picked)):
        remedy = f"name ascending ones of the target's {layers}, from 0 on"
        raise bad_option("draft_layers", picked, remedy)
    if target.config.moe is not None:
        remedy = "layers with experts cannot be trained; give a --draft of plain blocks"
        raise bad_option("draft_layers", picked, remedy)
    windows = target.config.windows
    config = dataclasses.replace(
        target.config,
        num_layers=len(picked),
        cache_dtype="float32",
        activation_dtype="float32",
        windows=tuple(windows[layer] for layer in picked) if windows else (),
    )
    params = target.params.replace(layers=tuple(target.params.layers[layer] for layer in picked))
    return config, params, checkpoint.hf_config(config)


def build(settings: Settings, target: LoadedModel, data: Data) -> method.Build:
    """Prepare a run; see ``Method``."""
    config, start, raw = initial_model(settings, target)
    depth, parallel, trainer = settings.depth, settings.parallel, settings.trainer
    task = DraftTask(config, target.config, settings.recipe, trainer.compute, trainer.remat)
    drafter, identity = DraftModel(config, depth, vocab_size=target.config.vocab_size), {}
    if parallel.parallel:
        mask = _mask(settings, data, config, raw)
        raw |= {"pard_token": mask, "spd_type": "pard"}
        task = ParallelDraftTask(**vars(task), slots=parallel.slots, mask_token_id=mask)
        drafter = ParallelDraftModel(config, target.target, depth, mask_token_id=mask)
        identity = dataclasses.asdict(parallel)

    def export(params: DecoderParams, directory: Path) -> None:
        checkpoint.save_pretrained(directory, config, params, raw, settings.export_dtype)
        target.tokenizer.save_pretrained(directory)

    return method.Build(
        task=task,
        frozen=Frozen(target.params, start),
        drafter=drafter,
        identity=dataclasses.asdict(settings.recipe)
        | {"draft": method.described(config, start)}
        | identity,
        export=export,
        weights_of=lambda params: (target.params, params),
    )


def _mask(settings: Settings, data: Data, config: DecoderConfig, raw: dict) -> int:
    """Return the mask token of the options, of the initial model, or an unused one."""
    token, served = settings.parallel.mask_token, mask_token_id(raw, SERVED)
    token = served if token < 0 and served is not None else token
    return method.mask_token(token, data, config.vocab_size)


def defaults(argv: Sequence[str]) -> dict[str, Any]:
    """Return the published settings of --parallel."""
    return _PARALLEL if method.asks_for_parallel(argv) else {}


METHOD = method.Method("Distil a draft model from a frozen target.", Settings, build, defaults)

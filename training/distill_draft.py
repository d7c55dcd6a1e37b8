"""Distils a draft model from a frozen target: ``python -m training.distill_draft``.

    python -m training.distill_draft --target DIR --draft-layers 0 3 7 --data TEXT... \\
        --held-out-share 0.02 --output RUN

The draft model is a checkpoint with the target's vocabulary (``--draft DIR``), or starts as a few
of the target's own layers. It learns the target's law on text, on answers of the target (see
``training.generate_data``), on what it writes itself (``--on-policy 0.5``), or a mixture. With
``--parallel`` it learns to guess several tokens in one pass (PARD), by default from the text alone.
Run the same command again to resume; at the end ``RUN/export`` holds it in Hugging Face layout.
"""

import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path

from jspec.api.vocabularies import check_same
from jspec.checkpoints import checkpoint
from jspec.checkpoints.heads.mask_token import SERVED, mask_token_id
from jspec.drafters import DraftModel, ParallelDraftModel
from jspec.engine import loading
from jspec.engine.loading import LoadedModel
from jspec.models.decoder import DecoderConfig, DecoderParams
from training import trainer
from training.data.settings import Data
from training.distilling import (
    DistillSettings,
    ParallelSettings,
    asks_for_parallel,
    described,
    distil,
    mask_token,
    open_target,
    with_defaults,
)
from training.draft import DraftRecipe, DraftTask
from training.parallel_draft import ParallelDraftTask
from training.task import Frozen
from training.trainer import TrainerSettings, bad_option

_TRAINER = TrainerSettings(
    steps=20_000,
    batch=32,
    accumulate=1,
    schedule="cosine",
    learning_rate=3e-4,
    warmup=500,
    beta1=0.9,
    beta2=0.95,
    weight_decay=0.1,
    eval_every=1000,
)


# With --parallel: PARD's (arXiv 2504.18583), which learns from text that the target wrote.
_PARALLEL = {
    "trainer": dataclasses.replace(
        _TRAINER, schedule="constant", learning_rate=3e-5, weight_decay=0.0
    ),
    "recipe": DraftRecipe(text_weight=1.0),
    "parallel": ParallelSettings(parallel=True),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings(DistillSettings):
    """One run; every field, and every field of its parts, is an option of the command line.

    Attributes:
      draft: model to start from, of the target's vocabulary
      draft_layers: layers of the target to start from, from 0 on, instead

    Raises:
      ValueError: a value is out of range; the message names option, value and remedy.
    """

    trainer: TrainerSettings = _TRAINER
    recipe: DraftRecipe = dataclasses.field(default_factory=DraftRecipe)
    parallel: ParallelSettings = dataclasses.field(default_factory=ParallelSettings)
    draft: str = ""
    draft_layers: tuple[int, ...] = ()

    def __post_init__(self):
        super().__post_init__()
        self.parallel.check(self.depth)
        if bool(self.draft) == bool(self.draft_layers):
            given = self.draft if self.draft else ""
            raise bad_option("draft", given, "give either --draft DIR or --draft-layers 0 3 ...")
        part = self.trainer.batch // self.trainer.accumulate
        if self.recipe.on_policy and not round(self.recipe.on_policy * part):
            remedy = f"that is none of the {part} windows of --batch / --accumulate"
            raise bad_option("on_policy", self.recipe.on_policy, remedy)
        if self.recipe.on_policy and self.recipe.on_policy_prompt >= self.data.length:
            remedy = f"keep fewer than --length {self.data.length}"
            raise bad_option("on_policy_prompt", self.recipe.on_policy_prompt, remedy)

    def idle(self) -> dict[str, dict[str, str]]:
        """See ``DistillSettings``."""
        recipe = {}
        if self.recipe.text_weight == 1:
            recipe["loss"] = "--text-weight 1 learns from the text alone; leave one out"
        if not self.recipe.on_policy:
            remedy = "the draft model writes nothing without --on-policy; leave it out"
            recipe |= dict.fromkeys(("on_policy_prompt", "on_policy_temperature"), remedy)
        return super().idle() | {"recipe": recipe}


def start_of(settings: Settings, target: LoadedModel) -> tuple[DecoderConfig, DecoderParams, dict]:
    """Sizes, weights and config.json of the draft model before training.

    Raises:
      ValueError: it cannot be read, has another vocabulary, or the target has no such layers.
    """
    if settings.draft:
        draft = loading.load(settings.draft, "float32")
        check_same(
            target.config.vocab_size, draft.config.vocab_size, target.tokenizer, draft.tokenizer
        )
        return draft.config, draft.params, draft.raw_config
    picked, layers = settings.draft_layers, target.config.num_layers
    if not all(0 <= layer < layers for layer in picked) or list(picked) != sorted(set(picked)):
        remedy = f"name ascending ones of the target's {layers}, from 0 on"
        raise bad_option("draft_layers", picked, remedy)
    if target.config.moe is not None:
        remedy = "layers with experts are not trained yet; give a --draft of plain blocks"
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
    config, start, raw = start_of(settings, target)
    task = DraftTask(
        config, target.config, settings.recipe, settings.trainer.compute, settings.trainer.remat
    )
    depth = settings.depth
    drafter = DraftModel(config, depth, vocab_size=target.config.vocab_size)
    if settings.parallel.parallel:
        mask = _mask(settings, data, config, raw)
        raw |= {"pard_token": mask, "spd_type": "pard"}
        task = ParallelDraftTask(**vars(task), slots=settings.parallel.slots, mask_token_id=mask)
        drafter = ParallelDraftModel(config, target.target, depth, mask_token_id=mask)

    def export(params: DecoderParams, directory: Path) -> None:
        checkpoint.save_pretrained(directory, config, params, raw, settings.export_dtype)
        target.tokenizer.save_pretrained(directory)

    return distil(
        settings,
        task,
        Frozen(target.params, start),
        target,
        data,
        module="training.distill_draft",
        argv=argv,
        export=export,
        stop_after=stop_after,
        identity=dataclasses.asdict(settings.recipe)
        | {"draft": described(config, start)}
        | (dataclasses.asdict(settings.parallel) if settings.parallel.parallel else {}),
        drafter=drafter,
    )


def _mask(settings: Settings, data: Data, config: DecoderConfig, raw: dict) -> int:
    """The mask token: the one given, that of the model to start from, or an unused one."""
    given, known = settings.parallel.mask_token, mask_token_id(raw, SERVED)
    given = known if given < 0 and known is not None else given
    return mask_token(given, data, config.vocab_size)


def settings_of(parallel: bool) -> type[Settings]:
    """``Settings`` with the published defaults."""
    return with_defaults(Settings, **_PARALLEL) if parallel else Settings


def main(argv: Sequence[str] | None = None) -> int:
    """The command; see ``trainer.run_command`` for its exit code."""
    argv = list(sys.argv[1:] if argv is None else argv)
    return trainer.run_command(
        settings_of(asks_for_parallel(argv)),
        run,
        argv,
        module="training.distill_draft",
        description="Distils a draft model from a frozen target; run it again with the same "
        "options to resume.",
    )


if __name__ == "__main__":
    sys.exit(main())

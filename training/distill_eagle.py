"""Distils an EAGLE head from a frozen target: ``python -m training.distill_eagle``.

    python -m training.distill_eagle --target DIR --data TEXT... --held-out-share 0.02 --output RUN

Target forward, features, the unrolled head and its loss are one compiled program. At every
evaluation the acceptance length is measured on held-out prompts by the ``decode`` that serves. With
``--parallel`` an EAGLE-3 head learns to guess several tokens in one pass (P-EAGLE). Run the same
command again to resume; at the end ``RUN/export`` holds the head, its best weights, in a layout
that jspec, vLLM and SGLang read, with a provenance file.
"""

import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import jax
import jax.numpy as jnp

from jspec.checkpoints.heads.eagle_layers import default_capture_layers
from jspec.drafters import Eagle, ParallelEagle
from jspec.engine import loading
from jspec.engine.loading import LoadedModel
from jspec.models.decoder import DecoderConfig
from jspec.models.heads.eagle import EagleConfig, EagleParams
from training import trainer
from training.data.settings import Data
from training.distilling import (
    DistillSettings,
    ParallelSettings,
    asks_for_parallel,
    described,
    distil,
    export_of,
    frequent_tokens,
    mask_token,
    open_target,
    variant_of,
    with_defaults,
)
from training.eagle import PUBLISHED, VARIANTS, EagleTask, Frozen, Recipe, teach
from training.export import EagleFormat
from training.features import cached
from training.parallel_eagle import PARALLEL, ParallelEagleTask
from training.trainer import TrainerSettings, bad_option

_NORMS = "fc_norm", "norm_before_fc", "norm_before_residual", "norm_output"


@dataclasses.dataclass(frozen=True)
class HeadSettings:
    """The network of the head; all else is as in the target.

    Attributes:
      capture_layers: hidden states of the target that an EAGLE-3 head reads, as Hugging Face counts
        them (default: second, middle and last but two)
      draft_vocab_size: tokens that an EAGLE-3 head knows, the most frequent ones of the data (0:
        all)
      head_layers: blocks (0: one, or four with --parallel)
      intermediate_size: width of the feed-forward (0: as in the target)
      fc_norm: norm each hidden state that an EAGLE-3 head reads, as EAGLE-3.1 does
      norm_before_fc: norm them joined instead
      norm_before_residual: what an EAGLE-3 head's first block adds to is normed, too
      norm_output: what an EAGLE-3 head feeds back to itself is normed, as EAGLE-3.1 does
      start: whether an EAGLE-3 head begins as an early exit of the target or at random
      head: folder of a head to start from instead, which then decides all of the above
    """

    capture_layers: tuple[int, ...] = ()
    draft_vocab_size: int = 0
    head_layers: int = 0
    intermediate_size: int = 0
    fc_norm: bool = False
    norm_before_fc: bool = False
    norm_before_residual: bool = False
    norm_output: bool = False
    start: Literal["early_exit", "random"] = "early_exit"
    head: str = ""

    def __post_init__(self):
        if self.fc_norm and self.norm_before_fc:
            raise bad_option("norm_before_fc", True, "--fc-norm norms them already; leave one out")
        for name, least in (("draft_vocab_size", 0), ("head_layers", 0), ("intermediate_size", 0)):
            if getattr(self, name) < least:
                raise bad_option(name, getattr(self, name), f"it must be at least {least}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings(DistillSettings):
    """One run; every field, and every field of its parts, is an option of the command line.

    Attributes:
      variant: eagle1 (EAGLE-2 drafts with the same head), hass or eagle3; decides the defaults
      format: of the exported head: eagle (the authors', which vLLM reads too; of a parallel head
        SpecForge's), sglang (the same with the target's embedding in it) or speculators
      feature_cache: folder that keeps what the target computes, for runs of many epochs (default:
        it is computed anew in every step)
      feature_cache_gigabytes: most that it may take

    Raises:
      ValueError: a value is out of range; the message names option, value and remedy.
    """

    head: HeadSettings = dataclasses.field(default_factory=HeadSettings)
    recipe: Recipe
    parallel: ParallelSettings = dataclasses.field(default_factory=ParallelSettings)
    variant: Literal["eagle1", "hass", "eagle3"] = "eagle3"
    format: EagleFormat = "eagle"
    feature_cache: str = ""
    feature_cache_gigabytes: float = 100.0

    def __post_init__(self):
        super().__post_init__()
        if not self.feature_cache_gigabytes > 0:
            remedy = "it must be above 0"
            raise bad_option("feature_cache_gigabytes", self.feature_cache_gigabytes, remedy)
        self.parallel.check(self.depth)
        if self.parallel.parallel:
            self._check_parallel()
        if self.variant == "eagle3":
            if self.recipe.feature_weight:
                remedy = "what an eagle3 head gives out is no feature of the target; leave it out"
                raise bad_option("feature_weight", self.recipe.feature_weight, remedy)
            return
        if self.format == "speculators":
            raise bad_option("format", self.format, f"{self.variant} heads have eagle and sglang")
        for name in ("capture_layers", "draft_vocab_size", *_NORMS):
            if getattr(self.head, name):
                raise bad_option(name, getattr(self.head, name), "only eagle3 heads have it")

    def _check_parallel(self) -> None:
        if self.variant != "eagle3":
            raise bad_option("variant", self.variant, "only eagle3 heads have --parallel")
        if self.format == "sglang":
            raise bad_option("format", "sglang", "parallel heads have eagle and speculators")
        if self.head.head and self.parallel.mask_token >= 0:
            remedy = "leave it out: --head decides it"
            raise bad_option("mask_token", self.parallel.mask_token, remedy)

    def idle(self) -> dict[str, dict[str, str]]:
        """See ``DistillSettings``."""
        head = dict.fromkeys(vars(self.head), "leave it out: --head decides it")
        del head["head"]
        if self.parallel.parallel:
            remedy = "one pass has no steps on its own outputs; leave it out"
            recipe = dict.fromkeys(("unroll", "through_steps"), remedy)
        else:
            remedy = "--unroll 1 has no step after the first; leave it out"
            names = ("step_decay", "through_steps") if self.recipe.unroll == 1 else ()
            recipe = dict.fromkeys(names, remedy)
        if not self.recipe.loss_weight:
            recipe["loss"] = "it weighs nothing: give --loss-weight too"
        remedy = "only --feature-cache DIR takes them; leave it out"
        cache = {} if self.feature_cache else {"feature_cache_gigabytes": remedy}
        parts = {"head": head if self.head.head else {}, "recipe": recipe, "": cache}
        return super().idle() | parts


# Rates, betas and clipping of the authors' programs; the numbers of steps are ours.
_TRAINERS = {
    "eagle1": TrainerSettings(
        steps=100_000, batch=4, accumulate=1, schedule="linear", learning_rate=3e-5, warmup=2000,
        learning_rate_floor=0.0, beta1=0.9, beta2=0.95, weight_decay=0.01, clip="value",
        clip_at=0.5, eval_every=1000,
    ),
    "hass": TrainerSettings(
        steps=100_000, batch=16, accumulate=1, schedule="linear", learning_rate=3e-5, warmup=1000,
        learning_rate_floor=0.0, beta1=0.9, beta2=0.95, weight_decay=0.01, clip="value",
        clip_at=0.5, eval_every=1000,
    ),
    "eagle3": TrainerSettings(
        steps=100_000, batch=8, accumulate=1, schedule="linear", learning_rate=5e-5, warmup=1500,
        learning_rate_floor=0.0, beta1=0.9, beta2=0.95, weight_decay=0.0, clip="norm",
        clip_at=0.5, eval_every=1000,
    ),
}  # fmt: skip


# SpecForge's rate and clipping for P-EAGLE.
_PARALLEL_TRAINER = dataclasses.replace(
    _TRAINERS["eagle3"], learning_rate=1e-4, warmup=250, beta2=0.999, clip_at=1.0
)


def settings_of(variant: str, parallel: bool = False) -> type[Settings]:
    """``Settings`` with the variant's published defaults."""
    at_once = parallel and variant == "eagle3"
    return with_defaults(
        Settings,
        recipe=PARALLEL if at_once else PUBLISHED[variant],
        trainer=_PARALLEL_TRAINER if at_once else _TRAINERS[variant],
        parallel=ParallelSettings(parallel=parallel),
        variant=variant,
    )


def head_config(
    head: HeadSettings, variant: str, target: DecoderConfig, mask: int | None = None
) -> EagleConfig:
    """Sizes of the head; with a ``mask`` token it guesses several tokens in one pass.

    Raises:
      ValueError: the target has fewer tokens.
    """
    third, layers = variant == "eagle3", 1 if mask is None else 4
    vocab = head.draft_vocab_size or target.vocab_size
    if vocab > target.vocab_size:
        raise bad_option("draft_vocab_size", vocab, f"the target has {target.vocab_size} tokens")
    captured = head.capture_layers or default_capture_layers(target.num_layers)
    network = dataclasses.replace(
        target.with_plain_blocks(),
        vocab_size=vocab,
        num_layers=head.head_layers or layers,
        qkv_bias=False,
        output_bias=False,
        mlp_bias=False,
        qk_norm=False,
        tie_embeddings=False,
        intermediate_size=head.intermediate_size or target.intermediate_size,
        activation_dtype="float32",
        cache_dtype="float32",
    )
    return EagleConfig(
        network=network,
        generation=3 if third else 1,
        capture_layers=captured if third else (target.num_layers,),
        target_hidden_size=target.hidden_size,
        target_vocab_size=target.vocab_size,
        separate_head=third,
        separate_embedding=mask is not None,
        mask_token_id=mask,
        feature_norms=head.fc_norm,
        input_norm=head.norm_before_fc,
        norm_before_residual=head.norm_before_residual,
        norm_output=head.norm_output,
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
    if settings.head.head:
        config, start = _given_head(settings, target)
        kept = start.draft_to_target
    else:
        mask, sizes = None, target.config
        if settings.parallel.parallel:
            mask = mask_token(settings.parallel.mask_token, data, sizes.vocab_size)
        config, start = head_config(settings.head, settings.variant, sizes, mask), None
        kept = frequent_tokens(data, config.vocab_size, config.target_vocab_size)
    finished = lambda params: params.replace(draft_to_target=kept)
    export = export_of(settings, target, config, settings.format, finished)
    task = EagleTask(
        config,
        target.config,
        settings.recipe,
        settings.trainer.compute,
        settings.head.start,
        settings.trainer.remat,
    )
    kind, slots = Eagle, {}
    if settings.parallel.parallel:
        kind, slots = ParallelEagle, dataclasses.asdict(settings.parallel.slots)
        task = ParallelEagleTask(**vars(task), slots=settings.parallel.slots)
    frozen = Frozen(target.params, kept, start)
    if settings.feature_cache:
        data = _with_features(settings, task, frozen, data)

    return distil(
        settings,
        task,
        frozen,
        target,
        data,
        module="training.distill_eagle",
        argv=argv,
        export=export,
        stop_after=stop_after,
        identity=dataclasses.asdict(settings.recipe)
        | {"variant": settings.variant, "head": described(config, start)}
        | {"start": settings.head.start}
        | slots,
        drafter=kind(config, target.target, num_speculative_tokens=settings.depth),
        weights_of=lambda params: (target.params, finished(params)),
    )


def _given_head(settings: Settings, target: LoadedModel) -> tuple[EagleConfig, EagleParams]:
    """The head to start from, in float32.

    Raises:
      ValueError: it cannot be read, is of another method or was made for another target.
    """
    kind = "eagle3" if settings.variant == "eagle3" else "eagle"
    found = loading.load_head(settings.head.head, target.config, kind=kind, dtype="float32")
    if (found.config.mask_token_id is not None) != settings.parallel.parallel:
        trained = "for one token a pass; leave --parallel out"
        if settings.parallel.parallel is False:
            trained = "for several tokens a pass; add --parallel"
        raise bad_option("head", settings.head.head, f"it was trained {trained}")
    if not settings.parallel.parallel:  # whose embedding is trained
        found = loading.sharing(found, target.params.embedding)
    network = dataclasses.replace(
        found.config.network, activation_dtype="float32", cache_dtype="float32"
    )
    return dataclasses.replace(found.config, network=network), found.params


def _with_features(settings: Settings, task: EagleTask, frozen: Frozen, data: Data) -> Data:
    """The data, each window with what the target computes of it."""
    leaves = jax.tree.leaves(frozen.target)
    key = [
        data.description["sha256"],
        task.head.capture_layers,
        task.head.generation,
        repr(task.target),
        settings.trainer.compute,
        [float(jnp.abs(leaf.astype(jnp.float32)).sum()) for leaf in leaves],
    ]
    compiled = jax.jit(lambda weights, batch: teach(task, Frozen(weights), batch))
    keep = lambda part, rows: (
        rows
        and cached(
            rows,
            lambda batch: compiled(frozen.target, batch),
            Path(settings.feature_cache),
            width=task.target.hidden_size,
            gigabytes=settings.feature_cache_gigabytes,
            captured=len(task.head.capture_layers) if task.head.generation == 3 else 0,
            key=[part, *key],
        )
    )
    return data._replace(train=keep("train", data.train), held_out=keep("held out", data.held_out))


def main(argv: Sequence[str] | None = None) -> int:
    """The command; see ``trainer.run_command`` for its exit code."""
    argv = list(sys.argv[1:] if argv is None else argv)
    kind = settings_of(variant_of(argv, VARIANTS, Settings.variant), asks_for_parallel(argv))
    return trainer.run_command(
        kind,
        run,
        argv,
        module="training.distill_eagle",
        description="Distils an EAGLE head from a frozen target; run it again with the same "
        "options to resume.",
    )


if __name__ == "__main__":
    sys.exit(main())

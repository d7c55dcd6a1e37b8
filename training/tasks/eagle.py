"""The method ``eagle``: EAGLE-1, HASS, EAGLE-3 and P-EAGLE heads.

Drafter: ``jspec.drafters.eagle`` and ``jspec.drafters.parallel_eagle``.
"""

import dataclasses
import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import jax

from jspec.checkpoints import loading
from jspec.checkpoints.heads.eagle_layers import default_capture_layers
from jspec.checkpoints.loading import LoadedModel
from jspec.drafters.eagle import Eagle
from jspec.drafters.parallel_eagle import ParallelEagle
from jspec.models.decoder import DecoderConfig
from jspec.models.heads.eagle import EagleConfig, EagleParams
from training.data.features import cached
from training.data.settings import Data
from training.export import EagleFormat
from training.networks.forward import Frozen
from training.tasks import method
from training.tasks.eagle_task import (
    PARALLEL,
    PUBLISHED,
    VARIANTS,
    EagleTask,
    ParallelEagleTask,
    Recipe,
    target_states,
    totals_of,
)
from training.util.digests import weights_digest
from training.util.errors import bad_option, check_each, check_least

_NORMS = "fc_norm", "norm_before_fc", "norm_before_residual", "norm_output"


@dataclasses.dataclass(frozen=True)
class HeadSettings:
    """The network of the head; other sizes are the target's."""

    # hidden states of the target that an EAGLE-3 head reads, as Hugging Face counts them (default:
    # second, middle and last but two; spread evenly if the target is too shallow)
    capture_layers: tuple[int, ...] = ()
    # size of an EAGLE-3 head's vocabulary, the most frequent tokens of the data (0: all)
    draft_vocab_size: int = 0
    head_layers: int = 0  # blocks (0: one, or four with --parallel)
    intermediate_size: int = 0  # width of the feed-forward (0: as in the target)
    fc_norm: bool = False  # norm each hidden state that an EAGLE-3 head reads, as EAGLE-3.1 does
    norm_before_fc: bool = False  # norm the joined hidden states instead
    norm_before_residual: bool = False  # norm the residual of an EAGLE-3 head's first block too
    norm_output: bool = False  # norm what an EAGLE-3 head feeds back to itself, as EAGLE-3.1 does
    # whether an EAGLE-3 head begins as an early exit of the target or at random
    start: Literal["early_exit", "random"] = "early_exit"
    head: str = ""  # folder of a head to start from, which then decides all of the above

    def __post_init__(self):
        if self.fc_norm and self.norm_before_fc:
            raise bad_option("norm_before_fc", True, "--fc-norm norms them already; leave one out")
        check_least(self, 0, "draft_vocab_size", "head_layers", "intermediate_size")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings(method.DistillSettings):
    """One run; every field, and every field of its parts, is an option of the command line."""

    head: HeadSettings = dataclasses.field(default_factory=HeadSettings)
    recipe: Recipe
    parallel: method.ParallelSettings = dataclasses.field(default_factory=method.ParallelSettings)
    # eagle1 (EAGLE-2 drafts with the same head), hass or eagle3; decides the defaults
    variant: Literal["eagle1", "hass", "eagle3"] = "eagle3"
    # layout of the exported head: eagle (the authors', which vLLM reads too; SpecForge's for a
    # parallel head), sglang (eagle with the target's embedding) or speculators
    format: EagleFormat = "eagle"
    # folder that keeps the target's hidden states, for runs of many epochs (default: every step
    # computes them)
    feature_cache: str = ""
    feature_cache_gigabytes: float = 100.0  # largest size of that folder

    def __post_init__(self):
        super().__post_init__()
        check_each(self, ["feature_cache_gigabytes"], lambda x: x > 0, "it must be above 0")
        self.parallel.check(self.depth)
        if self.parallel.parallel:
            self._check_parallel()
        ahead, option = self.recipe.unroll, f"--unroll {self.recipe.unroll}"
        if self.parallel.parallel:
            ahead, option = self.parallel.slots.depths, f"--depths {self.parallel.slots.depths}"
        method.check_length(self, ahead + 1, option)
        if self.variant == "eagle3":
            if self.recipe.feature_weight:
                remedy = "the output of an eagle3 head is no feature of the target; leave it out"
                raise bad_option("feature_weight", self.recipe.feature_weight, remedy)
            return
        if self.format == "speculators":
            raise bad_option("format", self.format, f"{self.variant} heads have eagle and sglang")
        for name in ("capture_layers", "draft_vocab_size", *_NORMS):
            if vars(self.head)[name]:
                raise bad_option(name, vars(self.head)[name], "only eagle3 heads have it")

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
        recipe = {}
        if self.parallel.parallel:
            remedy = "one pass has no steps on its own outputs; leave it out"
            recipe = dict.fromkeys(("unroll", "through_steps"), remedy)
        elif self.recipe.unroll == 1:
            remedy = "--unroll 1 has no step after the first; leave it out"
            recipe = dict.fromkeys(("step_decay", "through_steps"), remedy)
        if not self.recipe.loss_weight:
            recipe["loss"] = "it weighs nothing: give --loss-weight too"
        remedy = "only --feature-cache DIR takes them; leave it out"
        cache = {} if self.feature_cache else {"feature_cache_gigabytes": remedy}
        parts = {"head": method.decided(self.head, "head"), "recipe": recipe, "": cache}
        return super().idle() | parts


# Rates, betas and clipping of the authors' programs; the numbers of steps are ours.
_EAGLE3 = dataclasses.replace(
    method.HEADS,
    steps=100_000,
    batch=8,
    schedule="linear",
    learning_rate=5e-5,
    warmup=1500,
    beta2=0.95,
    clip_at=0.5,
)
_HASS = dataclasses.replace(
    _EAGLE3, batch=16, learning_rate=3e-5, warmup=1000, weight_decay=0.01, clip="value"
)
_TRAINERS = {
    "eagle1": dataclasses.replace(_HASS, batch=4, warmup=2000),
    "hass": _HASS,
    "eagle3": _EAGLE3,
}
# SpecForge's rate and clipping for P-EAGLE.
_PARALLEL_TRAINER = dataclasses.replace(
    _EAGLE3, learning_rate=1e-4, warmup=250, beta2=0.999, clip_at=1.0
)


def defaults(argv: Sequence[str]) -> dict[str, Any]:
    """Return the published settings of the variant."""
    variant, parallel = (
        method.variant_of(argv, VARIANTS, Settings.variant),
        method.asks_for_parallel(argv),
    )
    one_pass = parallel and variant == "eagle3"
    return {
        "recipe": PARALLEL if one_pass else PUBLISHED[variant],
        "trainer": _PARALLEL_TRAINER if one_pass else _TRAINERS[variant],
        "parallel": method.ParallelSettings(parallel=parallel),
        "variant": variant,
    }


def head_config(
    head: HeadSettings, variant: str, target: DecoderConfig, mask: int | None = None
) -> EagleConfig:
    """Return the sizes of the head; with a ``mask`` token it guesses several tokens in one pass."""
    is_eagle3 = variant == "eagle3"
    layers = head.head_layers or (1 if mask is None else 4)
    captured = (target.num_layers,)
    if is_eagle3:
        published = default_capture_layers(target.num_layers)
        captured = method.capture_layers(head.capture_layers, published, target.num_layers, first=0)
    return EagleConfig(
        network=method.plain_network(target, head, layers, qk_norm=False),
        generation=3 if is_eagle3 else 1,
        capture_layers=captured,
        target_hidden_size=target.hidden_size,
        target_vocab_size=target.vocab_size,
        separate_head=is_eagle3,
        separate_embedding=mask is not None,
        mask_token_id=mask,
        feature_norms=head.fc_norm,
        input_norm=head.norm_before_fc,
        norm_before_residual=head.norm_before_residual,
        norm_output=head.norm_output,
    )


def build(settings: Settings, target: LoadedModel, data: Data) -> method.Build:
    """Prepare a run; see ``Method``."""
    parallel, sizes = settings.parallel, target.config
    if settings.head.head:
        config, start = _initial_head(settings, target)
        vocabulary = start.draft_to_target
    else:
        mask, start = None, None
        if parallel.parallel:
            mask = method.mask_token(parallel.mask_token, data, sizes.vocab_size)
        config = head_config(settings.head, settings.variant, sizes, mask)
        vocabulary = method.frequent_tokens(data, config.vocab_size, config.target_vocab_size)
    begin = settings.head.start
    task, drafter, slots = functools.partial(EagleTask, start=begin), Eagle, {}
    if parallel.parallel:
        task = functools.partial(ParallelEagleTask, start=begin, slots=parallel.slots)
        drafter, slots = ParallelEagle, dataclasses.asdict(parallel.slots)
    head = method.head_build(
        settings,
        target,
        config,
        start,
        task,
        drafter,
        identity={"variant": settings.variant, "start": begin} | slots,
        vocabulary=vocabulary,
        format=settings.format,
    )
    if settings.feature_cache:
        head = dataclasses.replace(head, data=_with_features(settings, head.task, target, data))
    return head


def _initial_head(settings: Settings, target: LoadedModel) -> tuple[EagleConfig, EagleParams]:
    """Load the head to start from, in float32."""
    folder, parallel = settings.head.head, settings.parallel.parallel
    kind = "eagle3" if settings.variant == "eagle3" else "eagle"
    head = loading.load_head(folder, target.config, kind=kind, dtype="float32")
    if (head.config.mask_token_id is not None) != parallel:
        trained = "for one token a pass; leave --parallel out"
        if not parallel:
            trained = "for several tokens a pass; add --parallel"
        raise bad_option("head", folder, f"it was trained {trained}")
    if not parallel:  # a parallel head trains its own embedding
        head = loading.sharing(head, target.params.embedding)
    return method.in_float32(head.config), head.params


def _with_features(settings: Settings, task: EagleTask, target: LoadedModel, data: Data) -> Data:
    """Return the data, each window with the target's hidden states."""
    weights = target.params
    key = [
        data.description["sha256"],
        task.head.capture_layers,
        task.head.generation,
        repr(task.target),
        settings.trainer.compute,
        weights_digest(weights),
    ]
    compiled = jax.jit(lambda weights, batch: target_states(task, Frozen(weights), batch))
    summed = jax.jit(lambda weights, normed: totals_of(weights, normed, task.compute))
    reduced = task.head.vocab_size < task.target.vocab_size
    keep = lambda part, rows: (
        rows
        and cached(
            rows,
            lambda batch: compiled(weights, batch),
            (lambda normed: summed(weights, normed)) if reduced else None,
            Path(settings.feature_cache),
            width=task.target.hidden_size,
            gigabytes=settings.feature_cache_gigabytes,
            captured=len(task.head.capture_layers) if task.head.generation == 3 else 0,
            key=[part, *key],
        )
    )
    return data._replace(train=keep("train", data.train), held_out=keep("held out", data.held_out))


METHOD = method.Method("Distil an EAGLE head from a frozen target.", Settings, build, defaults)

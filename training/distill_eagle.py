"""Distils an EAGLE head from a frozen target: ``python -m training.distill_eagle``.

    python -m training.distill_eagle --target DIR --data TEXT... --held-out-share 0.02 --output RUN

Target forward, features, the unrolled head and its loss are one compiled program. At every
evaluation the acceptance length is measured on held-out prompts by the ``decode`` that serves. Run
the same command again to resume; at the end ``RUN/export`` holds the head, its best weights, in a
layout that jspec, vLLM and SGLang read, with a provenance file.
"""

import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from jspec import head_files, loading
from jspec.drafters import Eagle
from jspec.models.decoder import DecoderConfig
from jspec.models.heads.eagle import EagleConfig
from training import trainer
from training.acceptance import AcceptanceSettings, acceptance_meter
from training.data.loader import batches, held_out
from training.data.packing import token_counts
from training.data.settings import Data, DataSettings, open_data
from training.eagle import PUBLISHED, VARIANTS, EagleTask, Frozen, Recipe
from training.trainer import TrainerSettings, bad_option

LAYOUTS = {"eagle": None, "speculators": "speculators"}  # of head_files; None: the authors' own


@dataclasses.dataclass(frozen=True)
class HeadSettings:
    """The network of the head; all else is as in the target.

    Attributes:
      capture_layers: hidden states of the target that an EAGLE-3 head reads, as Hugging Face counts
        them (default: second, middle and last but two)
      draft_vocab_size: tokens that an EAGLE-3 head knows, the most frequent ones of the data (0:
        all)
      head_layers: blocks
      intermediate_size: width of the feed-forward (0: as in the target)
      start: whether an EAGLE-3 head begins as an early exit of the target or at random
    """

    capture_layers: tuple[int, ...] = ()
    draft_vocab_size: int = 0
    head_layers: int = 1
    intermediate_size: int = 0
    start: Literal["early_exit", "random"] = "early_exit"

    def __post_init__(self):
        for name, least in (("draft_vocab_size", 0), ("head_layers", 1), ("intermediate_size", 0)):
            if getattr(self, name) < least:
                raise bad_option(name, getattr(self, name), f"it must be at least {least}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """One run; every field, and every field of its parts, is an option of the command line.

    Attributes:
      target: model to draft for: a directory in Hugging Face layout, or a hub id
      output: folder of the run: checkpoints, logs, curves, and the exported head
      variant: eagle1 (EAGLE-2 drafts with the same head), hass or eagle3; decides the defaults
      target_dtype: of the target's weights (auto: float32 on a CPU, else bfloat16)
      target_name: what the exported files call the target (default: as --target)
      eval_windows: held-out windows of an evaluation
      format: layout of the exported head: the EAGLE authors' (vLLM and SGLang read it too), or
        that of speculators
      export_dtype: of the exported weights

    Raises:
      ValueError: a value is out of range; the message names option, value and remedy.
    """

    target: str
    output: str
    data: DataSettings
    head: HeadSettings = dataclasses.field(default_factory=HeadSettings)
    acceptance: AcceptanceSettings = dataclasses.field(default_factory=AcceptanceSettings)
    recipe: Recipe
    trainer: TrainerSettings
    variant: Literal["eagle1", "hass", "eagle3"] = "eagle3"
    target_dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    target_name: str = ""
    eval_windows: int = 32
    format: Literal["eagle", "speculators"] = "eagle"
    export_dtype: Literal["bfloat16", "float32", "float16"] = "bfloat16"

    def __post_init__(self):
        if self.eval_windows < 1:
            raise bad_option("eval_windows", self.eval_windows, "it must be at least 1")
        if self.variant == "eagle3":
            return
        if self.format != "eagle":
            raise bad_option("format", self.format, f"{self.variant} heads have 'eagle' alone")
        for name in ("capture_layers", "draft_vocab_size"):
            if getattr(self.head, name):
                raise bad_option(name, getattr(self.head, name), "only eagle3 heads have it")


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


def settings_of(variant: str) -> type[Settings]:
    """``Settings`` with the variant's published defaults."""
    parts = [
        ("recipe", Recipe, PUBLISHED[variant]),
        ("trainer", TrainerSettings, _TRAINERS[variant]),
        ("variant", Literal[VARIANTS], variant),
    ]
    return dataclasses.make_dataclass(
        "Settings", parts, bases=(Settings,), frozen=True, kw_only=True,
        namespace={"__doc__": Settings.__doc__},
    )  # fmt: skip


def head_config(settings: Settings, target: DecoderConfig) -> EagleConfig:
    """Sizes of the head.

    Raises:
      ValueError: the target has no such layers or fewer tokens.
    """
    head, third = settings.head, settings.variant == "eagle3"
    vocab = head.draft_vocab_size or target.vocab_size
    if vocab > target.vocab_size:
        raise bad_option("draft_vocab_size", vocab, f"the target has {target.vocab_size} tokens")
    layers = target.num_layers
    captured = head.capture_layers or (2, layers // 2, layers - 3)
    if not third:
        captured = (layers,)
    elif list(captured) != sorted(set(captured) & set(range(1, layers + 1))):
        remedy = f"take ascending ones from 1 to {layers}"
        raise bad_option("capture_layers", captured, remedy)
    network = dataclasses.replace(
        target, vocab_size=vocab, num_layers=head.head_layers, windows=(), qkv_bias=False,
        output_bias=False, mlp_bias=False, qk_norm=False, tie_embeddings=False,
        intermediate_size=head.intermediate_size or target.intermediate_size,
        activation_dtype="float32", cache_dtype="float32",
    )  # fmt: skip
    return EagleConfig(
        network=network, generation=3 if third else 1, capture_layers=captured,
        target_hidden_size=target.hidden_size, target_vocab_size=target.vocab_size,
        own_head=third,
    )  # fmt: skip


def run(
    settings: Settings, argv: Sequence[str] = (), *, stop_after: int | None = None
) -> trainer.Result:
    """Prepares the data, trains to the end or to a signal, exports a finished run.

    Args:
      settings: of the run.
      argv: words of the command line, for the provenance.
      stop_after: most steps of this call.
    """
    trainer.start_processes(settings.trainer)
    target = loading.load(settings.target, _target_dtype(settings))
    config = head_config(settings, target.config)
    data = open_data(settings.data, target.tokenizer, target.config.vocab_size)
    frozen = Frozen(target.params, _draft_vocabulary(config, data))
    task = EagleTask(
        config, target.config, settings.recipe, settings.trainer.compute, settings.head.start
    )
    facts = trainer.provenance("training.distill_eagle", argv) | {"data": data.description}
    with trainer.progress(settings.trainer.steps) as bar:
        result = trainer.train(
            task, frozen, **_fed(settings, data), settings=settings.trainer,
            out=Path(settings.output), measure=_meter(settings, target, frozen, config, data),
            identity=_identity(settings, config, data), facts=facts,
            best=_best(settings, data), bar=bar, stop_after=stop_after,
        )  # fmt: skip
    if result.finished:
        _export(settings, target, frozen, config, result)
    elif jax.process_index() == 0:
        print(f"stopped and saved at step {result.step}; run the same command to resume")
    return result


def _target_dtype(settings: Settings) -> str:
    if settings.target_dtype != "auto":
        return settings.target_dtype
    return "float32" if jax.default_backend() == "cpu" else "bfloat16"


def _draft_vocabulary(config: EagleConfig, data: Data) -> jax.Array | None:
    """The most frequent of the tokens that are learned from, ascending: int32 [Vd]."""
    if not config.reduced:
        return None
    counts = token_counts(data.train, config.target_vocab_size)
    likeliest = np.argsort(-counts, kind="stable")[: config.vocab_size]
    return jnp.asarray(np.sort(likeliest), jnp.int32)


def _fed(settings: Settings, data: Data) -> dict[str, Any]:
    """Batches of this process, and those held out."""
    mine = {"process_index": jax.process_index(), "process_count": jax.process_count()}
    size, seed = settings.trainer.batch, settings.trainer.seed
    apart = ()
    if data.held_out is not None:
        part = size // settings.trainer.accumulate
        apart = held_out(data.held_out, batch=part, limit=settings.eval_windows, **mine)
    return {"batches": batches(data.train, batch=size, seed=seed, **mine), "held_out": apart}


def _meter(settings, target, frozen, config, data):
    if data.held_out is None or not settings.acceptance.acceptance_prompts:
        return None
    drafter = Eagle(
        config, target.target,
        num_speculative_tokens=settings.acceptance.num_speculative_tokens,
    )  # fmt: skip
    measure = acceptance_meter(
        settings.acceptance, target.target, target.params, drafter, data.held_out
    )
    return lambda params: measure(params.replace(draft_to_target=frozen.draft_to_target))


def _best(settings: Settings, data: Data) -> tuple[str, str]:
    if data.held_out is None or not settings.acceptance.acceptance_prompts:
        return ("heldout_loss", "min")
    return ("acceptance_length", "max")


def _identity(settings: Settings, config: EagleConfig, data: Data) -> dict[str, Any]:
    return dataclasses.asdict(settings.recipe) | {
        "variant": settings.variant,
        "head": repr(config),
        "start": settings.head.start,
        "data": f"sha256 {data.description['sha256'][:16]}",
    }


def _export(settings, target, frozen, config, result) -> None:
    """Writes the best weights; the first process does."""
    params = trainer.gather(result.best_params())
    if jax.process_index():
        return
    directory = Path(settings.output) / "export"
    head_files.save_head(
        directory, config, params.replace(draft_to_target=frozen.draft_to_target), target.config,
        layout=LAYOUTS[settings.format], dtype=settings.export_dtype,
        target_name=settings.target_name or str(settings.target),
        embedding=target.params.embedding if settings.format == "speculators" else None,
    )  # fmt: skip
    trainer.write_provenance(directory, result.provenance)


def main(argv: Sequence[str] | None = None) -> int:
    """The command; see ``trainer.run_command`` for its exit code."""
    argv = list(sys.argv[1:] if argv is None else argv)
    return trainer.run_command(
        settings_of(_variant(argv)), run, argv, module="training.distill_eagle",
        description="Distils an EAGLE head from a frozen target; run it again with the same "
        "options to resume.",
    )  # fmt: skip


def _variant(argv: Sequence[str]) -> str:
    """What --variant says, since it decides the defaults of the other options."""
    for word, following in zip(argv, [*argv[1:], ""], strict=True):
        name, _, value = word.partition("=")
        if name == "--variant" and (value or following) in VARIANTS:
            return value or following
    return Settings.variant


if __name__ == "__main__":
    sys.exit(main())

"""What the distilling scripts share: their options, and the run around a task."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from jspec.checkpoints.heads.head_formats import HeadConfig
from jspec.core.types import Array, Drafter
from jspec.engine import loading
from jspec.engine.loading import LoadedModel
from training import trainer
from training.acceptance import AcceptanceSettings, acceptance_meter
from training.data.loader import batches, held_out
from training.data.packing import token_counts
from training.data.settings import Data, DataSettings, open_data
from training.digests import weights_digest
from training.export import check, save
from training.objective import head_of
from training.slots import SlotRecipe
from training.task import Task
from training.trainer import TrainerSettings, bad_option, refuse_idle

Kind = TypeVar("Kind")


@dataclasses.dataclass(frozen=True, kw_only=True)
class DistillSettings:
    """Options of every distilling script, beside those of its parts.

    Attributes:
      target: model to draft for: a directory in Hugging Face layout, or a hub id
      output: folder of the run: checkpoints, logs, curves, and in export/ what was trained
      target_dtype: of the target's weights (auto: float32 on a CPU, else bfloat16)
      target_name: what the exported files call the target (default: as --target)
      eval_windows: held-out windows of an evaluation
      export_dtype: of the exported weights

    Raises:
      ValueError: a value is out of range; the message names option, value and remedy.
    """

    target: str
    output: str
    data: DataSettings
    acceptance: AcceptanceSettings = dataclasses.field(default_factory=AcceptanceSettings)
    trainer: TrainerSettings
    target_dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    target_name: str = ""
    eval_windows: int = 32
    export_dtype: Literal["bfloat16", "float32", "float16"] = "bfloat16"

    def __post_init__(self):
        for part, names in self.idle().items():
            usual = _usual(type(self), part)
            if usual is not None:
                refuse_idle(getattr(self, part) if part else self, usual, names)
        if self.eval_windows < 1:
            raise bad_option("eval_windows", self.eval_windows, "it must be at least 1")
        apart = self.data.held_out_share or self.data.held_out_data or self.data.held_out_modules
        if self.measures and not apart:
            remedy = "no data is held out: give --held-out-share 0.02, say, or do not measure (0)"
            raise bad_option("acceptance_prompts", self.acceptance.acceptance_prompts, remedy)

    def idle(self) -> dict[str, dict[str, str]]:
        """By part ("" for none): options that change nothing beside the others, with the remedy."""
        return {"trainer": self.trainer.idle()}

    @property
    def depth(self) -> int:
        """Tokens drafted to measure acceptance; 1 where it is not."""
        return self.acceptance.num_speculative_tokens if self.measures else 1

    @property
    def export_dir(self) -> Path:
        """Where the trained network goes."""
        return Path(self.output) / "export"

    @property
    def measures(self) -> bool:
        """Whether acceptance is asked for."""
        return self.acceptance.acceptance_prompts > 0


@dataclasses.dataclass(frozen=True)
class ParallelSettings:
    """What a drafter learns that guesses several tokens in one pass.

    Attributes:
      parallel: whether the drafter learns that; decides other defaults
      slots: which guesses are trained
      mask_token: id of the masks, which texts must not hold (default: the last one that the data
        does not)
    """

    parallel: bool = False
    slots: SlotRecipe = dataclasses.field(default_factory=SlotRecipe)
    mask_token: int = -1

    def check(self, depth: int) -> None:
        """Refuses what does not go together; ``depth`` tokens are drafted to measure acceptance.

        Raises:
          ValueError: the message names option, value and remedy.
        """
        if self.mask_token < -1:
            raise bad_option("mask_token", self.mask_token, "it must be a token's id")
        if not self.parallel:
            remedy = "only drafters trained with --parallel have it"
            refuse_idle(self, ParallelSettings(), {"mask_token": remedy})
            refuse_idle(self.slots, SlotRecipe(), dict.fromkeys(vars(self.slots), remedy))
        if self.parallel and depth > self.slots.depths:
            remedy = f"no more than --depths {self.slots.depths} tokens are guessed in one pass"
            raise bad_option("num_speculative_tokens", depth, remedy)


def asks_for_parallel(argv: Sequence[str]) -> bool:
    """What --parallel says, since it decides the defaults of other options."""
    said = [word for word in argv if word in ("--parallel", "--no-parallel")]
    return bool(said) and said[-1] == "--parallel"


def variant_of(argv: Sequence[str], variants: Sequence[str], default: str) -> str:
    """What --variant says, since it decides the defaults of the other options."""
    for word, following in zip(argv, [*argv[1:], ""], strict=True):
        name, _, value = word.partition("=")
        if name == "--variant" and (value or following) in variants:
            return value or following
    return default


def with_defaults(kind: type[Kind], **values: Any) -> type[Kind]:
    """The dataclass ``kind`` of options with other defaults for some of its fields."""
    types = {field.name: field.type for field in dataclasses.fields(kind)}
    parts = [(name, types[name], value) for name, value in values.items()]
    return dataclasses.make_dataclass(
        kind.__name__,
        parts,
        bases=(kind,),
        frozen=True,
        kw_only=True,
        namespace={"__doc__": kind.__doc__},
    )


def _usual(kind: type[DistillSettings], part: str) -> Any:
    """A part as the command has it where nobody says otherwise; None where all must be said."""
    if not part:
        return kind
    [field] = [field for field in dataclasses.fields(kind) if field.name == part]
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return None if field.default is dataclasses.MISSING else field.default


def open_target(settings: DistillSettings) -> tuple[LoadedModel, Data]:
    """The target and its data.

    Raises:
      ValueError: one of them cannot be read, or windows are longer than the target's positions.
    """
    trainer.start_processes(settings.trainer)
    dtype = settings.target_dtype
    if dtype == "auto":
        dtype = "float32" if jax.default_backend() == "cpu" else "bfloat16"
    target = loading.load(settings.target, dtype)
    length, most = settings.data.length, target.config.max_positions
    if length >= most:
        remedy = f"the target has {most} positions, and a window one token more; take fewer"
        raise bad_option("length", length, remedy)
    read = lambda: open_data(settings.data, target.tokenizer, target.config.vocab_size)
    return target, trainer.first_process_first(read)


def mask_token(given: int, data: Data, vocab_size: int) -> int:
    """The id for masks: the one ``given``, or where that is -1 the last one that no text holds.

    Raises:
      ValueError: the target has no such token, or the data holds every one.
    """
    if given >= vocab_size:
        raise bad_option("mask_token", given, f"the target has {vocab_size} tokens")
    if given >= 0:
        return given
    parts = [part for part in (data.train, data.held_out) if part is not None]
    counts = sum(token_counts(part, vocab_size, learned=False) for part in parts)
    unused = np.flatnonzero(counts == 0)
    if not unused.size:
        remedy = "every token of the target stands in the data; name one that texts can do without"
        raise bad_option("mask_token", given, remedy)
    return int(unused[-1])


def frequent_tokens(data: Data, count: int, vocab_size: int) -> Array | None:
    """The ``count`` tokens that are learned from most often, ascending int32; None for all."""
    if count == vocab_size:
        return None
    counts = token_counts(data.train, vocab_size)
    likeliest = np.argsort(-counts, kind="stable")[:count]
    return jnp.asarray(np.sort(likeliest), jnp.int32)


def export_of(
    settings: DistillSettings,
    target: LoadedModel,
    config: HeadConfig,
    format: str | None = None,
    finished: Callable[[Any], Any] = lambda params: params,
) -> Callable[[Any, Path], None]:
    """The ``export`` of a run that trains a draft head.

    Args:
      settings: of the run.
      target: the model that it drafts for.
      config: sizes of the head.
      format: as in ``training.export``; None for the most widely read one.
      finished: from trained weights to those of the head.

    Raises:
      ValueError: the format cannot express the head.
    """
    name = settings.target_name or settings.target
    check(config, target.config, format, name)

    def export(params: Any, directory: Path) -> None:
        save(
            directory,
            config,
            finished(params),
            target.config,
            format,
            target_name=name,
            embedding=target.params.embedding,
            output=head_of(target.params),
            dtype=settings.export_dtype,
        )

    return export


def distil(
    settings: DistillSettings,
    task: Task,
    frozen: Any,
    target: LoadedModel,
    data: Data,
    *,
    module: str,
    argv: Sequence[str],
    identity: Mapping[str, Any],
    drafter: Drafter,
    export: Callable[[Any, Path], None],
    weights_of: Callable[[Any], tuple[Any, Any]] | None = None,
    stop_after: int | None = None,
) -> trainer.Result:
    """Trains to the end or to a signal, measures acceptance on the way, exports a finished run.

    Args:
      settings: of the run.
      task: what is trained.
      frozen: what is not.
      target: the model that verifies.
      data: of ``open_target``.
      module: of the script, for the provenance.
      argv: words of the command line, for the provenance.
      identity: options of the script that a resumed run must share.
      drafter: how acceptance is measured.
      export: writes the best weights (the last ones, where nothing is held out), on the host, into
        a folder; called by one process.
      weights_of: from trained weights to those of target and drafter; None where they are the
        drafter's.
      stop_after: most steps of this call.
    """
    measure = None
    if settings.measures:
        meter = acceptance_meter(
            settings.acceptance, target.target, drafter, data.held_out, loading.text_ends(target)
        )
        weights_of = weights_of or (lambda params: (target.params, params))
        measure = lambda params: meter(*weights_of(params))
    criterion, idle = _criterion(settings, data), settings.idle().get("recipe", ())
    with trainer.progress(settings.trainer.steps) as bar:
        result = trainer.train(
            task,
            frozen,
            **_fed(settings, data),
            settings=settings.trainer,
            out=Path(settings.output),
            measure=measure,
            bar=bar,
            stop_after=stop_after,
            identity=dict(identity)
            | criterion
            | {
                "data": f"sha256 {data.description['sha256'][:16]}",
                "target": f"sha256 {weights_digest(target.params)}",
            },
            passed_over=lambda before: {*idle, *_untold(criterion, before)},
            facts=trainer.provenance(module, argv) | {"data": data.description},
            best=("acceptance_length", "max") if measure else ("heldout_loss", "min"),
        )
    if not result.finished:
        if jax.process_index() == 0:
            print(f"stopped and saved at step {result.step}; run the same command to resume")
        return result
    evaluated = result.record["best"] is not None
    params = trainer.gather(result.best_params() if evaluated else result.params)
    if jax.process_index() == 0:
        export(params, settings.export_dir)
        trainer.write_provenance(settings.export_dir, result.provenance)
    return result


def described(config: Any, start: Any | None) -> str:
    """Sizes of what is trained and the weights it starts from, to tell a run from another."""
    return repr(config) if start is None else f"{config!r} from sha256 {weights_digest(start)}"


def _criterion(settings: DistillSettings, data: Data) -> dict[str, Any]:
    """Options that decide which weights are best: with others, numbers would not compare."""
    if settings.measures:
        return dataclasses.asdict(settings.acceptance)
    apart = {} if data.held_out is None else {"eval_windows": settings.eval_windows}
    return {"acceptance_prompts": 0} | apart


def _untold(criterion: Mapping[str, Any], before: Mapping[str, Any]) -> set[str]:
    """Which options of the criterion a record of an earlier version does not tell: it holds whether
    acceptance was measured, and not how."""
    untold = criterion.keys() - before.keys()
    measured = criterion["acceptance_prompts"] and before.get("acceptance_prompts") == "some"
    return untold | ({"acceptance_prompts"} if measured else set())


def _fed(settings: DistillSettings, data: Data) -> dict[str, Any]:
    """Batches of this process, and those held out."""
    mine = {"process_index": jax.process_index(), "process_count": jax.process_count()}
    size, seed = settings.trainer.batch, settings.trainer.seed
    apart = ()
    if data.held_out is not None:
        part = size // settings.trainer.accumulate
        apart = held_out(data.held_out, batch=part, limit=settings.eval_windows, **mine)
    return {"batches": batches(data.train, batch=size, seed=seed, **mine), "held_out": apart}

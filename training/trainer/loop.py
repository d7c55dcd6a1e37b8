"""``train``: the training loop of all scripts."""

import contextlib
import dataclasses
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import grain
import jax

from training.data.batch import Batch
from training.trainer import mesh as meshes
from training.trainer.checkpointing import Checkpoints, drop_unfinished
from training.trainer.metrics import draw_curves
from training.trainer.programs import make_programs
from training.trainer.run import Run
from training.trainer.settings import EARLIER, TrainerSettings
from training.trainer.task import Task
from training.util.errors import Stopped, TrainingError
from training.util.locks import alone
from training.util.progress import Bar
from training.util.provenance import write_provenance


@dataclasses.dataclass(frozen=True)
class Result:
    """The outcome of ``train``."""

    params: Any  # the last weights, on the mesh; ``mesh.gather`` brings them to the host.
    step: int  # number of steps of the run so far
    finished: bool  # whether those are all steps of the settings
    signal: int | None  # number of the signal that stopped this call
    # ``identity``, ``segments`` (options of each part of the run), ``evaluations``, ``best`` (step
    # and value) and ``seconds``.
    record: dict
    provenance: dict  # content of the run's ``provenance.json``.
    # returns mean metrics of the last weights over batches.
    evaluate: Callable[[Iterable[Batch]], dict[str, float]]
    best_params: Callable[[], Any]  # reads the weights of the best checkpoint


def train(
    task: Task,
    frozen: Any,
    batches: grain.DatasetIterator[Batch],
    settings: TrainerSettings,
    *,
    out: Path,
    held_out: Iterable[Batch] = (),
    measure: Callable[[Any], dict[str, float]] | None = None,
    identity: Mapping[str, Any] | None = None,
    passed_over: Callable[[dict], Collection[str]] = lambda _: (),
    free: Mapping[str, Any] | None = None,
    facts: Mapping[str, Any] | None = None,
    best: tuple[str, Literal["min", "max"]] = ("heldout_loss", "min"),
    bar: Bar | None = None,
    stop_after: int | None = None,
) -> Result:
    """Start or resume a run to ``settings.steps``; SIGTERM and Ctrl-C save and return.

    ``out`` gets ``checkpoints/``, ``metrics.jsonl``, ``tensorboard/``, ``curves.png`` and
    ``provenance.json``. Errors leave the checkpoints whole.

    Args:
      task: the network and its loss.
      frozen: weights that are not trained, a pytree.
      batches: endless; the rows of every batch that belong to this process.
      settings: of the trainer.
      out: folder of the run, seen by all processes.
      held_out: batches of every evaluation.
      measure: host function of the weights, called at every evaluation; its values are logged.
      identity: options of the script that a resumed run must share, in JSON.
      passed_over: maps the identity of the run in ``out`` to names that may differ.
      free: options of the script that a resumed run may change.
      facts: additions to ``provenance.json``.
      best: metric of an evaluation by which the best checkpoint is kept.
      bar: called with (step, newest metrics).
      stop_after: maximum number of steps of this call.

    Raises:
      ValueError: ``out`` holds another run or is locked, or devices or data do not fit.
      TrainingError: a value is not finite, or data or memory ran out.
    """
    mesh, out, run = meshes.make_mesh(settings), Path(out), None
    known = settings.identity() | dict(identity or {})
    meshes.check_agreed(known)
    with contextlib.ExitStack() as stack:

        def lock() -> None:
            if jax.process_index() == 0:
                stack.enter_context(alone(out, folder=True))
                drop_unfinished(out / "checkpoints")

        meshes.together(lock)
        checkpoints = stack.enter_context(Checkpoints(out / "checkpoints", settings.keep, best))
        if checkpoints.latest is not None:
            before = EARLIER | checkpoints.record()["identity"]
            # Runs of earlier versions recorded the number of processes.
            ignored = {*settings.idle(), *passed_over(before), "num_processes"}
            _check_same_run(before, known, out, ignored)
        with explained(settings, lambda: "at the start" if run is None else run.where()):
            frozen = meshes.shard(frozen, mesh)
            programs = make_programs(task, frozen, settings, mesh)
            run = Run(
                settings,
                mesh,
                programs,
                frozen,
                batches,
                checkpoints,
                out,
                held_out,
                measure,
                best,
                bar,
            )
            processes = {"num_processes": jax.process_count()}
            run.begin(known, settings.free() | processes | dict(free or {}))
            run.go(stop_after)
    return _result(run, dict(facts or {}))


def check_stopped(result: Result) -> None:
    """Raise ``Stopped`` if a signal ended the run before its last step.

    A command thus ends with an exit code that stops the scripts after it.
    """
    if not result.finished and result.signal is not None:
        message = f"stopped and saved at step {result.step}; run the same command to resume"
        raise Stopped(result.signal, message if jax.process_index() == 0 else "")


def _result(run: Run, facts: dict[str, Any]) -> Result:
    """Return the outcome, and write curves and provenance."""

    def best_params() -> Any:
        if run.record["best"] is None:
            raise ValueError("no checkpoint is the best: nothing was evaluated; give held_out")
        with Checkpoints(run.out / "checkpoints", run.settings.keep, run.best) as checkpoints:
            return checkpoints.restore_best(run.programs.layout).params

    provenance = facts | {
        "parameters": sum(leaf.size for leaf in jax.tree.leaves(run.state.params)),
        "steps": run.step,
        "mesh": dict(run.mesh.shape),
        **{name: run.record[name] for name in ("seconds", "segments", "evaluations", "best")},
    }
    if jax.process_index() == 0:
        draw_curves(run.out)
        write_provenance(run.out, provenance)
    return Result(
        run.state.params,
        run.step,
        run.step >= run.settings.steps,
        run.signal,
        run.record,
        provenance,
        run.evaluate,
        best_params,
    )


def _check_same_run(before: dict, identity: dict, out: Path, ignored: Collection[str]) -> None:
    """Raise ValueError if the run in ``out`` had other options."""
    in_json = {n: list(v) if isinstance(v, tuple) else v for n, v in identity.items()}
    changed = [
        f"--{name.replace('_', '-')} {identity.get(name)!r} (was {before.get(name)!r})"
        for name in identity | before
        if name not in ignored and in_json.get(name) != before.get(name)
    ]
    if changed:
        raise ValueError(f"{out.name!r} holds another run: {', '.join(changed)}; give a new folder")


@contextlib.contextmanager
def explained(settings: TrainerSettings, where: Callable[[], str]) -> Iterator[None]:
    """Turn exhausted memory of a device or the host into a ``TrainingError``.

    ``where`` returns the progress of the run, for the message.
    """
    try:
        yield
    except (jax.errors.JaxRuntimeError, MemoryError) as error:
        if not isinstance(error, MemoryError) and "RESOURCE_EXHAUSTED" not in str(error):
            raise
        raise TrainingError(
            f"out of memory {where()}; give more --accumulate (was {settings.accumulate}), a "
            f"smaller --batch (was {settings.batch}), or spread the weights over more devices "
            f"(--fsdp, was {settings.fsdp}; --tensor splits a target too, was {settings.tensor})"
        ) from error

"""``train``: the one training loop of all scripts."""

import contextlib
import dataclasses
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from typing import Any, Literal

import grain
import jax

from training.batches import Batch
from training.locks import alone
from training.task import Task
from training.trainer import mesh as meshes
from training.trainer.checkpointing import Checkpoints
from training.trainer.curves import draw_curves
from training.trainer.errors import explained
from training.trainer.programs import make_programs
from training.trainer.progress import Bar
from training.trainer.provenance import write_provenance
from training.trainer.run import Run
from training.trainer.settings import TrainerSettings


@dataclasses.dataclass(frozen=True)
class Result:
    """A run as ``train`` leaves it.

    Attributes:
      params: the last weights, on the mesh; ``mesh.gather`` brings them to the host.
      step: steps done in all.
      finished: whether that is all the settings ask for.
      record: what the checkpoints know: ``identity``, ``segments`` (what each resumed part of the
        run was given), ``evaluations``, ``best`` (step and value), ``seconds``.
      provenance: what ``provenance.json`` of the run says.
      evaluate: mean metrics of the last weights over batches.
      best_params: reads the weights of the best checkpoint.
    """

    params: Any
    step: int
    finished: bool
    record: dict
    provenance: dict
    evaluate: Callable[[Iterable[Batch]], dict[str, float]]
    best_params: Callable[[], Any]


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
    """Runs, or resumes, a run to ``settings.steps``; SIGTERM and Ctrl-C save and return.

    ``out`` gets ``checkpoints/``, ``metrics.jsonl``, ``tensorboard/``, ``curves.png`` and
    ``provenance.json``; of several processes only the first writes the latter four.

    Args:
      task: the network and its loss.
      frozen: weights that are not trained, a pytree; () for none.
      batches: endless; each process's own rows of every batch.
      settings: of the trainer.
      out: folder of the run, seen by all processes.
      held_out: batches gone through at every evaluation.
      measure: host function of the weights, run at every evaluation by all processes; its values
        are logged by name (the bar shows ``acceptance_length``).
      identity: options of the script that a resumed run must share, in JSON.
      passed_over: from the identity of a run in ``out`` to those names in which a run that resumes
        it may differ all the same.
      free: options of the script that it may change.
      facts: what ``provenance.json`` says beside what the trainer knows.
      best: metric of an evaluation by which the best checkpoint is kept.
      bar: called with (step, newest metrics).
      stop_after: most steps of this call.

    Raises:
      ValueError: ``out`` holds another run, or another process is at it; the devices or the data
        do not fit the settings.
      TrainingError: a value is not finite, the data or the memory ran out; checkpoints are whole.
    """
    mesh, out, run = meshes.make_mesh(settings), Path(out), None
    known = settings.identity() | {"num_processes": jax.process_count()} | dict(identity or {})
    with contextlib.ExitStack() as held:
        if jax.process_index() == 0:
            held.enter_context(alone(out))
        checkpoints = held.enter_context(Checkpoints(out / "checkpoints", settings.keep, best))
        unlike = lambda before: {*settings.idle(), *passed_over(before)}
        _refuse_another_run(checkpoints, known, out, unlike)
        checkpoints.drop_unfinished()
        with explained(settings, lambda: "at the start" if run is None else run.place()):
            frozen = meshes.place(frozen, mesh)
            programs = make_programs(task, frozen, settings, mesh)
            how = (held_out, measure, best, bar)
            run = Run(settings, mesh, programs, frozen, batches, checkpoints, out, *how)
            run.begin(known, settings.free() | dict(free or {}))
            last = settings.steps if stop_after is None else run.step + stop_after
            run.go(min(last, settings.steps))
    return _result(run, dict(facts or {}))


def _result(run: Run, facts: dict[str, Any]) -> Result:
    """What a run leaves, written beside it too."""

    def best_params() -> Any:
        if run.record["best"] is None:
            raise ValueError("no checkpoint is the best: nothing was evaluated; give held_out")
        with Checkpoints(run.out / "checkpoints", run.settings.keep, run.best) as checkpoints:
            return checkpoints.restore_best(run.programs.layout).params

    provenance = facts | _facts(run)
    if jax.process_index() == 0:
        draw_curves(run.out)
        write_provenance(run.out, provenance)
    return Result(
        run.state.params,
        run.step,
        run.step >= run.settings.steps,
        run.record,
        provenance,
        run.evaluate,
        best_params,
    )


def _refuse_another_run(
    checkpoints: Checkpoints,
    identity: dict,
    out: Path,
    passed_over: Callable[[dict], Collection[str]],
) -> None:
    if checkpoints.latest is None:
        return
    before = checkpoints.record()["identity"]
    compared = [name for name in identity | before if name not in passed_over(before)]
    plain = lambda value: (
        list(value) if isinstance(value, tuple) else value
    )  # as JSON gives it back
    changed = [
        f"--{name.replace('_', '-')} {identity.get(name)!r} (was {before.get(name)!r})"
        for name in compared
        if plain(identity.get(name)) != before.get(name)
    ]
    if changed:
        raise ValueError(f"{out.name!r} holds another run: {', '.join(changed)}; give a new folder")


def _facts(run: Run) -> dict[str, Any]:
    """What the trainer knows of a run."""
    leaves = jax.tree.leaves(run.state.params)
    return {
        "parameters": sum(leaf.size for leaf in leaves),
        "steps": run.step,
        "mesh": dict(run.mesh.shape),
        "seconds": run.record["seconds"],
        "segments": run.record["segments"],
        "evaluations": run.record["evaluations"],
        "best": run.record["best"],
    }

"""Orbax checkpoints of a run: weights, optimiser, position in the data, and a record in JSON."""

import contextlib
import hashlib
import json
import shutil
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import grain
import grain.checkpoint
import jax
import orbax.checkpoint as ocp
from orbax.checkpoint import checkpoint_managers as policies

from training.trainer.programs import TrainState
from training.util.digests import tree_digest
from training.util.errors import TrainingError
from training.util.stored_layers import from_stored, to_stored

# Files of every whole checkpoint. Orbax deletes files in any order, and never one that lacks these.
_MARKS = ("_CHECKPOINT_METADATA", "metrics/metrics")
_DIGESTS = "digests"  # key of a record: digests of the state, and of record and data position


def drop_unfinished(directory: Path) -> None:
    """Delete unfinished saves and deletions of a killed run; no other run may write here."""
    steps = [path for path in directory.glob("*") if path.name.isdigit()]
    older = sorted(steps, key=lambda path: int(path.name))[:-1]
    partial = [path for path in older if not all((path / mark).exists() for mark in _MARKS)]
    for path in [*directory.glob(f"*{ocp.utils.TMP_DIR_SUFFIX}*"), *partial]:
        shutil.rmtree(path)


class Checkpoints:
    """The checkpoints of one run: the newest ones and the best one.

    A save is written in the background and appears whole (by a rename) or not at all. The ``keep``
    newest checkpoints stay, and the best by a metric, of which ``min`` or ``max`` is best.
    """

    def __init__(
        self,
        directory: Path,
        keep: int = 2,
        best: tuple[str, Literal["min", "max"]] = ("heldout_loss", "min"),
    ):
        self._name, mode = best
        self._worst = float("inf") if mode == "min" else -float("inf")
        metric_of = lambda metrics: metrics[self._name]
        # BestN keeps the last of its order.
        one_best = policies.BestN(get_metric_fn=metric_of, reverse=mode == "min", n=1)
        preserved = policies.AnyPreservationPolicy([policies.LatestN(keep), one_best])
        options = ocp.CheckpointManagerOptions(
            preservation_policy=preserved, best_fn=metric_of, best_mode=mode
        )
        self._directory = directory
        self._check_metrics()
        self._manager = ocp.CheckpointManager(directory.absolute(), options=options)

    @property
    def latest(self) -> int | None:
        """Step of the newest whole checkpoint."""
        return self._manager.latest_step()

    @property
    def best(self) -> int | None:
        """Step of the best checkpoint; of any if the metric was never given."""
        return self._manager.best_step()

    @property
    def steps(self) -> tuple[int, ...]:
        """Steps of all checkpoints, ascending."""
        return tuple(sorted(self._manager.all_steps()))

    def save(
        self,
        step: int,
        state: TrainState,
        record: dict,
        batches: grain.DatasetIterator,
        metrics: dict[str, float] | None = None,
    ) -> None:
        """Start to write checkpoint ``step``, after an unfinished save.

        On return the values are copied: ``state`` may be donated and ``batches`` may advance.
        """
        digests = {"state": tree_digest(state), "record": _record_digest(record, batches)}
        args = ocp.args.Composite(
            state=ocp.args.StandardSave(to_stored(state)),
            record=ocp.args.JsonSave(record | {_DIGESTS: digests}),
            batches=grain.checkpoint.CheckpointSave(batches),
        )
        value = {self._name: (metrics or {}).get(self._name, self._worst)}
        with self._saving():
            self._manager.save(step, args=args, metrics=value, force=True)

    def restore(self, layout: TrainState, batches: grain.DatasetIterator) -> TrainState:
        """Return the newest state, in the shapes, dtypes and shardings of ``layout``.

        ``batches`` is set to its position. The mesh and the processes may differ from those that
        saved.
        """
        step = self.latest
        state, record = self._state(step, layout)
        self._move(batches, step)
        digest = record.pop(_DIGESTS, {}).get("record")
        if digest not in (None, _record_digest(record, batches)):
            raise self._damaged(step, "its record or its position in the data has changed")
        return state

    def _move(self, batches: grain.DatasetIterator, step: int) -> None:
        """Set the position in the data, which all processes share: each counts batches."""
        try:
            (file,) = (self._directory / str(step) / "batches").glob("process_0-of-*.json")
            batches.set_state(json.loads(file.read_bytes()))
        except Exception as error:  # many kinds, from several libraries
            raise self._damaged(step, f"its position in the data: {error}") from error

    def restore_best(self, layout: TrainState) -> TrainState:
        """Return the best state; see ``restore``."""
        return self._state(self.best, layout)[0]

    def record(self) -> dict:
        """Return the record of the newest checkpoint."""
        record = self._read(self.latest, record=ocp.args.JsonRestore())["record"]
        record.pop(_DIGESTS, None)
        return record

    def _state(self, step: int, layout: TrainState) -> tuple[TrainState, dict]:
        """Return state and record of a checkpoint."""
        read = self._read(
            step,
            state=ocp.args.StandardRestore(to_stored(layout)),
            record=ocp.args.JsonRestore(),
        )
        # Earlier versions recorded no digests.
        digest = read["record"].get(_DIGESTS, {}).get("state")
        if digest not in (None, tree_digest(read["state"])):
            raise self._damaged(step, "its values are not those that were saved")
        return from_stored(read["state"]), read["record"]

    def _read(self, step: int, **parts: Any) -> Any:
        try:
            with _quiet_late_reads():
                return self._manager.restore(step, args=ocp.args.Composite(**parts))
        except (jax.errors.JaxRuntimeError, MemoryError):
            raise  # the devices' errors
        except Exception as error:  # many kinds, from several libraries
            raise self._damaged(step, error) from error

    def _check_metrics(self) -> None:
        """Check the metrics of all checkpoints, which the manager reads when it is made."""
        for path in sorted(self._directory.glob("*/metrics/metrics")):
            step = path.parts[-3]
            try:
                json.loads(path.read_bytes())
            except ValueError as error:
                raise self._damaged(int(step), error) from error

    def _damaged(self, step: int, cause: Any) -> ValueError:
        """Return the error of a damaged checkpoint, with the one to go on from."""
        folders = [path for path in self._directory.glob("*") if path.name.isdigit()]
        before = [int(path.name) for path in folders if int(path.name) < step]
        remedy = f"go on from checkpoint {max(before)}" if before else "start again"
        cause = textwrap.shorten(str(cause) or type(cause).__name__, 160)
        return ValueError(
            f"checkpoint {step} is damaged ({cause}); "
            f"delete the folder {str(self._directory / str(step))!r} to {remedy}"
        )

    @contextlib.contextmanager
    def _saving(self) -> Iterator[None]:
        """Turn a failure to write into a ``TrainingError``."""
        try:
            yield
        except (jax.errors.JaxRuntimeError, MemoryError):
            raise  # the devices' errors
        except Exception as error:  # many kinds, from several libraries
            cause = textwrap.shorten(str(error) or type(error).__name__, 160)
            raise TrainingError(
                f"a checkpoint cannot be saved in {str(self._directory)!r} ({cause}); make room "
                "there, and run the same command to resume from the one before"
            ) from error

    def close(self) -> None:
        """Wait for unfinished saves."""
        try:
            with self._saving():
                self._manager.wait_until_finished()
        finally:
            with contextlib.suppress(Exception):  # the same failure again
                self._manager.close()

    def __enter__(self):
        return self

    def __exit__(self, kind, *error):
        with contextlib.suppress(*([TrainingError] if kind else [])):  # keep the first error
            self.close()


@contextlib.contextmanager
def _quiet_late_reads() -> Iterator[None]:
    """Leave out of stderr the reads that end after the first one failed, for good if one fails.

    Orbax closes their event loop, and Python prints a traceback for each of them.
    """
    usual = sys.unraisablehook

    def hook(event: Any) -> None:
        if str(event.exc_value) != "Event loop is closed":
            usual(event)

    sys.unraisablehook = hook
    yield
    sys.unraisablehook = usual


def _record_digest(record: dict, batches: grain.DatasetIterator) -> str:
    """Return a hash of a record and of the position in the data."""
    text = json.dumps([record, batches.get_state()], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]

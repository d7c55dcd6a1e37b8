"""Orbax checkpoints of a run: weights, optimiser, position in the data, and a record in JSON."""

import shutil
from pathlib import Path
from typing import Any, Literal

import grain
import grain.checkpoint
import jax
import orbax.checkpoint as ocp
from orbax.checkpoint import checkpoint_managers as policies

from training.trainer.programs import TrainState


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
        self._directory = directory.absolute()
        self._manager = ocp.CheckpointManager(self._directory, options=options)

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

    def drop_unfinished(self) -> None:
        """Delete unfinished saves of a killed run; no other run may write here."""
        if jax.process_index() == 0:
            for path in self._directory.glob(f"*{ocp.utils.TMP_DIR_SUFFIX}*"):
                shutil.rmtree(path)

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
        args = ocp.args.Composite(
            state=ocp.args.StandardSave(state),
            record=ocp.args.JsonSave(record),
            batches=grain.checkpoint.CheckpointSave(batches),
        )
        value = {self._name: (metrics or {}).get(self._name, self._worst)}
        self._manager.save(step, args=args, metrics=value, force=True)

    def restore(self, layout: TrainState, batches: grain.DatasetIterator) -> TrainState:
        """Return the newest state, in the shapes, dtypes and shardings of ``layout``.

        ``batches`` is set to its position. The mesh may differ from the one that saved.
        """
        state = ocp.args.StandardRestore(layout)
        position = grain.checkpoint.CheckpointRestore(batches)
        return self._read(self.latest, state=state, batches=position)["state"]

    def restore_best(self, layout: TrainState) -> TrainState:
        """Return the best state; see ``restore``."""
        return self._read(self.best, state=ocp.args.StandardRestore(layout))["state"]

    def record(self) -> dict:
        """Return the record of the newest checkpoint."""
        return self._read(self.latest, record=ocp.args.JsonRestore())["record"]

    def _read(self, step: int, **parts: Any) -> Any:
        return self._manager.restore(step, args=ocp.args.Composite(**parts))

    def close(self) -> None:
        """Wait for unfinished saves."""
        try:
            self._manager.wait_until_finished()
        finally:
            self._manager.close()

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.close()

"""Orbax checkpoints of a training run: the whole state, and the settings it was made with."""

from pathlib import Path
from typing import Any

import orbax.checkpoint as ocp


class Checkpoints:
    """The checkpoints of one run. A save appears whole (by a rename) or not at all."""

    def __init__(self, directory: Path, keep: int = 2):
        options = ocp.CheckpointManagerOptions(max_to_keep=keep, enable_async_checkpointing=False)
        self._manager = ocp.CheckpointManager(directory.absolute(), options=options)

    @property
    def latest(self) -> int | None:
        """Step of the newest whole checkpoint."""
        return self._manager.latest_step()

    def save(self, step: int, state: Any, record: dict) -> None:
        """Writes ``state`` (a pytree) and ``record`` (JSON) as checkpoint ``step``."""
        args = ocp.args.Composite(
            state=ocp.args.StandardSave(state), record=ocp.args.JsonSave(record)
        )
        self._manager.save(step, args=args, force=True)
        self._manager.wait_until_finished()

    def restore(self, like: Any) -> tuple[Any, dict]:
        """The newest state, in the structure, shapes and dtypes of ``like``, and its record."""
        args = ocp.args.Composite(
            state=ocp.args.StandardRestore(like), record=ocp.args.JsonRestore()
        )
        restored = self._manager.restore(self.latest, args=args)
        return restored["state"], restored["record"]

    def record(self) -> dict:
        """The record of the newest checkpoint alone."""
        args = ocp.args.Composite(record=ocp.args.JsonRestore())
        return self._manager.restore(self.latest, args=args)["record"]

    def close(self) -> None:
        """Waits for whatever is under way."""
        self._manager.close()

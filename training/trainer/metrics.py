"""Metrics on their way to the host, and the log that they end in."""

import json
from pathlib import Path
from typing import Any

import jax


class Means:
    """Weighted means of metrics, read from the device one step late.

    The host waits for the metrics of a step only once the next one runs, so the device never waits
    for the host, and the host never runs further ahead than that.

    Args:
      ahead: whether it runs ahead at all.
    """

    def __init__(self, ahead: bool = True):
        self._ahead = ahead
        self._waiting: tuple[dict, float] | None = None
        self._sums: dict[str, float] = {}
        self._weight = 0.0

    def add(self, metrics: dict[str, Any], weight: float = 1.0) -> dict[str, float] | None:
        """Takes in scalars still on the device; returns the values of the ``add`` before."""
        before = self.flush()
        self._waiting = metrics, weight
        if not self._ahead:
            jax.block_until_ready(metrics)
        return before

    def flush(self) -> dict[str, float] | None:
        """Waits for the last ``add`` and returns its values; None where they were read before."""
        if self._waiting is None:
            return None
        (metrics, weight), self._waiting = self._waiting, None
        values = {name: float(value) for name, value in jax.device_get(metrics).items()}
        for name, value in values.items():
            self._sums[name] = self._sums.get(name, 0.0) + weight * value
        self._weight += weight
        return values

    def take(self) -> dict[str, float]:
        """The means since the last ``take``, of what has been read."""
        means = {name: value / self._weight for name, value in self._sums.items()}
        self._sums, self._weight = {}, 0.0
        return means


class Log:
    """``metrics.jsonl``, a line an entry, and the same for TensorBoard in ``tensorboard/``.

    Lines of steps after ``step``, left by a run that was killed, are dropped. With ``write`` False
    nothing is written: only one of several processes does.
    """

    def __init__(self, directory: Path, step: int, write: bool = True):
        self._file = self._board = None
        if not write:
            return
        from tensorboardX import SummaryWriter  # late: where torch is installed, it loads that

        directory.mkdir(parents=True, exist_ok=True)
        path = directory / "metrics.jsonl"
        kept = [line for line in read_log(path) if line["step"] <= step]
        fresh = path.with_suffix(".tmp")
        fresh.write_text("".join(json.dumps(line) + "\n" for line in kept))
        fresh.replace(path)
        self._file = path.open("a")
        self._board = SummaryWriter(
            str(directory / "tensorboard"), purge_step=step + 1, flush_secs=30
        )

    def write(self, entry: dict[str, float]) -> None:
        """Adds an entry, with its ``step``."""
        if self._file is None:
            return
        self._file.write(json.dumps(entry) + "\n")
        self._file.flush()
        for name, value in entry.items():
            if name != "step":
                self._board.add_scalar(name, value, entry["step"])

    def close(self) -> None:
        """Writes out what is left."""
        if self._file is not None:
            self._file.close()
            self._board.close()


def read_log(path: Path) -> list[dict]:
    """The whole lines of a ``metrics.jsonl``; none where there is no file."""
    if not path.exists():
        return []
    lines = path.read_text().split("\n")[:-1]  # what no line break ends was cut off by a kill
    return [json.loads(line) for line in lines]

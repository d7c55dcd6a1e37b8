"""Metrics on their way to the host, and the log that they end in."""

import json
from pathlib import Path
from typing import Any

import jax

from training.task import Ratio


class Means:
    """Weighted means of metrics, read from the device one step late.

    The host waits for the metrics of a step only once the next one runs, so the device never waits
    for the host, and the host never runs further ahead than that. A ``Ratio`` is divided once what
    is averaged has been added up; where no row counted, it is left out.

    Args:
      ahead: whether it runs ahead at all.
    """

    def __init__(self, ahead: bool = True):
        self._ahead = ahead
        self._waiting: tuple[dict, float] | None = None
        self._sums: dict[str, tuple[float, float]] = {}  # totals, and what they are divided by

    def add(self, metrics: dict[str, Any], weight: float = 1.0) -> dict[str, float] | None:
        """Takes in metrics still on the device; returns the values of the ``add`` before."""
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
        parts = {name: _parts(value) for name, value in jax.device_get(metrics).items()}
        for name, (total, count) in parts.items():
            total_before, count_before = self._sums.get(name, (0.0, 0.0))
            self._sums[name] = total_before + weight * total, count_before + weight * count
        return _divided(parts)

    def take(self) -> dict[str, float]:
        """The means since the last ``take``, of what has been read."""
        means, self._sums = _divided(self._sums), {}
        return means


def _parts(value: Any) -> tuple[float, float]:
    """What a metric is a fraction of: numerator and denominator."""
    if isinstance(value, Ratio):
        return float(value.total), float(value.count)
    return float(value), 1.0


def _divided(parts: dict[str, tuple[float, float]]) -> dict[str, float]:
    return {name: total / count for name, (total, count) in parts.items() if count}


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

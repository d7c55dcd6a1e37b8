"""Metrics of a run: means on the host, the log, and its curves."""

import contextlib
import json
from pathlib import Path
from typing import Any

import jax

from jspec.util import atomic_files
from training.trainer.task import Ratio

_NOT_DRAWN = ("step", "seconds", "tokens_per_second", "objective", "learning_rate", "grad_norm")


class Means:
    """Weighted means of metrics, read from the device one step late.

    The host reads the metrics of a step while the next step runs, so the device never waits for
    the host, and the host is at most one step ahead. A ``Ratio`` is divided after all sums; if no
    row counts, it is left out. With ``ahead=False`` the host waits for every step.
    """

    def __init__(self, ahead: bool = True):
        self._ahead = ahead
        self._waiting: tuple[dict, float] | None = None
        self._sums: dict[str, tuple[float, float]] = {}  # totals and their divisors

    def add(self, metrics: dict[str, Any], weight: float = 1.0) -> dict[str, float] | None:
        """Add metrics that are still on the device; return the values of the ``add`` before."""
        before = self.flush()
        self._waiting = metrics, weight
        if not self._ahead:
            jax.block_until_ready(metrics)
        return before

    def flush(self) -> dict[str, float] | None:
        """Wait for the last ``add`` and return its values; None if they were read before."""
        if self._waiting is None:
            return None
        (metrics, weight), self._waiting = self._waiting, None
        parts = {name: _fraction(value) for name, value in jax.device_get(metrics).items()}
        for name, (total, count) in parts.items():
            total_before, count_before = self._sums.get(name, (0.0, 0.0))
            self._sums[name] = total_before + weight * total, count_before + weight * count
        return _divided(parts)

    def take(self) -> dict[str, float]:
        """Return the means since the last ``take``."""
        means, self._sums = _divided(self._sums), {}
        return means


def _fraction(value: Any) -> tuple[float, float]:
    """Return numerator and denominator of a metric."""
    if isinstance(value, Ratio):
        return float(value.total), float(value.count)
    return float(value), 1.0


def _divided(parts: dict[str, tuple[float, float]]) -> dict[str, float]:
    return {name: total / count for name, (total, count) in parts.items() if count}


class Log:
    """``metrics.jsonl``, one line an entry, and the same for TensorBoard in ``tensorboard/``.

    Lines after ``step``, left by a run that was killed, are dropped. Processes with ``write=False``
    write nothing.
    """

    def __init__(self, directory: Path, step: int, write: bool = True):
        self._file = self._board = None
        if not write:
            return
        from tensorboardX import SummaryWriter  # late: it imports torch if that is installed

        directory.mkdir(parents=True, exist_ok=True)
        path = directory / "metrics.jsonl"
        lines = [line for line in read_log(path) if line["step"] <= step]
        whole = "".join(json.dumps(line) + "\n" for line in lines)
        atomic_files.write(path, whole.encode())
        self._file = path.open("a")
        folder = str(directory / "tensorboard")
        self._board = SummaryWriter(folder, purge_step=step + 1, flush_secs=30)

    def write(self, entry: dict[str, float]) -> None:
        """Add an entry, with its ``step``."""
        if self._file is None:
            return
        self._file.write(json.dumps(entry) + "\n")
        self._file.flush()
        for name, value in entry.items():
            if name != "step":
                self._board.add_scalar(name, value, entry["step"])

    def close(self) -> None:
        """Write what is buffered for TensorBoard; lines of the log are written already."""
        if self._file is not None:
            for writer in (self._file, self._board):
                with contextlib.suppress(OSError):  # A full disk has stopped the run before.
                    writer.close()


def read_log(path: Path) -> list[dict]:
    """Return the whole lines of a ``metrics.jsonl``; none if there is no file."""
    if not path.exists():
        return []
    lines = path.read_text().split("\n")[:-1]  # a kill cuts a line before its line break
    return [json.loads(line) for line in lines]


def draw_curves(directory: Path) -> None:
    """Draw the log of a run as ``curves.png``: one panel a metric, with held-out values."""
    log = read_log(directory / "metrics.jsonl")
    names = dict.fromkeys(name for entry in log for name in entry if name not in _NOT_DRAWN)
    panels = list(dict.fromkeys(name.removeprefix("heldout_") for name in names))
    if not panels:
        return
    from matplotlib.figure import Figure  # late: slow, and needed once

    width, height = 5 * len(panels), 3.5  # inches, as are the margins
    figure = Figure(figsize=(width, height))
    # Fixed margins: matplotlib's own layouts draw the figure several times to measure the labels.
    figure.subplots_adjust(0.7 / width, 0.5 / height, 1 - 0.1 / width, 1 - 0.3 / height, 0.2)
    for axes, panel in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
        for name, label in ((panel, "training"), (f"heldout_{panel}", "held out")):
            points = [(entry["step"], entry[name]) for entry in log if name in entry]
            if points:
                many = len(points) > 20
                axes.plot(*zip(*points, strict=True), label=label, marker="" if many else ".")
        axes.set_title(panel.replace("_", " "), y=1)
        axes.set_xlabel("step")
        axes.grid(alpha=0.3)
        axes.legend()
    figure.savefig(directory / "curves.png", dpi=120)

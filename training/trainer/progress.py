"""The progress of a run on the terminal."""

import contextlib
import sys
from collections.abc import Callable, Iterator

import jax
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

Bar = Callable[[int, dict[str, float]], None]
# Metrics that are shown, under what name, and how.
_SHOWN = {
    "loss": "loss {:.3f}",
    "heldout_loss": "held out {:.3f}",
    "acceptance_length": "acceptance length {:.2f}",
    "tokens_per_second": "{:,.0f} tokens/s",
}
_EVALUATED = ("heldout_loss", "acceptance_length")


@contextlib.contextmanager
def progress(steps: int) -> Iterator[Bar | None]:
    """A bar on stderr with the newest metrics and the time left; lines where that is no terminal.

    Of several processes only the first has one. ``steps`` are those of the whole run.
    """
    console = Console(stderr=True)
    if jax.process_index():
        yield None
    elif not console.is_terminal:
        yield _Lines(steps)
    else:
        columns = (
            TextColumn("training"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[shown]}"),
        )
        with Progress(*columns, console=console) as bar:
            yield _Moving(bar, bar.add_task("training", total=steps, shown=""))


class _Moving:
    def __init__(self, bar: Progress, task):
        self._bar, self._task, self._begun = bar, task, False

    def __call__(self, step: int, metrics: dict[str, float]) -> None:
        if not self._begun:  # steps of an earlier part of the run do not count as done just now
            self._bar.reset(self._task, completed=step)
            self._begun = True
        self._bar.update(self._task, completed=step, shown=_words(metrics))


class _Lines:
    """A line wherever a held-out loss or a measurement is new."""

    def __init__(self, steps: int):
        self._steps, self._seen = steps, []

    def __call__(self, step: int, metrics: dict[str, float]) -> None:
        new = [value for name, value in metrics.items() if name in _EVALUATED]
        if new != self._seen:
            self._seen = new
            print(f"step {step} of {self._steps}  {_words(metrics)}", file=sys.stderr, flush=True)


def _words(metrics: dict[str, float]) -> str:
    return "  ".join(text.format(metrics[name]) for name, text in _SHOWN.items() if name in metrics)

"""Progress bars on the terminal."""

import contextlib
import sys
from collections.abc import Callable, Iterator

import jax
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

Update = Callable[[float, str, bool], None]  # (done, text, whether a log gets a line)
Bar = Callable[[int, dict[str, float]], None]  # (step, newest metrics)
# Metrics of a run that are shown, with their format.
_SHOWN = {
    "loss": "loss {:.3f}",
    "heldout_loss": "held out {:.3f}",
    "acceptance_length": "acceptance length {:.2f}",
    "tokens_per_second": "{:,.0f} tokens/s",
}
_EVALUATED = ("heldout_loss", "acceptance_length")


@contextlib.contextmanager
def progress(label: str, total: float, *, counted: bool = True) -> Iterator[Update]:
    """Show a bar on stderr; if that is no terminal, print a line at marked updates.

    Only the first of several processes shows anything. The time left is estimated from the first
    update on, so that work of an earlier run does not count. Bars that are not ``counted`` show a
    text and no amounts.
    """
    console = Console(stderr=True)
    begun, shows = False, jax.process_index() == 0
    columns = [TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn()]
    if counted:
        columns.insert(2, MofNCompleteColumn())
    columns.append(TextColumn("{task.fields[text]}"))
    quiet = not (shows and console.is_terminal)
    with Progress(*columns, console=console, transient=not counted, disable=quiet) as bar:
        task = bar.add_task(label, total=total, text="")

        def update(done: float, text: str = "", line: bool = False) -> None:
            nonlocal begun
            if not begun:
                bar.reset(task, completed=done)
                begun = True
            bar.update(task, completed=done, text=text)
            if line and shows and not console.is_terminal:
                print(f"{label}: {done} of {total}  {text}", file=sys.stderr, flush=True)

        yield update


@contextlib.contextmanager
def run_progress(label: str, steps: int) -> Iterator[Bar]:
    """Show ``steps`` steps with the newest metrics; a log gets a line for each evaluation."""
    before: list[float] = []
    with progress(label, steps) as update:

        def show(step: int, metrics: dict[str, float]) -> None:
            evaluated = [value for name, value in metrics.items() if name in _EVALUATED]
            shown = (form.format(metrics[name]) for name, form in _SHOWN.items() if name in metrics)
            update(step, "  ".join(shown), evaluated != before)
            before[:] = evaluated

        yield show

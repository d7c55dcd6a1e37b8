"""The progress bar of a run."""

import contextlib
from collections.abc import Callable, Iterator

from training import progress as bars

Bar = Callable[[int, dict[str, float]], None]
# Metrics that are shown, with their format.
_SHOWN = {
    "loss": "loss {:.3f}",
    "heldout_loss": "held out {:.3f}",
    "acceptance_length": "acceptance length {:.2f}",
    "tokens_per_second": "{:,.0f} tokens/s",
}
_EVALUATED = ("heldout_loss", "acceptance_length")


@contextlib.contextmanager
def progress(label: str, steps: int) -> Iterator[Bar]:
    """Show ``steps`` steps with the newest metrics; a log gets a line for each evaluation."""
    before: list[float] = []
    with bars.progress(label, steps) as update:

        def show(step: int, metrics: dict[str, float]) -> None:
            evaluated = [value for name, value in metrics.items() if name in _EVALUATED]
            shown = (form.format(metrics[name]) for name, form in _SHOWN.items() if name in metrics)
            update(step, "  ".join(shown), evaluated != before)
            before[:] = evaluated

        yield show

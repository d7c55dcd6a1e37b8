"""The curves of a run as a picture."""

from pathlib import Path

from training.trainer.metrics import read_log

_NOT_DRAWN = ("step", "seconds", "tokens_per_second", "objective", "learning_rate", "grad_norm")


def draw_curves(directory: Path) -> Path | None:
    """Draws ``metrics.jsonl`` of a run as ``curves.png``: a panel a metric, held-out beside it.

    Returns the path of the picture, or None where nothing was logged.
    """
    log = read_log(directory / "metrics.jsonl")
    names = dict.fromkeys(name for entry in log for name in entry if name not in _NOT_DRAWN)
    panels = list(dict.fromkeys(name.removeprefix("heldout_") for name in names))
    if not panels:
        return None
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # late: slow, and needed once
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5 * len(panels), 3.5), layout="constrained")
    FigureCanvasAgg(figure)
    for axes, panel in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
        for name, label in ((panel, "training"), (f"heldout_{panel}", "held out")):
            points = [(entry["step"], entry[name]) for entry in log if name in entry]
            if points:
                many = len(points) > 20
                axes.plot(*zip(*points, strict=True), label=label, marker="" if many else ".")
        axes.set(title=panel.replace("_", " "), xlabel="step")
        axes.grid(alpha=0.3)
        axes.legend()
    path = directory / "curves.png"
    figure.savefig(path, dpi=120)
    return path

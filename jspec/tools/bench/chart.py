"""The results of ``jspec bench`` as one picture."""

import importlib.util
import io
from typing import Any

from jspec.tools.bench.contenders import PLAIN
from jspec.tools.bench.report import PARTS, titles

_COLORS = ("#4c78a8", "#9ecae9", "#d9d9d9")  # colours of the parts of a round


def check() -> None:
    """Raise ValueError if matplotlib is missing."""
    if importlib.util.find_spec("matplotlib") is None:
        raise ValueError(
            "--output draws a picture and needs matplotlib; pip install 'jspec-decoding[bench]', "
            "or leave --output out."
        )


def draw(results: dict[str, Any]) -> bytes:
    """Return a PNG: speed-up, acceptance by position and time of a round for each case."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    cases = titles(results)
    most = max((len(rows) for _, rows in cases), default=1)
    figure = Figure(figsize=(16, len(cases) * (2.4 + 0.34 * most)), layout="constrained", dpi=110)
    FigureCanvasAgg(figure)
    grid = figure.subplots(len(cases), 3, squeeze=False, width_ratios=(3, 2, 2.4))
    for axes, (title, rows) in zip(grid, cases, strict=True):
        _speedups(axes[0], title, rows)
        _positions(axes[1], rows)
        _rounds(axes[2], rows)
    picture = io.BytesIO()
    figure.savefig(picture, format="png")
    return picture.getvalue()


def _names(rows: list[dict[str, Any]]) -> list[str]:
    """Return the contenders' names, escaped: matplotlib reads text between dollars as a formula."""
    return [row["name"].replace("$", r"\$") for row in rows]


def _speedups(axes, title: str, rows: list[dict[str, Any]]) -> None:
    middle = [row["speedup"]["median"] for row in rows]
    below = [row["speedup"]["median"] - row["speedup"]["least"] for row in rows]
    above = [row["speedup"]["most"] - row["speedup"]["median"] for row in rows]
    colors = [
        "#bab0ac" if row["name"] == PLAIN or "split_ms" not in row else _COLORS[0] for row in rows
    ]
    positions = range(len(rows))
    axes.barh(positions, middle, xerr=(below, above), color=colors, error_kw={"ecolor": "#333333"})
    axes.axvline(1, color="#333333", linewidth=0.8)
    axes.set_yticks(positions, _names(rows))
    axes.invert_yaxis()
    axes.set_xlabel("speed-up over plain decoding (median, least to most)")
    axes.set_title(title, loc="left")


def _positions(axes, rows: list[dict[str, Any]]) -> None:
    for row, name in zip(rows, _names(rows), strict=True):
        shares = row.get("acceptance_per_position")
        if shares:
            axes.plot(range(1, len(shares) + 1), shares, marker="o", label=name)
    axes.set_ylim(-0.04, 1.04)  # the frame would hide lines along 0 and 1
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.set_xlabel("position in the draft")
    axes.set_ylabel("accepted, of all drafts")
    if axes.lines:
        axes.legend(fontsize="small")


def _rounds(axes, rows: list[dict[str, Any]]) -> None:
    rows = [row for row in rows if "split_ms" in row]
    left = [0.0] * len(rows)
    for name, color in zip(PARTS, _COLORS, strict=True):
        width = [row["split_ms"][name] for row in rows]
        axes.barh(range(len(rows)), width, left=left, color=color, label=name)
        left = [a + b for a, b in zip(left, width, strict=True)]
    axes.set_yticks(range(len(rows)), _names(rows))
    axes.invert_yaxis()
    axes.set_xlabel("a round, ms")
    if rows:  # above the bars, so that it hides none
        axes.legend(
            fontsize="small",
            frameon=False,
            loc="lower right",
            bbox_to_anchor=(1, 1),
            ncols=len(PARTS),
        )

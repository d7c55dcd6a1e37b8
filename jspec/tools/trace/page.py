"""A trace as one HTML page that contains its styles, script and drawings.

Token texts may hold anything. The template escapes all values, and the script contains none.
"""

import html as escapes
import os
from pathlib import Path

import jinja2

from jspec.tools.trace import layout, names, terminal
from jspec.tools.trace.rounds import Trace
from jspec.util import atomic_files

_ENVIRONMENT = jinja2.Environment(
    loader=jinja2.PackageLoader("jspec.tools.trace", "."),
    autoescape=True,
    trim_blocks=True,
    lstrip_blocks=True,
    undefined=jinja2.StrictUndefined,
)
_FATES = {
    "accepted": "accepted",
    "refused": "refused",
    "not reached": "never judged",
    "not taken": "off the chosen path",
    "not emitted": "accepted, but the text had ended",
}


def html(trace: Trace) -> str:
    """Return the page of a trace, which opens from a file and needs no network.

    Arrow keys step through the rounds, and a token of the text leads to its round. A node shows its
    details when the mouse points at it or when it has the focus.
    """
    sources = {piece.source for piece in trace.pieces}
    fates = {node.fate for round_ in trace.rounds for node in round_.nodes[1:]}
    return _ENVIRONMENT.get_template("page.html.jinja").render(
        trace=trace,
        prompt=None if trace.prompt is None else names.printed(trace.prompt),
        printed=names.printed,
        pictures=[layout.picture(round_) for round_ in trace.rounds],
        figures=terminal.figures(trace),
        sources={name: words for name, (_, words) in terminal.SOURCES.items() if name in sources},
        fates={name: words for name, words in _FATES.items() if name in fates},
        greedy=trace.setting["temperature"] == "0 (greedy)",
    )


def frame(trace: Trace) -> str:
    """Return the page in an iframe, for `IPython.display.HTML` in a notebook."""
    return (
        '<iframe style="width: 100%; height: 48rem; border: 0" '
        f'srcdoc="{escapes.escape(html(trace))}"></iframe>'
    )


def save(trace: Trace, path: str | os.PathLike) -> None:
    """Write the page of a trace to `path` atomically."""
    atomic_files.write(Path(path), html(trace).encode())

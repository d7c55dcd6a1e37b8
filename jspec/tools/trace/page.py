"""A trace as one HTML page that holds all it needs: styles, script and drawings are in it.

Texts of tokens may hold anything; they stand in the page as text alone, since the template escapes
all that it is given, and no part of the script is made of them.
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
_MEANINGS = {
    "accepted": "accepted",
    "refused": "refused",
    "not reached": "never judged",
    "not taken": "off the path that was chosen",
    "unsaid": "accepted, but the text had ended",
}


def html(trace: Trace) -> str:
    """Return the page of a trace, which opens from a file and needs no network.

    Arrow keys step through the rounds; a token of the text leads to its round; what is known of a
    node is shown when it is pointed at or has the focus.
    """
    sources = {piece.source for piece in trace.pieces}
    fates = {node.fate for one in trace.rounds for node in one.nodes[1:]}
    most = max(len(one.pieces) for one in trace.rounds)
    return _ENVIRONMENT.get_template("page.html.jinja").render(
        trace=trace,
        prompt=None if trace.prompt is None else names.printed(trace.prompt),
        printed=names.printed,
        pictures=[layout.picture(one) for one in trace.rounds],
        figures=terminal.figures(trace),
        sources={name: words for name, (_, words) in terminal.SOURCES.items() if name in sources},
        fates={name: words for name, words in _MEANINGS.items() if name in fates},
        most=most,
        greedy=trace.setting["temperature"] == "0 (greedy)",
    )


def frame(trace: Trace) -> str:
    """Return the page in a frame of its own, for `IPython.display.HTML` in a notebook."""
    return (
        '<iframe style="width: 100%; height: 48rem; border: 0" '
        f'srcdoc="{escapes.escape(html(trace))}"></iframe>'
    )


def save(trace: Trace, path: str | os.PathLike) -> None:
    """Write the page of a trace to `path`, whole or not at all."""
    atomic_files.write(Path(path), html(trace).encode())

"""A trace as one HTML page that contains its styles and script.

Token texts may hold anything. The template escapes all values, and the script contains none.
"""

import html as escapes
import os
from pathlib import Path
from typing import Any

import jinja2

from jspec.tools.trace import names, terminal
from jspec.tools.trace.rounds import Node, Piece, Round, Trace
from jspec.util import atomic_files

_ENVIRONMENT = jinja2.Environment(
    loader=jinja2.PackageLoader("jspec.tools.trace", "."),
    autoescape=True,
    trim_blocks=True,
    lstrip_blocks=True,
    undefined=jinja2.StrictUndefined,
)
_LABEL = 16  # most characters of a label in a tree


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
        rounds=[(round_, _tree(round_)) for round_ in trace.rounds],
        figures=terminal.figures(trace),
        sources={name: words for name, (_, words) in terminal.SOURCES.items() if name in sources},
        fates={name: words for name, (_, words) in terminal.FATES.items() if name in fates},
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


def _tree(round_: Round) -> list[dict[str, Any]]:
    """Return the boxes of a round's tree, depth first; ``up`` leads from a leaf to the next box."""
    boxes = [_of_node(node) for node in round_.nodes]
    parents = [node.parent for node in round_.nodes]
    if round_.target_piece is not None:
        boxes.append(_of_piece(round_.target_piece))
        parents.append(round_.end)
    order, stack = [], [(0, 0)]
    while stack:  # not recursive: a chain may be deeper than Python's stack
        index, depth = stack.pop()
        order.append((boxes[index], depth))
        children = [(child, depth + 1) for child, up in enumerate(parents) if up == index]
        stack += reversed(children)
    depths = [depth for _, depth in order[1:]] + [0]
    steps = zip(order, depths, strict=True)
    return [box | {"up": None if after > depth else depth - after} for (box, depth), after in steps]


def _of_node(node: Node) -> dict[str, Any]:
    name = f"“{node.label}” (id {node.token})"
    likeliest = "; ".join(f"“{label}” {p:.3f}" for _, label, p in node.likeliest) or "none"
    likeliest = f"The target's likeliest tokens after it: {likeliest}."
    if node.index == 0:
        details = f"{name}, the last token before this round. {likeliest}"
        return _box(node.label, "root", "root", details)
    words = [f"{name}: {node.fate}."]
    words.append("No target p." if node.p is None else f"Target p = {node.p:.4g}.")
    numbers = f"p {_short(node.p)}"
    if node.q is None:
        words.append("A deterministic draft has no q.")
    else:
        words.append(f"Drafter q = {node.q:.4g}.")
        numbers += f"\u2002q {_short(node.q)}"  # an en space: HTML merges two spaces
    if node.chance is not None:
        is_below = node.uniform < node.chance
        words.append(
            f"Acceptance min(1, p/q) = {node.chance:.4g} when judged; uniform {node.uniform:.4g}, "
            f"{'below it: accepted' if is_below else 'not below it: refused'}."
        )
    elif node.uniform is not None:
        words.append(f"Uniform {node.uniform:.4g}.")
    return _box(node.label, numbers, node.fate, " ".join([*words, likeliest]))


def _of_piece(piece: Piece) -> dict[str, Any]:
    details = f"“{piece.label}” (id {piece.token}): the target's own, {piece.source}."
    details += f" Target p = {piece.p:.4g}."
    return _box(piece.label, f"p {_short(piece.p)}", piece.source, details)


def _box(label: str, numbers: str, kind: str, details: str) -> dict[str, Any]:
    label = label if len(label) <= _LABEL else f"{label[: _LABEL - 1]}…"
    kind = kind.replace(" ", "-")  # selects the style
    return {"label": label, "numbers": numbers, "kind": kind, "details": details}


def _short(p: float | None) -> str:
    """Return a probability in at most four characters.

    >>> _short(0.123), _short(0.0004), _short(1.0), _short(None)
    ('.12', '<.01', '1', '-')
    """
    if p is None:
        return "-"
    if p < 0.005:
        return "<.01"
    return f"{p:.2f}"[1:] if p < 0.995 else "1"

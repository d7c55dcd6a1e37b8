"""The picture of a drafted tree: boxes from left to right, a column for each depth."""

import dataclasses
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jspec.tools.trace.rounds import Node, Piece, Round

_CHAR, _PAD = 8.4, 20  # pixels: a character of a label, and the padding of a box
_HEIGHT, _ROW, _GAP = 42, 54, 38  # of a box, from one row to the next, between columns
_MARGIN = 8
_LABEL = 16  # most characters of a drawn label
_ON_TOP = ("accepted", "bonus", "corrected", "plain")  # edges that are drawn last


@dataclasses.dataclass(frozen=True)
class Box:
    """A node, or the target's own token after the path. Lengths in pixels.

    Attributes:
      x: of the left edge.
      y: of the top.
      width: of the box.
      label: as drawn.
      numbers: p, and q if there is one.
      kind: a fate, "root" or a source; selects the style.
      details: all properties as words.
    """

    x: float
    y: float
    width: float
    label: str
    numbers: str
    kind: str
    details: str

    height = _HEIGHT

    @property
    def middle(self) -> float:
        """Height at which edges meet the box."""
        return self.y + _HEIGHT / 2


@dataclasses.dataclass(frozen=True)
class Edge:
    """The SVG path from a box to one of its children."""

    curve: str
    kind: str


@dataclasses.dataclass(frozen=True)
class Picture:
    """A round's tree; edges of the accepted path come last and lie on top."""

    width: float
    height: float
    boxes: tuple[Box, ...]
    edges: tuple[Edge, ...]


def picture(round_: "Round") -> Picture:
    """Return the picture of a round's tree."""
    contents = [_of_node(node) for node in round_.nodes]
    parents = [node.parent for node in round_.nodes]
    if round_.target_piece is not None:
        contents.append(_of_piece(round_.target_piece))
        parents.append(round_.end)
    depths = [0]
    for parent in parents[1:]:
        depths.append(depths[parent] + 1)
    widths = [0.0] * (max(depths) + 1)
    for depth, (label, numbers, _, _) in zip(depths, contents, strict=True):
        width = max(len(label), len(numbers) * 0.8) * _CHAR + _PAD
        widths[depth] = max(widths[depth], width)
    left = [_MARGIN + sum(widths[:depth]) + depth * _GAP for depth in range(len(widths))]
    rows = _rows(parents)
    boxes = tuple(
        Box(left[depth], _MARGIN + row * _ROW, widths[depth], *content)
        for depth, row, content in zip(depths, rows, contents, strict=True)
    )
    edges = [
        Edge(_curve(boxes[parent], box), box.kind)
        for parent, box in zip(parents[1:], boxes[1:], strict=True)
    ]
    edges.sort(key=lambda edge: edge.kind in _ON_TOP)
    height = 2 * _MARGIN + max(rows) * _ROW + _HEIGHT
    return Picture(left[-1] + widths[-1] + _MARGIN, height, boxes, tuple(edges))


def _rows(parents: list[int]) -> list[float]:
    """Return the row of each node: one for each leaf, and parents midway between their children."""
    children: list[list[int]] = [[] for _ in parents]
    for index, parent in enumerate(parents[1:], 1):
        children[parent].append(index)
    order, stack = [], [0]
    while stack:  # depth first, so that no two edges cross
        order.append(stack.pop())
        stack += reversed(children[order[-1]])
    leaves = [index for index in order if not children[index]]
    rows = [float(leaves.index(index)) if index in leaves else 0.0 for index in range(len(parents))]
    for index in reversed(order):
        if children[index]:
            rows[index] = (rows[children[index][0]] + rows[children[index][-1]]) / 2
    return rows


def _curve(start: Box, end: Box) -> str:
    x, y = start.x + start.width, start.middle
    half = (end.x - x) / 2
    return (
        f"M{x:.1f} {y:.1f} C{x + half:.1f} {y:.1f} {x + half:.1f} {end.middle:.1f} "
        f"{end.x:.1f} {end.middle:.1f}"
    )


def _of_node(node: "Node") -> tuple[str, str, str, str]:
    """Return label, numbers, kind and details."""
    name = f"“{node.label}” (id {node.token})"
    likeliest = "; ".join(f"“{label}” {p:.3f}" for _, label, p in node.likeliest) or "none"
    likeliest = f"The target's likeliest tokens after it: {likeliest}."
    if node.index == 0:
        details = f"{name}, the last token before this round. {likeliest}"
        return cut(node.label), "root", "root", details
    words = [f"{name}: {node.fate}."]
    words.append("No target p." if node.p is None else f"Target p = {node.p:.4g}.")
    numbers = f"p {_short(node.p)}"
    if node.q is None:
        words.append("A deterministic draft has no q.")
    else:
        words.append(f"Drafter q = {node.q:.4g}.")
        numbers += f"\u2002q {_short(node.q)}"  # an en space: SVG merges two spaces
    if node.chance is not None:
        is_below = node.uniform < node.chance
        words.append(
            f"Acceptance min(1, p/q) = {node.chance:.4g} when judged; uniform {node.uniform:.4g}, "
            f"{'below it: accepted' if is_below else 'not below it: refused'}."
        )
    elif node.uniform is not None:
        words.append(f"Uniform {node.uniform:.4g}.")
    return cut(node.label), numbers, node.fate, " ".join([*words, likeliest])


def _of_piece(piece: "Piece") -> tuple[str, str, str, str]:
    """Return label, numbers, kind and details of the target's own token."""
    details = f"“{piece.label}” (id {piece.token}): the target's own, {piece.source}."
    details += f" Target p = {piece.p:.4g}."
    return cut(piece.label), f"p {_short(piece.p)}", piece.source, details


def cut(label: str) -> str:
    """Return a label as it is drawn."""
    return label if len(label) <= _LABEL else f"{label[: _LABEL - 1]}…"


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

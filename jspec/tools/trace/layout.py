"""Where the boxes of a drafted tree stand in its picture: left to right, a column a depth."""

import dataclasses
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jspec.tools.trace.rounds import Node, Piece, Round

_CHAR, _PAD = 8.4, 20  # pixels: a character of the labels, and both edges of a box together
_HEIGHT, _ROW, _GAP = 42, 54, 38  # of a box, from one row to the next, between columns
_MOST = 16  # characters of a label that are drawn
_MARGIN = 8
_NUMBERS = 13  # characters, "p 0.12 q 0.12" in smaller type


@dataclasses.dataclass(frozen=True)
class Box:
    """A node, or the target's own token behind the path. Lengths in pixels.

    Attributes:
      x: of the left edge.
      y: of the top.
      width: of the box.
      label: as it is drawn.
      numbers: p, and q where there is one.
      kind: a fate, "root" or a source: how it is drawn.
      details: all that is known of it, in words.
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
        """Height of its edges."""
        return self.y + _HEIGHT / 2


@dataclasses.dataclass(frozen=True)
class Edge:
    """From one box to one behind it, as the path of a curve."""

    curve: str
    kind: str


@dataclasses.dataclass(frozen=True)
class Picture:
    """A round's tree. Edges on the accepted path come last, so that they lie on top."""

    width: float
    height: float
    boxes: tuple[Box, ...]
    edges: tuple[Edge, ...]


def picture(round_: "Round") -> Picture:
    """The tree of a round."""
    own = round_.pieces[-1] if round_.pieces and round_.pieces[-1].node is None else None
    parents = [node.parent for node in round_.nodes] + [round_.end] * (own is not None)
    depth = [0] * len(parents)
    for index, parent in enumerate(parents[1:], 1):
        depth[index] = depth[parent] + 1
    rows = _rows(parents)
    drawn = [_of_node(node) for node in round_.nodes] + ([_of_own(own)] if own else [])
    widths = [0.0] * (max(depth) + 1)
    for level, (label, numbers, _, _) in zip(depth, drawn, strict=True):
        size = max(len(label), len(numbers) * 0.8) * _CHAR + _PAD
        widths[level] = max(widths[level], size)
    left = [_MARGIN + sum(widths[:level]) + level * _GAP for level in range(len(widths))]
    boxes = tuple(
        Box(left[level], _MARGIN + row * _ROW, widths[level], *what)
        for level, row, what in zip(depth, rows, drawn, strict=True)
    )
    edges = [
        Edge(_curve(boxes[parent], boxes[index]), boxes[index].kind)
        for index, parent in enumerate(parents)
        if index
    ]
    edges.sort(key=lambda edge: edge.kind not in ("refused", "not reached", "not taken", "unsaid"))
    return Picture(
        left[-1] + widths[-1] + _MARGIN,
        2 * _MARGIN + max(rows) * _ROW + _HEIGHT,
        boxes,
        tuple(edges),
    )


def _rows(parents: list[int]) -> list[float]:
    """A row of its own for each leaf; a parent stands in the middle of its children."""
    children: list[list[int]] = [[] for _ in parents]
    for index, parent in enumerate(parents[1:], 1):
        children[parent].append(index)
    order, stack = [], [0]
    while stack:  # depth first, so that no two edges cross
        order.append(stack.pop())
        stack += reversed(children[order[-1]])
    rows, leaves = [0.0] * len(parents), 0
    for index in order:
        if not children[index]:
            rows[index], leaves = float(leaves), leaves + 1
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
    behind = "; ".join(f"“{label}” {p:.3f}" for _, label, p in node.likeliest)
    likeliest = f"The target's likeliest behind it: {behind or 'none'}."
    if node.index == 0:
        return (
            cut(node.label),
            "root",
            "root",
            (f"“{node.label}” (id {node.token}), the last token before this round. {likeliest}"),
        )
    words = [f"“{node.label}” (id {node.token}): {node.fate}."]
    words.append("No target p." if node.p is None else f"Target p = {node.p:.4g}.")
    numbers = f"p {_short(node.p)}"
    if node.q is not None:
        words.append(f"Drafter q = {node.q:.4g}.")
        numbers += f"\u2002q {_short(node.q)}"  # an en space: SVG takes two spaces for one
    else:
        words.append("Chosen without chance: no q.")
    if node.chance is not None:
        outcome = "below it: accepted" if node.uniform < node.chance else "not below it: refused"
        words.append(
            f"Acceptance min(1, p/q) = {node.chance:.4g} when judged; coin {node.uniform:.4g}, "
            f"{outcome}."
        )
    elif node.uniform is not None:
        words.append(f"Coin {node.uniform:.4g}.")
    return cut(node.label), numbers, node.fate, " ".join([*words, likeliest])


def _of_own(piece: "Piece") -> tuple[str, str, str, str]:
    details = f"“{piece.label}” (id {piece.token}): the target's own, {piece.source}. "
    return (
        cut(piece.label),
        f"p {_short(piece.p)}",
        piece.source,
        details + (f"Target p = {piece.p:.4g}."),
    )


def cut(label: str) -> str:
    """A label as it is drawn."""
    return label if len(label) <= _MOST else f"{label[: _MOST - 1]}…"


def _short(p: float | None) -> str:
    """A probability in four characters at most.

    >>> _short(0.123), _short(0.0004), _short(1.0), _short(None)
    ('.12', '<.01', '1', '-')
    """
    if p is None:
        return "-"
    if p < 0.005:
        return "<.01"
    return f"{p:.2f}"[1:] if p < 0.995 else "1"

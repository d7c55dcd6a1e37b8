"""A trace in the terminal: every round's tree, the text colored by source, and totals."""

from collections.abc import Iterator

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text
from rich.tree import Tree

from jspec.tools.trace import names
from jspec.tools.trace.rounds import Node, Round, Trace

SOURCES = {
    "drafted": ("bold green", "drafted, and accepted"),
    "bonus": ("bold cyan", "bonus: the target's own, behind a path accepted to its leaf"),
    "corrected": ("bold yellow", "corrected: in place of what was refused"),
    "plain": ("none", "plain: the target's own, where nothing was drafted"),
}
_FATES = {
    "accepted": "bold green",
    "refused": "red",
    "not reached": "dim",
    "not taken": "dim",
    "unsaid": "dim green",
}


def page(trace: Trace) -> Group:
    """All of a trace."""
    parts: list[RenderableType] = [
        Text(
            ", ".join(f"{name} {names.printed(value)}" for name, value in trace.setting.items()),
            style="dim",
        )
    ]
    for round_ in trace.rounds:
        parts += [Text(), _round(round_)]
    parts += [Text(), _legend(trace), Padding(_text(trace), (1, 0, 1, 2)), totals(trace)]
    return Group(*parts)


def totals(trace: Trace) -> Table:
    """What all rounds come to."""
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    for name, value in figures(trace).items():
        table.add_row(name, value)
    return table


def figures(trace: Trace) -> dict[str, str]:
    """The totals, by what they are called."""
    counts = trace.counts
    found = {
        "tokens": f"{counts.num_tokens}, {', '.join(_by_source(trace))}",
        "passes of the target": f"{counts.num_passes}",
        "tokens a pass": f"{counts.tokens_per_pass:.2f}",
    }
    if counts.num_drafts:
        rates = " ".join(f"{100 * rate:.0f}" for rate in counts.acceptance_per_pos)
        found |= {
            "acceptance length": f"{counts.mean_acceptance_length:.2f} of rounds with a draft, the "
            "bonus included",
            "drafted tokens accepted": f"{counts.num_accepted_tokens} of {counts.num_draft_tokens}",
            "accepted by position, %": rates,
        }
    return found


def _by_source(trace: Trace) -> Iterator[str]:
    sources = [piece.source for piece in trace.pieces]
    return (f"{sources.count(name)} {name}" for name in SOURCES if name in sources)


def _round(round_: Round) -> Tree:
    """The drafted tree, its root the last token before it."""
    said = ", ".join(f"“{piece.label}”" for piece in round_.pieces)
    head = Text.assemble(
        (f"round {round_.index + 1}", "bold"),
        f" adds {len(round_.pieces)}: {said}\n",
        (f"{round_.words}\n", "italic"),
        (round_.nodes[0].label, "bold"),
    )
    tree = Tree(head, guide_style="dim")
    grown = {0: tree}
    for node in round_.nodes[1:]:
        grown[node.index] = grown[node.parent].add(_node(node))
    own = round_.pieces[-1] if round_.pieces else None
    if own is not None and own.node is None:
        style, _ = SOURCES[own.source]
        grown[round_.end].add(Text.assemble((own.label, style), f"  p {own.p:.3f}  {own.source}"))
    return tree


def _node(node: Node) -> Text:
    style = _FATES[node.fate]
    line = Text.assemble((node.label, style), "  p -" if node.p is None else f"  p {node.p:.3f}")
    if node.q is not None:
        line.append(f"  q {node.q:.3f}")
    if node.chance is not None:
        sign = "<" if node.uniform < node.chance else "≥"
        line.append(f"  coin {node.uniform:.3f} {sign} {node.chance:.3f}")
    return line.append(f"  {node.fate}", style)


def _legend(trace: Trace) -> Text:
    sources = {piece.source for piece in trace.pieces}
    shown = [(words, style) for name, (style, words) in SOURCES.items() if name in sources]
    return Text("\n").join(Text(words, style) for words, style in shown)


def _text(trace: Trace) -> Text:
    return Text.assemble(
        *((names.printed(piece.text), SOURCES[piece.source][0]) for piece in trace.pieces)
    )

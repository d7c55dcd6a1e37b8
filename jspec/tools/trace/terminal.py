"""A trace in the terminal: every round's tree, the text colored by source, and totals."""

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text
from rich.tree import Tree

from jspec.tools.trace import names
from jspec.tools.trace.rounds import Node, Round, Trace

SOURCES = {
    "drafted": ("bold green", "drafted and accepted"),
    "bonus": ("bold cyan", "bonus: the target's own, after a path accepted to its leaf"),
    "corrected": ("bold yellow", "corrected: the target's own, in place of refused tokens"),
    "plain": ("none", "plain: the target's own, where nothing was drafted"),
}
FATES = {
    "accepted": ("bold green", "accepted"),
    "refused": ("red", "refused"),
    "not reached": ("dim", "never judged"),
    "not taken": ("dim", "off the chosen path"),
    "not emitted": ("dim green", "accepted, but the text had ended"),
}


def page(trace: Trace) -> Group:
    """Return the whole trace."""
    setting = ", ".join(f"{name} {names.printed(value)}" for name, value in trace.setting.items())
    parts: list[RenderableType] = [Text(setting, style="dim")]
    for round_ in trace.rounds:
        parts += [Text(), _round(round_)]
    pieces = [(names.printed(piece.text), SOURCES[piece.source][0]) for piece in trace.pieces]
    sources = {piece.source for piece in trace.pieces}
    legend = [Text(words, style) for name, (style, words) in SOURCES.items() if name in sources]
    text = Padding(Text.assemble(*pieces), (1, 0, 1, 2))
    return Group(*parts, Text(), *legend, text, totals(trace))


def totals(trace: Trace) -> Table:
    """Return the table of ``figures``."""
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    for name, value in figures(trace).items():
        table.add_row(name, value)
    return table


def figures(trace: Trace) -> dict[str, str]:
    """Return the totals of all rounds, by name."""
    counts, sources = trace.counts, [piece.source for piece in trace.pieces]
    by_source = [f"{sources.count(name)} {name}" for name in SOURCES if name in sources]
    totals_ = {
        "tokens": f"{counts.num_tokens}, {', '.join(by_source)}",
        "passes of the target": f"{counts.num_passes}",
        "tokens a pass": f"{counts.tokens_per_pass:.2f}",
    }
    if counts.num_drafts:
        rates = " ".join(f"{100 * rate:.0f}" for rate in counts.acceptance_per_pos)
        totals_ |= {
            "acceptance length": f"{counts.mean_acceptance_length:.2f} of rounds with a draft, the "
            "bonus included",
            "drafted tokens accepted": f"{counts.num_accepted_tokens} of {counts.num_draft_tokens}",
            "accepted by position, %": rates,
        }
    return totals_


def _round(round_: Round) -> Tree:
    added = ", ".join(f"“{piece.label}”" for piece in round_.pieces)
    head = Text.assemble(
        (f"round {round_.index + 1}", "bold"),
        f" adds {len(round_.pieces)}: {added}\n",
        (f"{round_.words}\n", "italic"),
        (round_.nodes[0].label, "bold"),
    )
    tree = Tree(head, guide_style="dim")
    branches = {0: tree}
    for node in round_.nodes[1:]:
        branches[node.index] = branches[node.parent].add(_node(node))
    if round_.target_piece is not None:
        piece = round_.target_piece
        style, _ = SOURCES[piece.source]
        line = Text.assemble((piece.label, style), f"  p {piece.p:.3f}  {piece.source}")
        branches[round_.end].add(line)
    return tree


def _node(node: Node) -> Text:
    style, _ = FATES[node.fate]
    line = Text.assemble((node.label, style), "  p -" if node.p is None else f"  p {node.p:.3f}")
    if node.q is not None:
        line.append(f"  q {node.q:.3f}")
    if node.chance is not None:
        sign = "<" if node.uniform < node.chance else "≥"
        line.append(f"  uniform {node.uniform:.3f} {sign} {node.chance:.3f}")
    return line.append(f"  {node.fate}", style)

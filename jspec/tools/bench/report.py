"""Results for people: tables in the terminal and in Markdown."""

from collections.abc import Iterator, Sequence
from typing import Any

from rich.table import Table
from rich.text import Text

PARTS = ("drafting", "target", "accepting")  # of a round, as in ``split.Split``


def titles(results: dict[str, Any]) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """The tables: a title, and the rows of one batch size and temperature."""
    found: dict[str, list[dict[str, Any]]] = {}
    for row in results["rows"]:
        drawn = f"temperature {row['temperature']:g}" if row["temperature"] else "greedy"
        found.setdefault(f"batch {row['batch_size']}, {drawn}", []).append(row)
    yield from found.items()


def cells(row: dict[str, Any]) -> list[str]:
    """A row as it is shown, below ``headings``."""
    speed, ratio, parts = row["tokens_per_second"], row["speedup"], row.get("split_ms")
    equal = f"{row['texts_equal_to_plain']} of {row['texts']}" if "texts" in row else "-"
    return [
        row["name"],
        f"{speed['median']:.0f}",
        f"{ratio['median']:.2f} ({ratio['least']:.2f} to {ratio['most']:.2f})",
        f"{row['acceptance_length']:.2f}" if "acceptance_length" in row else "-",
        " ".join(f"{share:.2f}" for share in row.get("acceptance_per_position", ())) or "-",
        " + ".join(f"{parts[name]:.2f}" for name in PARTS) if parts else "-",
        f"{parts['round']:.2f}" if parts else "-",
        f"{parts['host']:.1f}" if parts else "-",
        equal,
    ]


def headings() -> list[str]:
    """Of the columns."""
    return [
        "method",
        "tokens/s",
        "speed-up",
        "acceptance length",
        "by position",
        "drafting + target + accepting, ms",
        "round, ms",
        "host, ms a call",
        "same text",
    ]


def terminal(results: dict[str, Any]) -> Iterator[Table]:
    """A table for each case, and one of speed-ups and acceptance by category."""
    for title, rows in titles(results):
        yield _table(title, headings(), [cells(row) for row in rows])
        if len(results["questions"]) > 1:
            yield _table(f"{title}: by category", *by_category(results, rows))


def by_category(
    results: dict[str, Any], rows: Sequence[dict[str, Any]]
) -> tuple[list[str], list[list[str]]]:
    """Headings and cells: speed-up, and the acceptance length of those who draft."""
    names = list(results["questions"])
    heads = ["method", *(f"{name} ({results['questions'][name]})" for name in names)]
    lines = []
    for row in rows:
        line = [row["name"]]
        for name in names:
            part = row["categories"][name]
            length = part.get("acceptance_length")
            line.append(f"{part['speedup']:.2f}" + (f", {length:.2f}" if length else ""))
        lines.append(line)
    return heads, lines


def markdown(results: dict[str, Any]) -> str:
    """All tables, what their words mean, and where they were measured."""
    parts = ["# jspec bench", ""]
    for title, rows in titles(results):
        parts += [f"## {title}", "", *_markdown(headings(), [cells(row) for row in rows]), ""]
        if len(results["questions"]) > 1:
            parts += ["Speed-up and acceptance length by category (questions):", ""]
            parts += [*_markdown(*by_category(results, rows)), ""]
    return "\n".join([*parts, *notes(results), ""])


def notes(results: dict[str, Any]) -> list[str]:
    """What stands below the tables."""
    lines = [results["definition"], about(results)]
    lines += left_out(results)
    if results["interrupted"]:
        missing = "; ".join(_missing(results)) or "nothing"
        lines.append(f"The run was interrupted; missing: {missing}.")
    busy = sum(len(row["seconds"]) - row["quiet_samples"] for row in results["rows"])
    if busy:
        lines.append(f"Other processes were busy during {busy} of the samples.")
    return lines


def left_out(results: dict[str, Any]) -> list[str]:
    """How many prompts were not asked, and why; nothing where all were."""
    if not results["left_out"]:
        return []
    cut = " or, as later turns, --prompt-tokens" if results["setting"]["prompt_tokens"] else ""
    return [f"{results['left_out']} prompts were left out: they do not fit the model{cut}."]


def _missing(results: dict[str, Any]) -> Iterator[str]:
    """What an interrupted run was asked for and has not, in the order in which it is measured."""
    setting, tables = results["setting"], [rows for _, rows in titles(results)]
    for rows in tables[-1:]:
        # Of ours alone: which modes of transformers can run is not known before they do.
        ours = [row for row in rows if "acceptance_length" in row]
        asked = 1 + len(setting["configs"])
        if len(ours) < asked:
            yield f"{asked - len(ours)} of {asked} methods of the last table"
        if any(len(row["seconds"]) < setting["repeats"] for row in rows):
            yield "samples of the last table"
        whole = sum("split_ms" not in row for row in ours)
        if whole:
            yield f"where the time of {whole} methods of the last table goes"
    asked = len(setting["batch_sizes"]) * len(setting["temperatures"])
    if len(tables) < asked:
        yield f"{asked - len(tables)} of {asked} tables"


def about(results: dict[str, Any]) -> str:
    """Device, versions, and the peer, in a line."""
    device, versions = results["device"], results["versions"]
    return (
        f"{device['kind']} ({device['cpu']}, {device['cores']} cores), jax {versions['jax']}, "
        f"{results['time']}, dtype {results['setting']['dtype'] or 'auto'}, at most "
        f"{results['setting']['max_tokens']} tokens; peer: {results['peer']}."
    )


def _table(title: str, heads: Sequence[str], lines: Sequence[Sequence[str]]) -> Table:
    table = Table(title=title, title_justify="left")
    for index, head in enumerate(heads):
        table.add_column(Text(head), justify="right" if index else "left", no_wrap=not index)
    for line in lines:
        table.add_row(*map(Text, line))  # names of users' are no markup
    return table


def _markdown(heads: Sequence[str], lines: Sequence[Sequence[str]]) -> list[str]:
    escaped = lambda cell: cell.replace("|", "\\|")
    rule = ["---", *("---:" for _ in heads[1:])]
    return ["| " + " | ".join(map(escaped, line)) + " |" for line in (heads, rule, *lines)]

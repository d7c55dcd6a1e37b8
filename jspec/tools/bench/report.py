"""The results of ``jspec bench`` as tables and notes, for the terminal and in Markdown."""

from collections.abc import Iterator, Sequence
from typing import Any

from rich.table import Table
from rich.text import Text

from jspec.tools.bench.contenders import title_of

PARTS = ("drafting", "target", "accepting")  # parts of a round, in ``split_ms``


def titles(results: dict[str, Any]) -> list[tuple[str, list[dict[str, Any]]]]:
    """Return the title and the rows of each batch size and temperature."""
    cases: dict[str, list[dict[str, Any]]] = {}
    for row in results["rows"]:
        cases.setdefault(title_of(row["batch_size"], row["temperature"]), []).append(row)
    return list(cases.items())


def cells(row: dict[str, Any]) -> dict[str, str]:
    """Return the cells of a row by their headings."""
    length, parts = row.get("acceptance_length"), row.get("split_ms")
    return {
        "method": row["name"],
        "tokens/s": f"{row['tokens_per_second']['median']:.0f}",
        "speed-up": spread(row["speedup"], 2),
        "acceptance length": f"{length:.2f}" if length else "-",
        "by position": " ".join(f"{p:.2f}" for p in row.get("acceptance_per_position", ())) or "-",
        "drafting + target + accepting, ms": (
            " + ".join(f"{parts[name]:.2f}" for name in PARTS) if parts else "-"
        ),
        "round, ms": f"{parts['round']:.2f}" if parts else "-",
        "host, ms a call": f"{parts['host']:.1f}" if parts else "-",
        "same text": f"{row['texts_equal_to_plain']} of {row['texts']}" if "texts" in row else "-",
    }


def spread(value: dict[str, float], digits: int) -> str:
    """Return a median with its range."""
    median, least, most = (f"{value[key]:.{digits}f}" for key in ("median", "least", "most"))
    return f"{median} ({least} to {most})"


def tables(results: dict[str, Any]) -> Iterator[tuple[str, list[tuple]]]:
    """Yield the title of each case and its tables: caption, headings and lines each."""
    names = results["questions"]
    heads = ["method", *(f"{name} ({count})" for name, count in names.items())]
    for title, rows in titles(results):
        case = [("", list(cells(rows[0])), [list(cells(row).values()) for row in rows])]
        if len(names) > 1:
            lines = [
                [row["name"], *map(_category, map(row["categories"].get, names))] for row in rows
            ]
            case.append(("speed-up and acceptance length by category (questions)", heads, lines))
        yield title, case


def terminal(results: dict[str, Any]) -> Iterator[Table]:
    """Yield the tables of each case for the terminal."""
    for title, case in tables(results):
        for caption, heads, lines in case:
            yield table(f"{title}: {caption}" if caption else title, heads, lines)


def markdown(results: dict[str, Any]) -> str:
    """Return all tables and notes."""
    parts = ["# jspec bench", ""]
    for title, case in tables(results):
        parts += [f"## {title}", ""]
        for caption, heads, lines in case:
            parts += [f"{caption.capitalize()}:", ""] if caption else []
            parts += [*_markdown(heads, lines), ""]
    return "\n".join([*parts, *notes(results), ""])


def notes(results: dict[str, Any]) -> list[str]:
    """Return the lines below the tables."""
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
    """Return the note on prompts that were left out, if any."""
    if not results["left_out"]:
        return []
    cut = " or, as later turns, --prompt-tokens" if results["setting"]["prompt_tokens"] else ""
    return [f"{results['left_out']} prompts were left out: they do not fit the model{cut}."]


def _missing(results: dict[str, Any]) -> Iterator[str]:
    """Yield the measurements that an interrupted run lacks, in the order in which they are made."""
    setting, cases = results["setting"], [rows for _, rows in titles(results)]
    for rows in cases[-1:]:
        # Ours alone: the modes that a peer can run are unknown before it runs.
        ours = [row for row in rows if "mean_acceptance_length" in row]
        wanted = (1 + len(setting["configs"])) * (1 + len(setting["quantizations"]))
        if len(ours) < wanted:
            yield f"{wanted - len(ours)} of {wanted} methods of the last table"
        if any(len(row["seconds"]) < setting["repeats"] for row in rows):
            yield "samples of the last table"
        if unsplit := sum("split_ms" not in row for row in ours):
            yield f"where the time of {unsplit} methods of the last table goes"
    wanted = len(setting["batch_sizes"]) * len(setting["temperatures"])
    if len(cases) < wanted:
        yield f"{wanted - len(cases)} of {wanted} tables"


def about(results: dict[str, Any]) -> str:
    """Return device, versions and peer in one line."""
    device, versions, setting = results["device"], results["versions"], results["setting"]
    weights = f", {setting['quantization']} weights" if setting.get("quantization") else ""
    return (
        f"{device['kind']} ({device['cpu']}, {device['cores']} cores), jax {versions['jax']}, "
        f"{results['time']}, dtype {setting['dtype'] or 'auto'}{weights}, at most "
        f"{setting['max_tokens']} tokens; peer: {results['peer']}."
    )


def table(title: str, heads: Sequence[str], lines: Sequence[Sequence[str]]) -> Table:
    """Return a table whose first column holds names and whose other columns hold numbers."""
    result = Table(title=title, title_justify="left")
    for index, head in enumerate(heads):
        result.add_column(Text(head), justify="right" if index else "left", no_wrap=not index)
    for line in lines:
        result.add_row(*map(Text, line))  # users' names are not markup
    return result


def _category(part: dict[str, Any]) -> str:
    length = part.get("acceptance_length")
    return f"{part['speedup']:.2f}" + (f", {length:.2f}" if length else "")


def _markdown(heads: Sequence[str], lines: Sequence[Sequence[str]]) -> list[str]:
    rule = ["---", *("---:" for _ in heads[1:])]
    return [
        "| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |"
        for line in (heads, rule, *lines)
    ]

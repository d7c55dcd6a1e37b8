"""The table of targets of docs/compatibility.md: ``python -m tests.families.docs_table``."""

from tests.families import gguf_cases, table


def markdown() -> str:
    """Return the table."""
    titles = "`model_type`", "checkpoints", "features", "heads", "GGUF", "compared"
    lines = [titles, ("---",) * len(titles)]
    for kind, row in table.ROWS.items():
        compared = row.compared or "yes"
        files = f"`{files}`" if (files := gguf_cases.architecture_of(kind)) else ""
        lines.append((f"`{kind}`", row.checkpoints, row.features, row.heads, files, compared))
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


if __name__ == "__main__":
    print(markdown(), end="")

"""The table of targets of docs/compatibility.md: ``python -m tests.families.docs_table``."""

from tests.families import table


def markdown() -> str:
    """Return the table."""
    lines = [("`model_type`", "checkpoints", "features", "heads", "compared"), ("---",) * 5]
    for kind, row in table.ROWS.items():
        compared = row.compared or "yes"
        lines.append((f"`{kind}`", row.checkpoints, row.features, row.heads, compared))
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


if __name__ == "__main__":
    print(markdown(), end="")

"""The table of families is whole, and the documentation holds it."""

from jspec.checkpoints import families
from tests import house
from tests.families import docs_table, table

DOCS = house.ROOT / "docs" / "compatibility.md"


def test_every_family_has_a_row():
    assert set(table.ROWS) == set(families.FAMILIES)
    assert [kind for kind, row in table.ROWS.items() if bool(row.cases) == bool(row.compared)] == []


def test_the_documentation_holds_the_table():
    assert docs_table.markdown() in DOCS.read_text(encoding="utf-8"), (
        "paste into docs/compatibility.md what this prints: python -m tests.families.docs_table"
    )

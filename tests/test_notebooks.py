"""Notebooks run from first to last cell, and say what the scripts say that they are paired with."""

import runpy
from pathlib import Path

import jupytext
import matplotlib
import matplotlib.pyplot as plt
import pytest

NOTEBOOKS = Path(__file__).resolve().parents[1] / "notebooks"
SCRIPTS = sorted(NOTEBOOKS.glob("*.py"))
by_name = pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.stem)


@by_name
def test_every_notebook_is_what_its_script_says(script):
    """If not: ``jupytext --sync notebooks/*.py``."""
    paired = jupytext.read(script.with_suffix(".ipynb"))
    written = jupytext.read(script)
    cells = lambda notebook: [(cell.cell_type, cell.source) for cell in notebook.cells]
    assert cells(paired) == cells(written)
    assert not any(cell.get("outputs") for cell in paired.cells)


@by_name
def test_every_notebook_has_one_cell_that_installs(script):
    cells = [cell.source for cell in jupytext.read(script).cells if cell.cell_type == "code"]
    assert ["pip" in cell for cell in cells] == [True, *[False] * (len(cells) - 1)]


@by_name
def test_every_notebook_runs(script, monkeypatch, capsys):
    matplotlib.use("Agg")
    shown = []
    monkeypatch.setattr(plt, "show", lambda: shown.append(plt.close("all")))
    names = runpy.run_path(str(script))
    said = capsys.readouterr().out
    if script.stem == "how_it_works":
        assert len(shown) == 3 and names["finding"].passed and "tokens for one pass" in said
    else:
        assert "identical: True" in said

"""Every example runs, and stays short enough to be read."""

import runpy
import sys
from pathlib import Path

import pytest

EXAMPLES = sorted((Path(__file__).parents[1] / "examples").glob("*.py"))
PRINTS = {
    "bring_your_own_model": "the dog that bit the cat that killed the rat",
    "write_a_drafter": "same text: True",
}


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_the_example_runs_and_prints_what_it_promises(path, capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", [str(path)])
    runpy.run_path(str(path), run_name="__main__")
    printed = capsys.readouterr().out
    assert PRINTS.get(path.stem, "") in printed
    assert "same text: False" not in printed


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_the_example_has_at_most_60_lines(path):
    assert len(path.read_text().splitlines()) <= 60

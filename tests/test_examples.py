"""Every example runs and has at most 60 lines."""

import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from tests import llm_fixtures

ALL = sorted((Path(__file__).parents[1] / "examples").glob("*.py"))
EXAMPLES = [path for path in ALL if not path.stem.startswith("ray_")]
PRINTS = {
    "bring_your_own_model": "the dog that bit the cat that killed the rat",
    "write_a_drafter": "same text: True",
    "batch_generation": "streamed the same: True",
    "tree_drafting": "tokens drafted a pass",
}
# Examples that take models get smaller ones than the demo's.
MODELS = {"batch_generation": ("target", "draft"), "tree_drafting": ("target", "eagle3")}


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_the_example_runs_and_prints_its_result(path, capsys, monkeypatch, root):
    folders = llm_fixtures.checkpoints(root) | {"eagle3": root / "eagle3"}
    llm_fixtures.write_eagle3_head(folders["eagle3"])
    models = [str(folders[name]) for name in MODELS.get(path.stem, ())]
    monkeypatch.setattr(sys, "argv", [str(path), *models])
    runpy.run_path(str(path), run_name="__main__")
    printed = capsys.readouterr().out
    assert PRINTS[path.stem] in printed
    assert ": False" not in printed


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "printed"),
    [("ray_serve", "running replicas: 2"), ("ray_data", "32 prompts answered")],
)
def test_an_example_of_ray_runs(name, printed, tmp_path):
    pytest.importorskip("ray", reason="pip install 'ray[serve,data]'")
    (path,) = (path for path in ALL if path.stem == name)
    environment = {**os.environ, "RAY_AUTH_MODE": "disabled"}
    options = dict(capture_output=True, text=True, timeout=300, cwd=tmp_path, env=environment)
    done = subprocess.run([sys.executable, str(path)], **options)
    assert done.returncode == 0 and printed in done.stdout, done.stdout + done.stderr


@pytest.mark.parametrize("path", ALL, ids=lambda path: path.stem)
def test_the_example_has_at_most_60_lines(path):
    assert len(path.read_text().splitlines()) <= 60

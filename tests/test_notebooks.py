"""Notebooks run from first to last cell, and equal the scripts that they are paired with."""

import importlib.util
import re
import shutil
import subprocess
import sys
import tempfile
import types
from pathlib import Path

import jupytext
import matplotlib
import matplotlib.pyplot as plt
import pytest

import jspec
from tests import llm_fixtures

NOTEBOOKS = Path(__file__).resolve().parents[1] / "notebooks"
SCRIPTS = sorted(NOTEBOOKS.glob("*.py"))
DEMO = Path(jspec.__file__).parent / "assets" / "demo"
by_name = pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.stem)

# Replacements for the cell of parameters: the same cells, with less text and a smaller model.
SMALLER = {
    "compare_methods": {
        "TARGET": DEMO / "draft",
        "QUESTIONS": 1,
        "MAX_TOKENS": 16,
        "REPEATS": 1,
        "DTYPE": "float32",
        "SWEPT": "ngram",
        "DEPTHS": (1, 2),
        "METHODS": {"ngram": {"method": "ngram", "num_speculative_tokens": 2}},
    },
    "train_eagle": {
        "DATA": ["package:bisect", "package:heapq", "package:textwrap"],
        "HELD_OUT": ["heapq"],
        "FIRST_STEPS": 1,
        "STEPS": 2,
        "DECAY": 1,
        "BATCH": 2,
        "LENGTH": 32,
        "UNROLL": 1,
        "EVAL_EVERY": 1,
        "PROMPTS": 2,
        "MAX_TOKENS": 8,
        "SERVED_TOKENS": 16,
    },
    "write_a_drafter": {
        "TARGET": DEMO / "draft",
        "FILES": 10,
        "MAX_TOKENS": 32,
        "NUM_DRAFTS": 1024,
        "DEPTHS": (2,),
        "REPEATS": 1,
    },
}
PRINTS = {
    "compare_methods": "fastest here: K = ",
    "how_it_works": "tokens for one pass",
    "quickstart": "identical: True",
    "train_eagle": "same texts from either file: True",
    "write_a_drafter": "same texts as plain decoding: [True, True, True, True]",
}
PICTURES = {"compare_methods": 5, "how_it_works": 3, "train_eagle": 1, "write_a_drafter": 2}


@by_name
def test_every_notebook_equals_its_script(script):
    """If not: ``jupytext --update --to ipynb notebooks/*.py``."""
    paired = jupytext.read(script.with_suffix(".ipynb"))
    written = jupytext.read(script)
    cells = lambda notebook: [
        (cell.cell_type, cell.source, cell.metadata.get("tags", [])) for cell in notebook.cells
    ]
    assert cells(paired) == cells(written)
    assert not any(cell.get("outputs") for cell in paired.cells)


@by_name
def test_every_notebook_has_one_cell_that_installs(script):
    cells = [cell.source for cell in jupytext.read(script).cells if cell.cell_type == "code"]
    assert ["pip" in cell for cell in cells] == [True, *[False] * (len(cells) - 1)]


def test_notebooks_share_their_install_cell():
    """They differ in the extras only."""
    first = lambda script: next(c for c in jupytext.read(script).cells if c.cell_type == "code")
    cells = [re.sub(r"extras = .*? \+", "", first(script).source) for script in SCRIPTS]
    assert cells == cells[:1] * len(cells)


@pytest.fixture
def install(tmp_path, monkeypatch):
    """Return a function that runs an install cell without jspec and returns pip's argument."""
    packages, find_spec = [], importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "jspec" else find_spec(name)
    )
    monkeypatch.setattr(sys, "path", ["", str(tmp_path / "jspec"), *sys.path])

    def run(script, folder, pyproject=None, returncode=0, driver=None):
        monkeypatch.setattr(shutil, "which", lambda name: driver and f"/usr/bin/{name}")

        def pip(words, **_):
            if words[0] == "nvidia-smi":
                return types.SimpleNamespace(stdout=driver)
            packages.append(words[-1])
            return types.SimpleNamespace(returncode=returncode)

        monkeypatch.setattr(subprocess, "run", pip)
        for path, text in (pyproject or {}).items():
            (tmp_path / path).mkdir(parents=True, exist_ok=True)
            (tmp_path / path / "pyproject.toml").write_text(text)
        (tmp_path / folder).mkdir(parents=True, exist_ok=True)
        monkeypatch.chdir(tmp_path / folder)
        cell = next(cell for cell in jupytext.read(script).cells if cell.cell_type == "code")
        exec(compile(cell.source, script.name, "exec"), {})
        source, _, extras = packages[-1].partition("[")
        return source if driver is None else set(extras.rstrip("]").split(","))

    return run


OURS = (NOTEBOOKS.parent / "pyproject.toml").read_text(encoding="utf-8")


@pytest.mark.parametrize("folder", [".", "jspec", "jspec/notebooks"])
def test_a_notebook_installs_the_clone_around_or_beside_it(folder, install, tmp_path):
    assert install(SCRIPTS[0], folder, {"jspec": OURS}) == str(tmp_path / "jspec")
    assert not {"", str(tmp_path / folder)} & set(sys.path)


def test_a_notebook_without_a_clone_installs_the_published_package(install):
    other = '[project]\nname = "mine"\ndependencies = ["jspec-decoding"]\n'
    assert install(SCRIPTS[0], "work", {".": other, "work": other}) == "jspec-decoding"


@pytest.mark.parametrize(
    "driver, cuda", [("550.54.15\n", "cuda12"), ("580.65.06\n", "cuda"), ("has failed", "cuda12")]
)
def test_a_notebook_installs_the_cuda_of_the_driver(driver, cuda, install):
    assert install(SCRIPTS[0], "work", driver=driver) >= {"bench", cuda}


def test_a_notebook_names_the_remedy_if_pip_fails(install):
    with pytest.raises(SystemExit, match=r"^pip could not install jspec-decoding.*: clone or up"):
        install(SCRIPTS[0], "work", returncode=1)


def smaller_values(script, root):
    """Return replacements for the cell of parameters."""
    if script.stem == "quickstart":
        llm_fixtures.write_eagle3_head(root / "eagle3")
        return {"DEMO": llm_fixtures.checkpoints(root)["target"].parent}
    return dict(SMALLER.get(script.stem, {}))


@pytest.mark.parametrize(
    ("script", "is_small"),
    [
        *[pytest.param(script, True, id=script.stem) for script in SCRIPTS],
        pytest.param(
            NOTEBOOKS / "quickstart.py", False, id="quickstart as it is", marks=pytest.mark.slow
        ),
    ],
)
def test_every_notebook_runs(script, is_small, monkeypatch, capsys, tmp_path, root):
    matplotlib.use("Agg")
    shown = []
    monkeypatch.setattr(plt, "show", lambda: shown.append(plt.close("all")))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    # Count a rule at the vocabulary of the model in fewer rounds; other tests use all rounds.
    monkeypatch.setattr(importlib.import_module("jspec.tools.certify.sampled"), "_ELEMENTS", 2**21)
    # As in a kernel, classes of the notebook can be imported from a module.
    module = types.ModuleType(f"notebook_{script.stem}")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    smaller = smaller_values(script, root) if is_small else {}
    for cell in jupytext.read(script).cells:
        if cell.cell_type == "code":
            exec(compile(cell.source, script.name, "exec"), vars(module))
        if "parameters" in cell.metadata.get("tags", []):
            assert smaller.keys() <= vars(module).keys()
            vars(module).update(smaller)
            smaller = {}
    assert not smaller
    assert PRINTS[script.stem] in capsys.readouterr().out
    assert len(shown) == PICTURES.get(script.stem, 0)

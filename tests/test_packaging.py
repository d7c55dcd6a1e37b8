"""The content of an installation, beside Hugging Face's package named ``kernels``."""

import importlib.metadata
import importlib.util
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("jspec", "kernels", "training")


def _python(*arguments, path=None):
    """Run Python in the root of the tree, which has a folder ``kernels/``; return its output."""
    environment = {"PATH": "", "HOME": str(path or ROOT), "PYTHONPATH": str(path or "")}
    command = [sys.executable, *arguments]
    ran = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


@pytest.fixture
def accepted_kernels(tmp_path):
    """Return a search path with a version of ``kernels`` that transformers imports."""
    versions = importlib.util.find_spec("transformers").submodule_search_locations[0]
    table = Path(versions, "dependency_versions_table.py").read_text()
    version = re.search(r'"kernels>=([\d.]+)', table)[1]
    metadata = tmp_path / f"kernels-{version}.dist-info" / "METADATA"
    metadata.parent.mkdir()
    metadata.write_text(f"Metadata-Version: 2.1\nName: kernels\nVersion: {version}\n")
    return tmp_path


def test_our_kernels_are_installed_inside_jspec():
    assert importlib.util.find_spec("jspec.kernels").origin == str(ROOT / "kernels/__init__.py")


def test_the_name_kernels_is_left_to_hugging_face():
    assert not {"kernels"} & _top_level("jspec-decoding")
    assert "kernels" in {file.parts[0] for file in importlib.metadata.files("kernels")}


def test_a_training_module_starts_beside_their_kernels(accepted_kernels):
    assert "usage" in _python("-m", "training.pretrain", "--help", path=accepted_kernels).lower()


def test_transformers_models_and_jspec_import_together_from_the_root(accepted_kernels):
    pytest.importorskip("torch")
    code = (
        "import jspec.ops, jspec.checkpoints.checkpoint\n"
        "from transformers.utils import is_kernels_available as available\n"
        "from transformers import LlamaForCausalLM, AutoTokenizer\n"
        "import jspec.kernels, kernels\n"
        "print(available(), jspec.kernels.__file__, kernels.__file__)"
    )
    available, ours, theirs = _python("-c", code, path=accepted_kernels).split()
    assert available == "True" and Path(ours) == ROOT / "kernels/__init__.py"
    assert not Path(theirs).is_relative_to(ROOT / "kernels")


def test_the_core_needs_no_torch():
    core = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    assert not [name for name in core if re.match(r"torch|tensorflow|accelerate", name)]
    loaded = _python("-c", "import jspec, sys; print('torch' in sys.modules)")
    assert loaded.split() == ["False"]


def test_the_wheel_has_the_entire_tree_and_nothing_else(tmp_path):
    for path in (ROOT / name for name in ("pyproject.toml", "README.md", "LICENSE")):
        shutil.copy(path, tmp_path)
    tree = {
        path.relative_to(ROOT)
        for folder in FOLDERS
        for path in (ROOT / folder).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    for path in tree:  # file by file: a clone has no empty folders
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / path, tmp_path / path)
    build = ("wheel", "--no-deps", "--no-build-isolation", "-qq", "-w", tmp_path / "dist", tmp_path)
    subprocess.run([sys.executable, "-m", "pip", *build], check=True, stdin=subprocess.DEVNULL)
    [wheel] = (tmp_path / "dist").glob("*.whl")
    files = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    assert files == {re.sub("^kernels/", "jspec/kernels/", path.as_posix()) for path in tree}
    assert {"jspec/kernels/__init__.py", "jspec/py.typed"} <= files


def _top_level(distribution):
    return set((importlib.metadata.distribution(distribution).read_text("top_level.txt")).split())

"""Commands of training without the extra ``train``."""

import subprocess
import sys

import pytest

# The child hides packages of the extra, as if they were not installed.
HIDDEN = """
import runpy, sys

class Hidden:
    def find_spec(self, name, path=None, target=None):
        if name in ("grain", "tyro"):
            raise ModuleNotFoundError(name)

import importlib.util
found = importlib.util.find_spec
importlib.util.find_spec = lambda name: None if name in ("grain", "tyro") else found(name)
sys.meta_path.insert(0, Hidden())
sys.argv = ["-m"]
runpy.run_module(sys.stdin.read(), run_name="__main__", alter_sys=False)
"""


@pytest.mark.parametrize("command", ["distill", "pretrain", "generate_data", "export"])
def test_a_command_without_its_extra_names_it_in_one_line(command):
    ended = subprocess.run(
        [sys.executable, "-c", HIDDEN],
        input=f"training.{command}",
        text=True,
        capture_output=True,
    )
    assert ended.returncode == 2
    assert ended.stderr == (
        "error: training needs grain, tyro; run `pip install 'jspec-decoding[train]'`\n"
    )

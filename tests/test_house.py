"""The architecture: imports go down only."""

import ast
import re
import subprocess
import sys

import pytest

from tests import house


def test_every_file_has_a_floor():
    assert [n for n in house.trees() if house.room(n) in ("", "jspec")] == ["jspec"]


def test_imports_go_down_only():
    assert house.upward() == []


def test_modules_and_folders_import_each_other_in_no_circle():
    assert house.cycle(house.imports()) == []
    assert house.cycle(house.folder_imports()) == []


def test_a_circle_is_found():
    assert house.cycle([("a", "b"), ("b", "c"), ("c", "a"), ("a", "d")])


def test_jspec_has_few_folders_and_modules():
    assert len(house.rooms_of_jspec()) <= 29
    assert len(list((house.ROOT / "jspec").glob("*.py"))) <= 4


@pytest.mark.parametrize("table", ["jspec.drafters.methods", "jspec.verify.rules"])
def test_methods_and_rules_never_import_their_siblings(table):
    package = table.rpartition(".")[0]
    inside = [(i, n) for i, n in house.imports() if n.startswith(f"{package}.")]
    # The table imports the methods or rules, and the type of a rule.
    entries = {n for i, n in inside if i == table} - {"jspec.verify.rule"}
    assert entries and [pair for pair in inside if entries >= set(pair)] == []


def test_drafters_link_their_network_files_and_training_which_link_them():
    docs = {name: ast.get_docstring(tree) or "" for name, tree in house.trees().items()}
    drafters = {i for i, n in house.imports() if n.startswith("jspec.models.heads.")}
    drafters = {name for name in drafters if re.fullmatch(r"jspec\.drafters\.\w+", name)}
    assert len(drafters) >= 7
    for drafter in drafters:
        links = re.findall(r"``((?:jspec|training)\.[\w.]+)``", docs[drafter].split("\n\n")[-1])
        folders = {link.rpartition(".")[0] for link in links}
        assert folders == {"jspec.models.heads", "jspec.checkpoints.heads", "training.tasks"}
        assert [link for link in links if f"``{drafter}``" not in docs[link]] == []


def test_only_ops_imports_kernels():
    users = {i for i, n in house.imports() if house.room(n) == "jspec.kernels" != house.room(i)}
    assert {i for i in users if not i.startswith(("tests.", "benchmarks."))} == {"jspec.ops"}


def test_nothing_below_the_command_line_reads_the_environment():
    floor = house.FLOOR_OF["jspec.cli"]
    low = [n for n in house.trees() if house.FLOOR_OF[house.room(n)] < floor]
    words = {n: _words(house.trees()[n]) for n in low}
    readers = [n for n in low if words[n] & {"environ", "getenv"}]
    assert [n for n in readers if "__main__" not in words[n]] == []


def _words(tree):
    """Return the attributes, imported names and constants of a module."""
    nodes = house.nodes(tree)
    constants = {node.value for node in nodes if isinstance(node, ast.Constant)}
    return constants | {
        getattr(node, word) for node in nodes for word in ("attr", "name") if hasattr(node, word)
    }


def test_no_module_shares_a_name_with_a_public_function_of_its_package():
    jspec = house.ROOT / "jspec"
    modules = {path.stem for path in jspec.iterdir() if path.suffix == ".py" or path.is_dir()}
    import jspec as package

    assert modules & set(package.__all__) == set()


def test_one_core_module_loads_neither_drafters_nor_transformers():
    code = (
        "import sys, jspec.core.trees; "
        "print([m for m in sys.modules if m.startswith(('jspec.drafters', 'transformers'))])"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"


def test_the_loop_loads_few_modules_and_no_drafter_and_no_grammar_engine():
    code = (
        "import sys, jspec.engine.loop; "
        "print(*(m for m in sys.modules if m.startswith(('jspec', 'llguidance', 'outlines'))))"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = run.stdout.split()
    assert "jspec.engine.loop" in loaded and len(loaded) <= 46
    parts = "drafters", "grammar", "models"
    unneeded = "llguidance", "outlines", *(f"jspec.{part}" for part in parts)
    assert [module for module in loaded if module.startswith(unneeded)] == []

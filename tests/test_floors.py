"""The floors of the house: imports go down only, whoever writes them and wherever they stand."""

import ast
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FLOORS = """jspec.kernels
jspec.types
jspec.naming
jspec.files.whole_file
jspec.threefry jspec.checks jspec.buckets jspec.automaton jspec.schemas
jspec.contracts jspec.round_checks
jspec.topology jspec.kv jspec.tokens jspec.sampling jspec.ops
jspec.shaping jspec.grammar
jspec.drafting
jspec.models jspec.adapters jspec.verify
jspec.drafters
jspec.rows jspec.logprobs jspec.plan jspec.decode jspec.generate
jspec.calibration
jspec.params jspec.prompts jspec.text
jspec.files
jspec.checkpoint
jspec.files.stitching jspec.loading
jspec.vocabularies
jspec.config
jspec.assembly jspec.metrics jspec.outputs
jspec.jobs
jspec.tracing
jspec.llm
jspec.certify jspec
jspec.show jspec.demo jspec.arguments jspec.bench jspec.tuning jspec.cli jspec.__main__
training
tests benchmarks examples"""
FLOOR_OF = {room: floor for floor, line in enumerate(FLOORS.split("\n")) for room in line.split()}


def _imports(tree):
    """Dotted names that a file imports; `from a import b` is a.b."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            base = f"{node.module}." if isinstance(node, ast.ImportFrom) else ""
            assert base != "None.", "imports name their module in full"
            yield from (base + alias.name for alias in node.names)


def _room(name):
    """The longest known beginning of a dotted name; "" for other people's packages."""
    return max(
        (room for room in FLOOR_OF if f"{name}.".startswith(f"{room}.")), key=len, default=""
    )


def _trees():
    """(dotted name, syntax tree) of every file; kernels/ is installed as jspec.kernels."""
    for top in ("kernels", "jspec", "training", "tests", "benchmarks", "examples"):
        for path in (ROOT / top).rglob("*.py"):
            name = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
            yield "jspec." * (top == "kernels") + name, ast.parse(path.read_text())


TREES = dict(_trees())
EDGES = [(name, imported) for name, tree in TREES.items() for imported in _imports(tree)]


def test_every_file_has_a_floor():
    assert [name for name in TREES if _room(name) in ("", "jspec")] == ["jspec"]


def test_imports_go_down_only():
    assert [(i, n) for i, n in EDGES if FLOOR_OF.get(_room(n), -1) > FLOOR_OF[_room(i)]] == []


def test_methods_and_rules_never_import_their_siblings():
    for package in ("jspec.drafters", "jspec.verify"):
        inside = [(i, ".".join(n.split(".")[:3])) for i, n in EDGES if n.startswith(f"{package}.")]
        # What the package's __init__ imports is a method or a rule; other files there are helpers.
        main = {n for i, n in inside if i == package}
        assert main and [(i, n) for i, n in inside if i in main and n in main - {i}] == []


def test_only_ops_opens_the_door_to_kernels():
    users = {i for i, n in EDGES if _room(n) == "jspec.kernels" and _room(i) != "jspec.kernels"}
    assert {i for i in users if not i.startswith(("tests.", "benchmarks."))} == {"jspec.ops"}


def test_nothing_below_the_command_line_reads_the_environment():
    low = [n for n in TREES if FLOOR_OF[_room(n)] < FLOOR_OF["jspec.cli"]]
    words = lambda node: {getattr(node, "attr", ""), getattr(node, "name", "")}  # x.environ, import
    assert [n for n in low for x in ast.walk(TREES[n]) if words(x) & {"environ", "getenv"}] == []

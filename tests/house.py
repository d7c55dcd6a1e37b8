"""The architecture of jspec, read from its import statements.

``python -m tests.house`` prints every folder with its files, lines and the folders it imports,
then upward imports and import cycles. ``tests/test_house.py`` asserts that there are none.
"""

import ast
import graphlib
from collections import defaultdict
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
# Lowest floor first. Folders of one line do not import each other.
FLOORS = """jspec.util
jspec.sharding
jspec.core
jspec.kernels
jspec.ops jspec.grammar
jspec.models jspec.verify
jspec.drafters jspec.checkpoints
jspec.engine
jspec.api
jspec.tools jspec.server
jspec.cli training
jspec jspec.__main__
benchmarks examples
tests"""
FLOOR_OF = {room: floor for floor, line in enumerate(FLOORS.split("\n")) for room in line.split()}
TOPS = ("jspec", "kernels", "training", "tests", "benchmarks", "examples")


def room(module: str) -> str:
    """Return the top-level folder (or ``jspec.ops``) of a dotted name, "" for other packages."""
    return max((r for r in FLOOR_OF if f"{module}.".startswith(f"{r}.")), key=len, default="")


def folder(module: str) -> str:
    """Return the folder that holds a module."""
    return module if module in packages() else module.rpartition(".")[0]


@cache
def parsed(path: Path) -> ast.Module:
    """Return the syntax tree of a file."""
    return ast.parse(path.read_text(encoding="utf-8"))


@cache
def nodes(tree: ast.Module) -> tuple[ast.AST, ...]:
    """Return every node of a syntax tree."""
    return tuple(ast.walk(tree))


@cache
def trees() -> dict[str, ast.Module]:
    """Return the syntax tree of every module; kernels/ is installed as jspec.kernels."""
    modules = {}
    for top in TOPS:
        for path in sorted((ROOT / top).rglob("*.py")):
            name = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
            modules["jspec." * (top == "kernels") + name] = parsed(path)
    return modules


@cache
def packages() -> frozenset[str]:
    """Return the modules that are folders."""
    inits = (path.parent for top in TOPS for path in (ROOT / top).rglob("__init__.py"))
    names = (".".join(path.relative_to(ROOT).parts) for path in inits)
    return frozenset("jspec." * name.startswith("kernels") + name for name in names)


@cache
def imports() -> tuple[tuple[str, str], ...]:
    """Return (importing module, imported module) pairs, for imports anywhere in a file.

    The imports of ``jspec/__init__.py`` are left out: public names load at their first use.
    """
    known, pairs = trees().keys(), []
    for name, tree in trees().items():
        for node in nodes(tree):
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                assert node.module and not node.level, f"{name}: imports name their module in full"
                names = [f"{node.module}.{alias.name}" for alias in node.names]
            else:
                continue
            targets = (n if n in known else n.rpartition(".")[0] for n in names)
            pairs += [(name, n) for n in targets if n in known and name != "jspec"]
    return tuple(pairs)


def upward() -> list[tuple[str, str]]:
    """Return the imports that lead to a higher floor, or across one."""
    is_upward = lambda above, below: above != below and FLOOR_OF[below] >= FLOOR_OF[above]
    return [(a, b) for a, b in imports() if is_upward(room(a), room(b))]


def cycle(pairs: tuple[tuple[str, str], ...] | list[tuple[str, str]]) -> list[str]:
    """Return one cycle of a graph of imports, [] if there is none."""
    graph = defaultdict(set)
    for importer, imported in pairs:
        if importer != imported:
            graph[importer].add(imported)
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        return error.args[1]
    return []


def folder_imports() -> list[tuple[str, str]]:
    """Return (importing folder, imported folder) pairs below jspec/ and training/.

    A package's ``__init__`` is a module beside its folder: tables such as ``METHODS`` import the
    files that implement them.
    """
    is_ours = lambda module: module.startswith(("jspec.", "training"))
    inside = [pair for pair in imports() if all(map(is_ours, pair))]
    is_alone = lambda module: module in packages() or module.count(".") < 2
    of_file = lambda module: f"{module} (file)" if is_alone(module) else folder(module)
    return sorted({(of_file(a), of_file(b)) for a, b in inside if of_file(a) != of_file(b)})


def rooms_of_jspec() -> list[str]:
    """Return the folders of jspec/, kernels aside."""
    inside = (name for name in packages() if name.startswith("jspec."))
    return sorted(name for name in inside if not name.startswith("jspec.kernels"))


def main() -> None:
    """Print folders, arrows, upward arrows and cycles."""
    files, lines, arrows = defaultdict(int), defaultdict(int), defaultdict(set)
    for name in trees():
        path = ROOT / name.removeprefix("jspec." * name.startswith("jspec.kernels")).replace(
            ".", "/"
        )
        path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
        files[folder(name)] += 1
        lines[folder(name)] += path.read_text().count("\n")
    for importer, imported in imports():
        if room(importer) != room(imported):
            arrows[folder(importer)].add(room(imported))
    for floor in FLOORS.split("\n"):
        for top in floor.split():
            for name in sorted(files):
                if room(name) == top and name != "jspec":
                    below = " ".join(sorted(arrows[name]))
                    print(f"{name:32} {files[name]:4} files {lines[name]:6} lines  -> {below}")
    direct = sorted(path.name for path in (ROOT / "jspec").glob("*.py"))
    print(
        f"\n{len(rooms_of_jspec())} rooms in jspec/; {len(direct)} modules directly in it: {direct}"
    )
    print(f"upward arrows: {upward() or 0}")
    print(f"cycles of modules: {cycle(imports()) or 0}; of folders: {cycle(folder_imports()) or 0}")


if __name__ == "__main__":
    main()

"""Files to documents: folders whole; packages without near copies, tests and tables."""

import dataclasses
import fnmatch
import os
import sys
import sysconfig
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from training.data.records import hash_64

SUFFIXES = (".py", ".txt", ".md", ".rst")
# Left out of packages: tables, fixtures and copies teach a small model little, or leak held-out
# code.
EXCLUDED = (
    *("tests", "test", "testing", "test_*.py", "*_test.py", "conftest.py"),
    *("_vendor", "vendor", "vendored", "third_party", "site-packages"),
    *("__pycache__", "encodings", "lib2to3", "pydoc_data", "idlelib", "_distutils", "data"),
    *("*_pb2.py", "*_pb2_grpc.py", "*_tables.py", "_mapping.py"),
)
MIN_BYTES, MAX_BYTES, MAX_LINE = 400, 200_000, 600
# Shares of a file: beyond them it is a table, a near copy of another file, or not English code.
MAX_DIGITS, MAX_SEEN_LINES, MIN_ASCII = 0.12, 0.5, 0.98
_REASONS = 8  # reasons that are printed by name


@dataclasses.dataclass(frozen=True)
class Document:
    """One file: its source, its top-level module, its text."""

    source: str
    module: str
    text: str


def find_documents(
    sources: Sequence[str],
    package_paths: Sequence[str] = (),
    first: Sequence[str] = (),
    left_out: Counter[str] | None = None,
) -> list[Document]:
    """Return the documents of ``sources``, in a fixed order; stderr counts what is left out.

    A source is ``stdlib``, ``package:NAME`` (searched in the running environment, then in
    ``package_paths``), a file, a folder, or a glob of them. Copies of files of the held-out modules
    ``first`` are left out elsewhere. ``left_out`` gets the number of files left out by reason.

    Raises:
      ValueError: a source does not exist, or nothing is left.
    """
    left_out = Counter() if left_out is None else left_out
    documents = collect(sources, package_paths, first, left_out)
    if not documents:
        raise ValueError(f"data {list(sources)} holds no usable text; give other files or folders")
    return documents


def collect(
    sources: Sequence[str],
    package_paths: Sequence[str],
    first: Sequence[str],
    left_out: Counter[str],
    other: Callable[[str, Path], bool] = lambda module, path: False,  # noqa: ARG005
) -> list[Document]:
    """Do the same, but allow no documents.

    Packages and the standard library are cleaned. Of two near copies the earlier one stays; modules
    of ``first`` count as earliest. Files and folders stay whole, except near copies of held-out
    modules. Files of a folder that are not of SUFFIXES go to ``other``, which returns whether it
    takes them.
    """
    files = [
        (source, *file)
        for source in sources
        for file in _files(source, package_paths, left_out, other)
    ]
    files.sort(key=lambda entry: entry[1] not in first)  # stable: the order given, but for `first`
    seen: set[int] = set()
    held: set[int] = set()
    compared = bool(first) or any(map(is_package, sources))
    documents = []
    for source, module, path in files:
        packaged, apart = is_package(source), module in first
        text = (_cleaned if packaged else _read)(path, left_out)
        lines = _long_lines(text) if compared else set()
        if packaged and _mostly(lines, seen):
            left_out["near copies of others"] += 1
        elif not packaged and not apart and _mostly(lines, held):
            left_out["near copies of what is held out"] += 1
        elif text:
            documents.append(Document(source, module, text))
            seen |= lines
            held |= lines if apart else set()
    print_left_out(left_out)
    return documents


def print_left_out(left_out: Counter[str]) -> None:
    """Print on stderr how many files are left out by reason."""
    if not left_out:
        return
    named = [f"{count} {reason}" for reason, count in left_out.most_common(_REASONS)]
    others = sum(count for _, count in left_out.most_common()[_REASONS:])
    named += [f"{others} for other reasons"] if others else []
    print(f"left out of the data: {', '.join(named)}", file=sys.stderr)


def is_package(source: str) -> bool:
    """Return whether a source is a package or the standard library."""
    return source == "stdlib" or source.startswith("package:")


def matches(name: str) -> list[Path]:
    """Return the files or folders of a path or glob, sorted."""
    path = Path(name).expanduser()
    if path.exists():
        return [path]
    paths = sorted(Path(path.anchor).glob(str(path.relative_to(path.anchor))))
    if not paths:
        raise ValueError(f"data {name!r} matches no file; give an existing path, glob or package")
    return paths


def _files(
    source: str,
    package_paths: Sequence[str],
    left_out: Counter[str],
    other: Callable[[str, Path], bool],
) -> Iterable[tuple[str, Path]]:
    """Yield (module, path) of every candidate file of one source, sorted."""
    if source == "stdlib":
        roots = [Path(sysconfig.get_paths()["stdlib"])]
    elif source.startswith("package:"):
        roots = [_package(source.removeprefix("package:"), package_paths)]
    else:
        roots = matches(source)
    packaged = is_package(source)
    excluded = _excluded if packaged else _hidden
    reason = "named as tests, tables or copies" if packaged else "hidden"
    for root in roots:
        if root.is_file():
            yield root.stem, root
            continue
        named = (root / "__init__.py").exists()  # a package is one module; a folder holds many
        for path in sorted(_walk(root, excluded, reason, left_out)):
            module = path.relative_to(root).parts[0].removesuffix(path.suffix)
            module = root.name if named else module
            if path.suffix in SUFFIXES:
                yield module, path
            elif not packaged and not other(module, path):
                left_out[f"*{path.suffix}"] += 1


def _walk(
    root: Path, excluded: Callable[[str], bool], reason: str, left_out: Counter[str]
) -> Iterable[Path]:
    """Yield the files below ``root``; excluded folders are not entered."""
    for folder, folders, files in os.walk(root):
        left_out.update(reason for name in folders if excluded(name))
        folders[:] = [name for name in folders if not excluded(name)]
        for name in files:
            path = Path(folder, name)
            if not path.is_file():
                continue
            if not excluded(name):
                yield path
            elif path.suffix in SUFFIXES:
                left_out[reason] += 1


def _package(name: str, package_paths: Sequence[str]) -> Path:
    for folder in (*sys.path, *package_paths):
        for candidate in (Path(folder) / name, Path(folder) / f"{name}.py"):
            if candidate.exists():  # a namespace package has no __init__.py
                return candidate
    raise ValueError(f"data 'package:{name}' is not installed; install it or drop it from --data")


def _excluded(name: str) -> bool:
    return any(fnmatch.fnmatch(name, rule) for rule in EXCLUDED)


def _hidden(name: str) -> bool:
    return name.startswith(".") or name == "__pycache__"


def _read(path: Path, left_out: Counter[str]) -> str:
    """Return the text of a file, or "" if it has none."""
    try:
        text = path.read_text("utf-8-sig")
    except UnicodeDecodeError:
        left_out["not UTF-8"] += 1
        return ""
    if text.strip():
        return text
    left_out["empty"] += 1
    return ""


def _cleaned(path: Path, left_out: Counter[str]) -> str:
    """Return the text of a file without its licence header, or "" if it is not worth reading."""
    text, reason = "", "shorter or longer than files worth reading"
    if MIN_BYTES <= path.stat().st_size <= MAX_BYTES:
        try:
            text = path.read_text("utf-8-sig")
        except UnicodeDecodeError:
            reason = "not UTF-8"
    text = _without_licence(text.replace("\r\n", "\n").expandtabs(4))
    lines = text.splitlines()
    if lines and (
        max(map(len, lines)) > MAX_LINE or sum(map(str.isdigit, text)) > MAX_DIGITS * len(text)
    ):
        text, reason = "", "tables"
    if not (text.isascii() or sum(map(str.isascii, text)) > MIN_ASCII * len(text)):
        text, reason = "", "not English"
    if len(text) < MIN_BYTES:
        left_out[reason] += 1
        return ""
    return text


def _without_licence(text: str) -> str:
    lines = text.splitlines(keepends=True)
    head = 0
    while head < len(lines) and (lines[head].startswith("#") or not lines[head].strip()):
        head += 1
    notice = "".join(lines[:head]).lower()
    return "".join(lines[head:]) if "copyright" in notice or "licen" in notice else text


def _long_lines(text: str) -> set[int]:
    """Return hashes of the lines that are long enough to identify a file."""
    return {hash_64(line) for line in map(str.strip, text.splitlines()) if len(line) >= 16}


def _mostly(lines: set[int], seen: set[int]) -> bool:
    """Return whether most of the lines are among those seen."""
    return bool(lines) and len(lines & seen) > MAX_SEEN_LINES * len(lines)

"""Files to documents: folders whole; packages cleaned, without near copies and tables."""

import dataclasses
import fnmatch
import hashlib
import os
import sys
import sysconfig
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

SUFFIXES = (".py", ".txt", ".md", ".rst")
# Of packages: tables, fixtures and copies of others teach a small model little, or leak held-out
# code.
EXCLUDED = (
    "tests",
    "test",
    "testing",
    "_vendor",
    "vendor",
    "vendored",
    "third_party",
    "_distutils",
    "__pycache__",
    "site-packages",
    "encodings",
    "lib2to3",
    "pydoc_data",
    "idlelib",
    "data",
    "*_pb2.py",
    "*_pb2_grpc.py",
    "*_tables.py",
    "test_*.py",
    "*_test.py",
    "_mapping.py",
    "conftest.py",
)
MIN_BYTES, MAX_BYTES, MAX_LINE = 400, 200_000, 600
# Shares of a file: beyond them it is a table, a near copy of another file, or not English code.
MAX_DIGITS, MAX_SEEN_LINES, MIN_ASCII = 0.12, 0.5, 0.98
_REASONS = 8  # that are told by name


@dataclasses.dataclass(frozen=True)
class Document:
    """One file: the source it came from, its top-level module, its text."""

    source: str
    module: str
    text: str


def find_documents(
    sources: Sequence[str],
    package_paths: Sequence[str] = (),
    first: Sequence[str] = (),
    left_out: Counter[str] | None = None,
) -> list[Document]:
    """The documents of ``sources``, in a fixed order; what is left out is told on stderr.

    Args:
      sources: each one of ``stdlib`` (of the running Python), ``package:NAME`` (searched in the
        running environment, then in ``package_paths``), a file, a folder, or a glob of them.
      package_paths: more folders in which packages are searched.
      first: modules to be held out: no copy of their files is left elsewhere.
      left_out: gets the number of files that are left out by reason.

    Raises:
      ValueError: a source does not exist, or nothing is left.
    """
    left_out = Counter() if left_out is None else left_out
    documents = collect(sources, package_paths, first, left_out)
    say_left_out(left_out)
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
    """As ``find_documents``, but silent, and there may be none.

    Packages and the standard library are cleaned, and of two near copies the earlier one stays,
    where modules of ``first`` count as earliest. Files and folders are taken whole, but for near
    copies of what is held out; what a folder holds beside SUFFIXES is shown to ``other``, which
    says whether it takes it.
    """
    files = [
        (source, *found)
        for source in sources
        for found in _files(source, package_paths, left_out, other)
    ]
    files.sort(key=lambda entry: entry[1] not in first)  # stable: the order given, but for `first`
    seen: set[int] = set()
    held: set[int] = set()
    compared = bool(first) or any(map(is_package, sources))
    documents = []
    for source, module, path in files:
        packaged, apart = is_package(source), module in first
        text = (_cleaned if packaged else _whole)(path, left_out)
        lines = _long_lines(text) if compared else set()
        if packaged and _mostly(lines, seen):
            left_out["near copies of others"] += 1
        elif not packaged and not apart and _mostly(lines, held):
            left_out["near copies of what is held out"] += 1
        elif text:
            documents.append(Document(source, module, text))
            seen |= lines
            held |= lines if apart else set()
    return documents


def say_left_out(left_out: Counter[str]) -> None:
    """One line on stderr: how many files are left out, and why."""
    if not left_out:
        return
    named = [f"{count} {reason}" for reason, count in left_out.most_common(_REASONS)]
    others = sum(count for _, count in left_out.most_common()[_REASONS:])
    named += [f"{others} for other reasons"] if others else []
    print(f"left out of the data: {', '.join(named)}", file=sys.stderr)


def is_package(source: str) -> bool:
    """Whether a source is a package or the standard library, no file or folder."""
    return source == "stdlib" or source.startswith("package:")


def _files(
    source: str,
    package_paths: Sequence[str],
    left_out: Counter[str],
    other: Callable[[str, Path], bool],
) -> Iterable[tuple[str, Path]]:
    """(module, path) of every candidate file of one source, sorted."""
    if source == "stdlib":
        roots = [Path(sysconfig.get_paths()["stdlib"])]
    elif source.startswith("package:"):
        roots = [_package(source.removeprefix("package:"), package_paths)]
    else:
        path = Path(source).expanduser()
        roots = sorted(Path(path.anchor).glob(str(path.relative_to(path.anchor))))
    if not roots:
        raise ValueError(f"data {source!r} matches no file; give an existing path, glob or package")
    for root in roots:
        if root.is_file():
            yield root.stem, root
            continue
        packaged = is_package(source)
        excluded = _excluded if packaged else _hidden
        reason = "named as tests, tables or copies" if packaged else "hidden"
        named = (root / "__init__.py").exists()  # a package is one module; a folder holds many
        for path in sorted(_walk(root, excluded, reason, left_out)):
            inside = path.relative_to(root)
            module = root.name if named else inside.parts[0].removesuffix(path.suffix)
            if path.suffix in SUFFIXES:
                yield module, path
            elif not packaged and not other(module, path):
                left_out[f"*{path.suffix}"] += 1


def _walk(
    root: Path, excluded: Callable[[str], bool], reason: str, left_out: Counter[str]
) -> Iterable[Path]:
    """Files below ``root`` but for excluded ones, whose folders are not even entered."""
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


def _whole(path: Path, left_out: Counter[str]) -> str:
    """Text of a file as it is, or "" where it has none."""
    try:
        text = path.read_text("utf-8")
    except UnicodeDecodeError:
        left_out["not UTF-8"] += 1
        return ""
    if text.strip():
        return text
    left_out["empty"] += 1
    return ""


def _cleaned(path: Path, left_out: Counter[str]) -> str:
    """Text of a file without its licence header, or "" where it is not worth reading."""
    text, reason = "", "shorter or longer than files worth reading"
    if MIN_BYTES <= path.stat().st_size <= MAX_BYTES:
        try:
            text = path.read_text("utf-8")
        except UnicodeDecodeError:
            reason = "not UTF-8"
    text = _without_licence(text.replace("\r\n", "\n").expandtabs(4))
    lines = text.splitlines()
    if lines and (max(map(len, lines)) > MAX_LINE or _digits(text) > MAX_DIGITS * len(text)):
        text, reason = "", "tables"
    if not (text.isascii() or sum(map(str.isascii, text)) > MIN_ASCII * len(text)):
        text, reason = "", "not English"
    if len(text) < MIN_BYTES:
        left_out[reason] += 1
        return ""
    return text


def _digits(text: str) -> int:
    if text.isascii():  # ten fast passes, not a slow one
        return sum(map(text.count, "0123456789"))
    return sum(map(str.isdigit, text))


def _without_licence(text: str) -> str:
    lines = text.splitlines(keepends=True)
    head = 0
    while head < len(lines) and (lines[head].startswith("#") or not lines[head].strip()):
        head += 1
    notice = "".join(lines[:head]).lower()
    return "".join(lines[head:]) if "copyright" in notice or "licen" in notice else text


def _long_lines(text: str) -> set[int]:
    """Hashes of the lines that are long enough to tell a file by."""
    return {_hash(line) for line in map(str.strip, text.splitlines()) if len(line) >= 16}


def _mostly(lines: set[int], seen: set[int]) -> bool:
    """Whether most of the lines are among those seen."""
    return bool(lines) and len(lines & seen) > MAX_SEEN_LINES * len(lines)


def _hash(line: str) -> int:
    """A 64-bit hash that does not change from run to run, as Python's own does."""
    return int.from_bytes(hashlib.blake2b(line.encode(), digest_size=8).digest(), "big")

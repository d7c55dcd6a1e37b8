"""Files to documents: source trees and plain text, cleaned, without near copies and tables."""

import dataclasses
import fnmatch
import hashlib
import os
import sys
import sysconfig
from collections.abc import Iterable, Sequence
from pathlib import Path

SUFFIXES = (".py", ".txt", ".md", ".rst")
# Tables, fixtures and copies of other packages teach a small model little, or leak held-out code.
EXCLUDED = (
    "tests", "test", "testing", "_vendor", "vendor", "vendored", "third_party", "_distutils",
    "__pycache__", "site-packages", "encodings", "lib2to3", "pydoc_data", "idlelib", "data",
    "*_pb2.py", "*_pb2_grpc.py", "*_tables.py", "test_*.py", "*_test.py", "_mapping.py",
    "conftest.py",
)  # fmt: skip
MIN_BYTES, MAX_BYTES, MAX_LINE = 400, 200_000, 600
# Shares of a file: beyond them it is a table, a near copy of another file, or not English code.
MAX_DIGITS, MAX_SEEN_LINES, MIN_ASCII = 0.12, 0.5, 0.98


@dataclasses.dataclass(frozen=True)
class Document:
    """One file: the source it came from, its top-level module, its text."""

    source: str
    module: str
    text: str


def find_documents(
    sources: Sequence[str], package_paths: Sequence[str] = (), first: Sequence[str] = ()
) -> list[Document]:
    """Clean, distinct documents of ``sources``, in a fixed order.

    A source is ``stdlib`` (of the running Python), ``package:NAME`` (searched in the running
    environment, then in ``package_paths``), or a path or glob of files and folders. Where two files
    are near copies the earlier one stays; modules named in ``first`` count as earliest, so that no
    copy of a held-out file survives elsewhere.

    Raises:
      ValueError: a source does not exist, or nothing usable is left.
    """
    files = [(s, m, path) for s in sources for m, path in _files(s, package_paths)]
    files.sort(key=lambda entry: entry[1] not in first)  # stable: the order given, but for `first`
    seen: set[int] = set()
    documents = []
    for source, module, path in files:
        text = _read(path)
        if text and not _near_copy(text, seen):
            documents.append(Document(source, module, text))
    if not documents:
        raise ValueError(f"data {list(sources)} holds no usable text; give other files or folders")
    return documents


def _files(source: str, package_paths: Sequence[str]) -> Iterable[tuple[str, Path]]:
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
        named = (root / "__init__.py").exists()  # a package is one module; a folder holds many
        for path in sorted(_walk(root)):
            inside = path.relative_to(root)
            yield root.name if named else inside.parts[0].removesuffix(path.suffix), path


def _walk(root: Path) -> Iterable[Path]:
    """Text files below ``root`` but for excluded ones, whose folders are not even entered."""
    for folder, folders, files in os.walk(root):
        folders[:] = [name for name in folders if not _excluded(name)]
        for name in files:
            path = Path(folder, name)
            if path.suffix in SUFFIXES and path.is_file() and not _excluded(name):
                yield path


def _package(name: str, package_paths: Sequence[str]) -> Path:
    for folder in (*sys.path, *package_paths):
        for candidate in (Path(folder) / name, Path(folder) / f"{name}.py"):
            if candidate.exists():  # a namespace package has no __init__.py
                return candidate
    raise ValueError(f"data 'package:{name}' is not installed; install it or drop it from --data")


def _excluded(name: str) -> bool:
    return any(fnmatch.fnmatch(name, rule) for rule in EXCLUDED)


def _read(path: Path) -> str | None:
    """Text of a file without its licence header, or None where it is not worth reading."""
    if not MIN_BYTES <= path.stat().st_size <= MAX_BYTES:
        return None
    try:
        text = path.read_text("utf-8")
    except UnicodeDecodeError:
        return None
    text = _without_licence(text.replace("\r\n", "\n").expandtabs(4))
    lines = text.splitlines()
    if not lines or max(map(len, lines)) > MAX_LINE or _digits(text) > MAX_DIGITS * len(text):
        return None
    plain = text.isascii() or sum(map(str.isascii, text)) > MIN_ASCII * len(text)
    return text if plain and len(text) >= MIN_BYTES else None


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


def _near_copy(text: str, seen: set[int]) -> bool:
    """Whether most lines of weight were seen in earlier files; remembers the lines if not."""
    lines = {_hash(line) for line in map(str.strip, text.splitlines()) if len(line) >= 16}
    if lines and len(lines & seen) > MAX_SEEN_LINES * len(lines):
        return True
    seen |= lines
    return False


def _hash(line: str) -> int:
    """A 64-bit hash that does not change from run to run, as Python's own does."""
    return int.from_bytes(hashlib.blake2b(line.encode(), digest_size=8).digest(), "big")

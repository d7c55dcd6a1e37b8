"""From source files to shuffled windows of tokens, with whole modules held out.

Text is tokenised once into a folder of flat uint16 files. A window is then addressed by number
alone: the batch of step s is a pure function of (seed, s), so a resumed run sees exactly the data
that an uninterrupted one would have seen.
"""

import dataclasses
import fnmatch
import hashlib
import json
import sys
import sysconfig
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
import tokenizers

from training.tokenizer import encode_documents, save_tokenizer, train_tokenizer

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
        for path in sorted(root.rglob("*")):
            inside = path.relative_to(root)
            if path.suffix in SUFFIXES and path.is_file() and not _excluded(inside):
                yield root.name if named else inside.parts[0].removesuffix(path.suffix), path


def _package(name: str, package_paths: Sequence[str]) -> Path:
    for folder in (*sys.path, *package_paths):
        for candidate in (Path(folder) / name, Path(folder) / f"{name}.py"):
            if candidate.exists():  # a namespace package has no __init__.py
                return candidate
    raise ValueError(f"data 'package:{name}' is not installed; install it or drop it from --data")


def _excluded(inside: Path) -> bool:
    return any(fnmatch.fnmatch(part, rule) for part in inside.parts for rule in EXCLUDED)


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
    digits = sum(map(str.isdigit, text))
    if not lines or max(map(len, lines)) > MAX_LINE or digits > MAX_DIGITS * len(text):
        return None
    plain = sum(map(str.isascii, text)) > MIN_ASCII * len(text)
    return text if plain and len(text) >= MIN_BYTES else None


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


@dataclasses.dataclass(frozen=True)
class Corpus:
    """Token files of a prepared corpus: uint16 ids, documents ended by the separator."""

    directory: Path
    train: np.ndarray  # [tokens], memory-mapped
    holdout: np.ndarray  # [tokens], memory-mapped
    description: dict  # sources, held-out modules, counts, hashes: goes into the provenance

    @property
    def tokenizer(self) -> tokenizers.Tokenizer:
        """The tokenizer that made the files."""
        return tokenizers.Tokenizer.from_file(str(self.directory / "tokenizer" / "tokenizer.json"))


def prepare(
    directory: Path,
    sources: Sequence[str],
    holdout: Sequence[str],
    *,
    vocab_size: int,
    package_paths: Sequence[str] = (),
    source_megabytes: float = 0,
    max_length: int = 1024,
    seed: int = 0,
) -> Corpus:
    """Builds the corpus in ``directory``, or opens it where the same request built it before.

    Raises:
      ValueError: ``holdout`` names a module that no source holds, or leaves nothing to train on.
    """
    request = {
        "sources": list(sources), "holdout": sorted(holdout), "vocab_size": vocab_size,
        "source_megabytes": source_megabytes, "seed": seed,
    }  # fmt: skip
    record = directory / "corpus.json"
    if not record.exists() or json.loads(record.read_text())["request"] != request:
        documents = find_documents(sources, package_paths, first=holdout)
        parts = _split(documents, holdout, seed)
        if source_megabytes:
            parts["train"] = _capped(parts["train"], 1e6 * source_megabytes)
        texts = [document.text for document in parts["train"]]
        tokenizer = train_tokenizer(texts, vocab_size)
        save_tokenizer(tokenizer, directory / "tokenizer", max_length)
        counts = {
            name: _write_tokens(directory / f"{name}.bin", tokenizer, part)
            for name, part in parts.items()
        }
        modules = sorted({document.module for document in parts["train"]})
        description = {"request": request, "train_modules": modules, **counts}
        record.write_text(json.dumps(description, indent=2) + "\n")  # last: marks a whole corpus
    return open_corpus(directory)


def open_corpus(directory: Path) -> Corpus:
    """Maps the files of a prepared corpus."""
    train, holdout = (
        np.memmap(directory / f"{name}.bin", np.uint16, mode="r") for name in ("train", "holdout")
    )
    return Corpus(directory, train, holdout, json.loads((directory / "corpus.json").read_text()))


def _split(
    documents: list[Document], holdout: Sequence[str], seed: int
) -> dict[str, list[Document]]:
    """Documents by part, each part in a fixed shuffled order."""
    missing = set(holdout) - {document.module for document in documents}
    if missing:
        raise ValueError(f"holdout {sorted(missing)} is in no --data source; name modules of them")
    parts: dict[str, list[Document]] = {"train": [], "holdout": []}
    for document in documents:
        parts["holdout" if document.module in holdout else "train"].append(document)
    if not parts["train"]:
        raise ValueError(f"holdout {sorted(holdout)} leaves no text to train on; name fewer")
    for part in parts.values():
        np.random.default_rng(seed).shuffle(part)
    return parts


def _capped(documents: list[Document], limit: float) -> list[Document]:
    """At most ``limit`` characters of each source, so that no large package drowns the rest."""
    used: dict[str, int] = {}
    kept = []
    for document in documents:
        if used.setdefault(document.source, 0) + len(document.text) <= limit:
            used[document.source] += len(document.text)
            kept.append(document)
    return kept


def _write_tokens(path: Path, tokenizer, documents: list[Document]) -> dict:
    digest, count = hashlib.sha256(), 0
    with path.open("wb") as file:
        for ids in encode_documents(tokenizer, (document.text for document in documents)):
            block = np.asarray(ids, np.uint16).tobytes()
            digest.update(block)
            file.write(block)
            count += len(ids)
    size = sum(len(document.text.encode()) for document in documents)
    return {"files": len(documents), "bytes": size, "tokens": count, "sha256": digest.hexdigest()}


@dataclasses.dataclass(frozen=True)
class Windows:
    """Windows of ``length`` inputs and their targets over a token file, addressed by number.

    Every epoch visits each window once, in an order drawn from (seed, epoch).
    """

    tokens: np.ndarray
    length: int
    seed: int = 0

    def __post_init__(self):
        if self.count < 1:
            raise ValueError(
                f"length {self.length} is longer than the {len(self.tokens)} tokens of the data; "
                "give more data or a smaller --length"
            )

    @property
    def count(self) -> int:
        """Windows of one epoch."""
        return (len(self.tokens) - 1) // self.length

    def at(self, index: int) -> np.ndarray:
        """Window ``index`` of the file, in file order: int32 [length + 1]."""
        start = index * self.length
        return np.asarray(self.tokens[start : start + self.length + 1], np.int32)

    def batch(self, step: int, size: int) -> np.ndarray:
        """The windows of step ``step``: int32 [size, length + 1]."""
        numbers = np.arange(step * size, (step + 1) * size)
        orders = {epoch: self._order(epoch) for epoch in set(numbers // self.count)}
        return np.stack([self.at(orders[n // self.count][n % self.count]) for n in numbers])

    def _order(self, epoch: int) -> np.ndarray:
        return np.random.default_rng((self.seed, int(epoch))).permutation(self.count)


def cut(windows: np.ndarray, context: int) -> np.ndarray:
    """Windows [B, T + 1] cut into [B * T / context, context + 1]; the same inputs and targets."""
    inputs, targets = (part.reshape(-1, context) for part in (windows[:, :-1], windows[:, 1:]))
    return np.concatenate([inputs, targets[:, -1:]], axis=1)

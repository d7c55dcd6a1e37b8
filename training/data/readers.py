"""Sources of records: JSON lines, text, folders, packages, Hugging Face datasets.

The content of a file decides its format. ``BadLines`` counts unusable lines and fails if there are
too many.
"""

import dataclasses
import hashlib
import io
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, TextIO

from jspec.util import values
from training.data import sources
from training.data.records import Record, Text, kinds, read_record
from training.errors import check_least

_LINES = (".jsonl", ".ndjson")
_JSON = (*_LINES, ".json")
_SECTION = 1 << 16  # characters of plain text that are tokenised at once
_EXAMPLE = 1 << 10  # assumed bytes of a dataset's example, for progress bars

Entry = tuple[int, str, Any]  # bytes, place in the source, object


class BadLines:
    """A counter of unusable lines, of which it prints and skips at most ``limit``."""

    def __init__(self, limit: int = 0, count: int = 0):
        self.limit, self.count = limit, count

    def add(self, where: str, reason: object) -> None:
        """Skip a line, or raise ValueError if it is one too many."""
        self.count += 1
        if self.count > self.limit:
            raise ValueError(
                f"{where}: {reason}. That is bad line {self.count}, and --max-bad-lines is "
                f"{self.limit}; mend the data or raise the limit"
            )
        print(f"skipped {where}: {reason}", file=sys.stderr)


@dataclasses.dataclass(frozen=True)
class Source:
    """Part of the data."""

    name: str  # for messages and the provenance, without folders
    size: int  # sum of the sizes that ``read`` yields, for progress bars
    digest: str  # of everything that the records depend on
    read: Callable[[BadLines], Iterator[tuple[int, Record]]]  # yields (size, record) one by one
    vocabulary: str = ""  # digest of the vocabulary of records of tokens; "" if unknown


@dataclasses.dataclass(frozen=True)
class SourceSettings:
    """The reading of files; every field is an option of the command line."""

    # content of JSON lines; auto goes by their keys
    data_format: Literal["auto", "text", "chat", "tokens"] = "auto"
    package_paths: tuple[str, ...] = ()  # more folders in which package:NAME is searched
    # top-level modules of folders and packages to leave out; training holds them out for its
    # evaluations
    held_out_modules: tuple[str, ...] = ()
    # file with the Jinja template of conversations (default: the tokenizer's own)
    chat_template: str = ""
    max_bad_lines: int = 0  # lines to skip before giving up

    def __post_init__(self):
        check_least(self, 0, "max_bad_lines")


def provenance_of(path: Path) -> Path:
    """Return the path of the provenance of a generated file."""
    return path.with_name(f"{path.name}.provenance.json")


def find(
    data: Sequence[str], settings: SourceSettings, left_out: Counter[str] | None = None
) -> tuple[list[Source], list[Source]]:
    """Open ``data``; return training sources, and the held-out modules of folders and packages.

    Of a folder, files of text and of JSON lines with records are read as if each were named.
    Packages are cleaned. Stderr counts what is left out.

    Args:
      data: each one of ``stdlib``, ``package:NAME``, ``hf:NAME[:SPLIT]``, a folder (of files, or a
        dataset saved by ``datasets``), a file or a glob of files.
      settings: the reading of files.
      left_out: gets the number of files that are left out by reason.

    Raises:
      ValueError: something does not exist, cannot be read or holds nothing.
    """
    trees, train = [], []
    for name in data:
        paths = _files_of(name)
        if name.startswith("hf:") or (paths and _is_saved(paths[0])):
            train.append(_examples(name, settings.data_format))
        elif not paths or paths[0].is_dir():
            trees.append(name)
        else:
            train += [_file(path, settings.data_format) for path in paths]
    inside = _trees(trees, settings, Counter() if left_out is None else left_out)
    return train + inside[0], inside[1]


def _trees(
    trees: Sequence[str], settings: SourceSettings, left_out: Counter[str]
) -> tuple[list[Source], list[Source]]:
    """Return the sources of folders and packages, and of their held-out modules."""
    texts: tuple[list, list] = ([], [])
    lines: tuple[list, list] = ([], [])
    modules, held_out = set(), settings.held_out_modules

    def takes(module: str, path: Path) -> bool:
        if path.suffix not in _LINES or not _looks_like_json(_first_line(path)):
            return False
        lines[module in held_out].append(_file(path, settings.data_format))
        modules.add(module)
        return True

    documents = sources.collect(trees, settings.package_paths, held_out, left_out, takes)
    for document in documents:
        texts[document.module in held_out].append(document)
        modules.add(document.module)
    if trees and not modules:
        raise ValueError(f"data {list(trees)} holds no usable text; give other files or folders")
    missing = set(held_out) - modules
    if missing:
        raise ValueError(
            f"--held-out-modules {sorted(missing)} are in no source tree of --data; name modules "
            "of them"
        )
    return _documents(texts[0]) + lines[0], _documents(texts[1]) + lines[1]


def _files_of(name: str) -> list[Path]:
    """Return the files of a name, or its folder; none for a package."""
    if sources.is_package(name) or name.startswith("hf:"):
        return []
    paths = sources.matches(name)
    if any(path.is_dir() for path in paths) and not Path(name).expanduser().exists():
        raise ValueError(f"data {name!r} matches folders; name one of them, or files")
    return paths


def _documents(documents: list[sources.Document]) -> list[Source]:
    """Return the files of folders and packages as one source."""
    if not documents:
        return []
    names = sorted({Path(document.source).name for document in documents})
    digest = hashlib.sha256()
    for document in documents:
        digest.update(hashlib.sha256(document.text.encode()).digest())

    def read(bad: BadLines) -> Iterator[tuple[int, Record]]:
        for number, document in enumerate(documents, 1):
            where = f"file {number} of {document.module} in {Path(document.source).name}"
            if len(document.text) <= sources.MAX_BYTES:
                yield len(document.text), Text(where, document.text)
            else:
                yield from _sections(where, io.StringIO(document.text), bad)

    size = sum(len(document.text) for document in documents)
    return [Source(", ".join(names), size, digest.hexdigest(), read)]


def _file(path: Path, data_format: str) -> Source:
    """Return a file of JSON lines, of one JSON list, or of plain text as a source."""
    size = path.stat().st_size
    if not size:
        raise ValueError(f"data {path.name!r} is empty; leave it out")
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    first = _first_line(path)
    if path.suffix in _JSON or _looks_like_json(first):
        is_list = path.suffix == ".json" and first.lstrip().startswith(b"[")
        entries = lambda bad: _list(path) if is_list else _lines(path, bad)
        read = lambda bad: _recognised(entries(bad), data_format, bad)
    else:
        read = lambda bad: _sections(path.name, path.open(encoding="utf-8"), bad)
    beside, vocabulary = provenance_of(path), ""
    if beside.exists() and data_format in ("auto", "tokens"):
        vocabulary = read_provenance(beside).get("vocabulary", "")
    return Source(path.name, size, f"{data_format} {digest}", read, vocabulary)


def _first_line(path: Path) -> bytes:
    """Return the first line that is not blank."""
    with path.open("rb") as file:
        return next((line for line in file if line.strip()), b"")


def read_provenance(path: Path) -> dict:
    """Read the provenance of answers, or raise ValueError if the file is damaged."""
    try:
        facts = values.json_of(path.read_bytes())
    except ValueError as error:
        raise ValueError(f"{path.name} is damaged ({error}); remove it with its answers") from None
    if not isinstance(facts, dict):
        raise ValueError(f"{path.name} is no JSON object; remove it with its answers")
    return facts


def _looks_like_json(line: bytes) -> bool:
    """Return whether a file with this first line holds records."""
    try:
        entry = values.json_of(line)
    except ValueError:
        return False
    return isinstance(entry, dict) and bool(kinds(entry))


def _lines(path: Path, bad: BadLines) -> Iterator[Entry]:
    """Yield every line that is not blank."""
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                where = f"{path.name}:{number}"
                try:
                    yield len(line), where, values.json_of(line)
                except ValueError as error:  # not JSON, or not UTF-8
                    bad.add(where, f"no JSON ({error})")


def _list(path: Path) -> Iterator[Entry]:
    """Yield every entry of a file that is one list, like ShareGPT's."""
    try:
        entries = values.json_of(path.read_bytes())
    except ValueError as error:
        raise ValueError(f"data {path.name!r} is damaged ({error}); fetch it again") from None
    size = path.stat().st_size // max(len(entries), 1)
    for number, entry in enumerate(entries, 1):
        yield size, f"{path.name} entry {number}", entry


def _recognised(
    entries: Iterable[Entry], data_format: str, bad: BadLines
) -> Iterator[tuple[int, Record]]:
    """Yield records of one kind; with ``auto`` that of the first entry."""
    first: type | None = None
    for size, where, entry in entries:
        try:
            record = read_record(entry, where, data_format)
            first = first or type(record)
            if type(record) is not first:
                raise ValueError(
                    f"is {type(record).__name__.lower()}, but what came before is "
                    f"{first.__name__.lower()}; say which with --data-format, or part the file"
                )
        except ValueError as error:
            bad.add(where, error)
            continue
        yield size, record


def _sections(name: str, text: TextIO, bad: BadLines) -> Iterator[tuple[int, Record]]:
    """Yield a text of any length in sections, cut at the ends of lines."""
    begins, lines, size, number, first = True, [], 0, 0, 1
    try:
        with text:
            for number, line in enumerate(text, 1):
                if size + len(line) > _SECTION and size:
                    yield size, Text(f"{name}:{first}", "".join(lines), begins, ends=False)
                    begins, lines, size, first = False, [], 0, number
                lines.append(line)
                size += len(line)
    except UnicodeDecodeError as error:
        bad.add(f"{name}:{number + 1}", f"no UTF-8 ({error.reason}); nothing after it")
    if size:
        yield size, Text(f"{name}:{first}", "".join(lines), begins, ends=True)


def _is_saved(path: Path) -> bool:
    """Return whether a folder was written by ``save_to_disk`` of ``datasets``."""
    return any((path / name).exists() for name in ("dataset_dict.json", "state.json"))


def _examples(name: str, data_format: str) -> Source:
    """Return a dataset of the hub (``hf:NAME[:SPLIT]``, split train by default), or a saved one."""
    try:
        import datasets
    except ImportError:
        raise ValueError(
            f"data {name!r} needs the package datasets, which is not installed; "
            "pip install datasets, or give JSON lines"
        ) from None
    where, _, split = name.removeprefix("hf:").partition(":")
    if name.startswith("hf:"):
        try:
            dataset = datasets.load_dataset(where, split=split or "train")
        except Exception as error:  # of the hub, of its format, or of a script
            reason = " ".join(str(error).split())
            raise ValueError(f"data {name!r} cannot be loaded: {reason}") from None
    else:
        dataset = datasets.load_from_disk(name)
        if isinstance(dataset, datasets.DatasetDict):
            if "train" not in dataset:
                raise ValueError(
                    f"data {name!r} holds {', '.join(dataset)}, and no train split; name the "
                    "folder of one of them"
                )
            dataset = dataset["train"]

    def entries() -> Iterator[Entry]:
        for number, entry in enumerate(dataset, 1):
            # Columns that an example lacks are None.
            filled = {key: value for key, value in entry.items() if value is not None}
            yield _EXAMPLE, f"{Path(where).name} example {number}", filled

    read = lambda bad: _recognised(entries(), data_format, bad)
    digest = f"{data_format} {dataset._fingerprint}"
    return Source(Path(where).name, len(dataset) * _EXAMPLE, digest, read)

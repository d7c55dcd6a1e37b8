"""Files of records: JSON lines, one JSON list, or plain text; the content decides."""

import dataclasses
import hashlib
import io
import json
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

from jspec.util import values
from jspec.util.messages import shown
from training.data.ledger import Ledger
from training.data.records import Record, Text, kinds, read_record, unused_keys

LINES = (".jsonl", ".ndjson")
_JSON = (*LINES, ".json")
_SECTION = 1 << 16  # characters of plain text that are tokenised at once
_BOM = b"\xef\xbb\xbf"  # UTF-8's mark, with which some editors begin a file
# First bytes of files in other formats, and the remedy.
_FOREIGN = {
    b"\x1f\x8b": "it is compressed; unpack it",
    b"PK\x03\x04": "it is compressed; unpack it",
    b"\x28\xb5\x2f\xfd": "it is compressed; unpack it",
    b"\xfd7zXZ": "it is compressed; unpack it",
    b"BZh": "it is compressed; unpack it",
    b"PAR1": "it is a Parquet file; save it as JSON lines, or with save_to_disk of datasets",
    b"ARROW1": "it is an Arrow file; save it as JSON lines, or with save_to_disk of datasets",
}
_UTF_16 = (b"\xff\xfe", b"\xfe\xff")  # first bytes; a zero byte follows soon
_HEAD = 4096  # first bytes, by which a file of text is recognised

Entry = tuple[int, str, Any]  # bytes, place in the source, object


@dataclasses.dataclass(frozen=True)
class Source:
    """Part of the data."""

    name: str  # for messages and the provenance, without folders
    size: int  # sum of the sizes that ``read`` yields, for progress bars
    digest: str  # digest of everything that the records depend on
    read: Callable[[Ledger], Iterator[tuple[int, Record]]]  # yields (size, record) one by one
    vocabulary: str = ""  # digest of the vocabulary of records of tokens; "" if unknown


def source_of(path: Path, data_format: str) -> Source:
    """Return a file of JSON lines, of one JSON list, or of plain text as a source.

    Raises:
      ValueError: it is empty, or no text.
    """
    size = path.stat().st_size
    if not size:
        raise ValueError(f"data {path.name!r} is empty; leave it out")
    _check_text(path)
    first = first_line(path)
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if path.suffix in _JSON or looks_like_json(first):
        is_list = path.suffix == ".json" and first.lstrip().startswith(b"[")
        read = lambda ledger: recognised(
            _list(path) if is_list else _lines(path, ledger), data_format, ledger
        )
    else:
        read = lambda ledger: sections(path.name, _opened(path), ledger)
    beside, vocabulary = provenance_of(path), ""
    if beside.exists() and data_format in ("auto", "tokens"):
        vocabulary = read_provenance(beside).get("vocabulary", "")
    return Source(path.name, size, f"{data_format} {digest}", read, vocabulary)


def provenance_of(path: Path) -> Path:
    """Return the path of the provenance of a generated file."""
    return path.with_name(f"{path.name}.provenance.json")


def read_provenance(path: Path) -> dict:
    """Read the provenance of answers, or raise ValueError if the file is damaged."""
    try:
        facts = values.json_of(path.read_bytes())
    except ValueError as error:
        raise ValueError(f"{path.name} is damaged ({error}); remove it with its answers") from None
    if not isinstance(facts, dict):
        raise ValueError(f"{path.name} is no JSON object; remove it with its answers")
    return facts


def first_line(path: Path) -> bytes:
    """Return the first line that is not blank, without a byte order mark."""
    with _opened(path) as file:
        return next((line for line in file if line.strip()), b"")


def looks_like_json(line: bytes) -> bool:
    """Return whether a file with this first line holds records."""
    try:
        entry = values.json_of(line)
    except ValueError:
        return False
    return isinstance(entry, dict) and bool(kinds(entry))


def _check_text(path: Path) -> None:
    """Raise ValueError if a file begins like one of the common formats that hold no text."""
    with path.open("rb") as file:
        head = file.read(_HEAD)
    binary = b"\0" in head
    reason = "it is UTF-16; save it as UTF-8" if binary and head.startswith(_UTF_16) else ""
    if binary or not values.encodes(head.decode(errors="surrogateescape")):
        for begin, remedy in _FOREIGN.items():
            reason = remedy if head.startswith(begin) else reason
    if reason:
        raise ValueError(f"data {path.name!r} cannot be read: {reason}")


def _opened(path: Path) -> BinaryIO:
    """Open a file behind its byte order mark."""
    file = path.open("rb")
    if file.read(len(_BOM)) != _BOM:
        file.seek(0)
    return file


def _lines(path: Path, ledger: Ledger) -> Iterator[Entry]:
    """Yield every line that is not blank."""
    with _opened(path) as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                where = f"{path.name}:{number}"
                try:
                    entry = values.json_of(line)
                except ValueError as error:  # not JSON, or not UTF-8
                    ledger.refuse(where, f"no JSON ({error})")
                    continue
                yield len(line), where, entry


def _list(path: Path) -> Iterator[Entry]:
    """Yield every entry of a file that is one list, like ShareGPT's."""
    try:
        with _opened(path) as file:
            entries = values.json_of(file.read())
    except ValueError as error:
        raise ValueError(f"data {path.name!r} is damaged ({error}); fetch it again") from None
    size = path.stat().st_size // max(len(entries), 1)
    for number, entry in enumerate(entries, 1):
        yield size, f"{path.name} entry {number}", entry


def recognised(
    entries: Iterable[Entry], data_format: str, ledger: Ledger
) -> Iterator[tuple[int, Record]]:
    """Yield records of one kind; with ``auto`` that of the first entry."""
    first: type | None = None
    for size, where, entry in entries:
        try:
            _check_encodes(entry)
            record = read_record(entry, where, data_format)
            first = first or type(record)
            if type(record) is not first:
                raise ValueError(
                    f"is {type(record).__name__.lower()}, but what came before is "
                    f"{first.__name__.lower()}; say which with --data-format, or part the file"
                )
        except ValueError as error:
            ledger.refuse(where, error)
            continue
        ledger.source.unused.update(f"the key {key!r}" for key in unused_keys(entry, record))
        yield size, record


def _check_encodes(entry: Any) -> None:
    """Raise ValueError if a text anywhere in a record holds half of a surrogate pair."""
    parts = entry.items() if isinstance(entry, dict) else [("", entry)]
    for key, part in parts:
        try:
            whole = json.dumps([key, part], ensure_ascii=False, default=str)
        except RecursionError:
            raise ValueError("nested too deeply") from None
        if not values.encodes(whole):
            name = shown(key, 60)
            raise ValueError(f"{name} holds half of a surrogate pair, which no tokenizer reads")


def sections(name: str, lines: BinaryIO, ledger: Ledger) -> Iterator[tuple[int, Record]]:
    """Yield a text of any length in sections, cut at the ends of lines.

    A line that is not UTF-8 is left out; its neighbours stay.
    """
    begins, parts, size, first = True, [], 0, 1
    with lines:
        for number, line in enumerate(lines, 1):
            try:
                text = line.decode()
            except UnicodeDecodeError as error:
                ledger.refuse(f"{name}:{number}", f"no UTF-8 ({error.reason})")
                continue
            for part in io.StringIO(text, newline=None):  # every line ends in "\n" then
                if size + len(part) > _SECTION and size:
                    yield size, Text(f"{name}:{first}", "".join(parts), begins, ends=False)
                    begins, parts, size, first = False, [], 0, number
                parts.append(part)
                size += len(part)
    if size:
        yield size, Text(f"{name}:{first}", "".join(parts), begins, ends=True)


def sections_of(name: str, text: str, ledger: Ledger) -> Iterator[tuple[int, Record]]:
    """Yield the sections of a text in memory."""
    return sections(name, io.BytesIO(text.encode()), ledger)

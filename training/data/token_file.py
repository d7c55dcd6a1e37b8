"""Documents as flat files of tokens, memory-mapped, in a cache keyed by all that they depend on."""

import dataclasses
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from training.data.encode import Encoded, Encoder, vocabulary_digest
from training.data.readers import BadLines, Source
from training.data.records import Record

_BATCH = 512  # records that the tokenizer gets at once
_RECORD = "tokens.json"


@dataclasses.dataclass(frozen=True, eq=False)
class TokenFile:
    """Documents one behind the other.

    Attributes:
      tokens: uint16 or uint32 [n], memory-mapped.
      learned: bool [n], memory-mapped: whether a token is a label.
      ends: int64 [documents], where each ends in ``tokens``.
      groups: uint64 [documents], see ``records.Text.group``.
      description: counts, sources and the sha256 of it all: goes into the provenance.
    """

    tokens: np.ndarray
    learned: np.ndarray
    ends: np.ndarray
    groups: np.ndarray
    description: dict

    @property
    def lengths(self) -> np.ndarray:
        """int64 [documents]."""
        return np.diff(self.ends, prepend=0)


def tokenized(
    sources: Sequence[Source], encoder: Encoder, cache: Path, max_bad_lines: int
) -> TokenFile:
    """The tokens of ``sources``: from ``cache`` where the same were made before, else made there.

    A file is built aside and takes its name when it is whole, so several processes may build it.

    Raises:
      ValueError: there are more than ``max_bad_lines``, no document, or other ids than those of
        the encoder's tokenizer.
    """
    for source in sources:
        if source.vocabulary not in ("", vocabulary_digest(encoder.tokenizer)):
            raise ValueError(
                f"data {source.name!r} hold tokens of another tokenizer; generate them with this "
                "target, or read their messages with --data-format chat"
            )
    facts = [encoder.digest, *((source.name, source.digest) for source in sources)]
    folder = cache / hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:32]
    if not (folder / _RECORD).exists():
        cache.mkdir(parents=True, exist_ok=True)
        aside = Path(tempfile.mkdtemp(prefix="building-", dir=cache))
        try:
            _build(aside, sources, encoder, BadLines(max_bad_lines))
            _take_name(aside, folder)
        finally:
            shutil.rmtree(aside, ignore_errors=True)
    made = _open(folder)
    if made.description["bad_lines"] > max_bad_lines:
        raise ValueError(
            f"the data hold {made.description['bad_lines']} bad lines, and --max-bad-lines is "
            f"{max_bad_lines}; mend the data or raise the limit"
        )
    return made


def _take_name(aside: Path, folder: Path) -> None:
    try:
        aside.rename(folder)
    except OSError:
        if not (folder / _RECORD).exists():  # else another process was faster: its file will do
            raise


def _open(folder: Path) -> TokenFile:
    description = json.loads((folder / _RECORD).read_text())
    tokens = np.memmap(folder / "tokens.bin", description["dtype"], mode="r")
    learned = np.memmap(folder / "learned.bin", np.bool_, mode="r")
    ends, groups = (np.load(folder / f"{name}.npy") for name in ("ends", "groups"))
    return TokenFile(tokens, learned, ends, groups, description)


def _build(folder: Path, sources: Sequence[Source], encoder: Encoder, bad: BadLines) -> None:
    dtype = np.dtype(np.uint16 if encoder.vocab_size <= 1 << 16 else np.uint32)
    digest, lengths, groups, learned = hashlib.sha256(), [], [], 0
    names = ("tokens.bin", "learned.bin")
    with (folder / names[0]).open("wb") as tokens, (folder / names[1]).open("wb") as marks:
        for document in _documents(sources, encoder, bad):
            parts = document.ids.astype(dtype).tobytes(), document.learned.tobytes()
            for file, part in zip((tokens, marks), parts, strict=True):
                file.write(part)
                digest.update(part)
            lengths.append(len(document.ids))
            groups.append(document.group)
            learned += int(document.learned.sum())
        for file in (tokens, marks):
            file.flush()
            os.fsync(file.fileno())
    if not lengths:
        raise ValueError(
            f"data {', '.join(source.name for source in sources)} holds nothing to learn from; "
            "give other data"
        )
    digest.update(np.array(lengths).tobytes())
    np.save(folder / "ends.npy", np.cumsum(lengths))
    np.save(folder / "groups.npy", np.array(groups, np.uint64))
    description = {
        "sources": [source.name for source in sources],
        "documents": len(lengths),
        "tokens": sum(lengths),
        "learned_tokens": learned,
        "bad_lines": bad.count,
        "dtype": dtype.name,
        "sha256": digest.hexdigest(),
    }
    (folder / _RECORD).write_text(json.dumps(description, indent=2) + "\n")


def _documents(sources: Sequence[Source], encoder: Encoder, bad: BadLines) -> Iterator[Encoded]:
    """Documents of all sources, with a progress bar on stderr."""
    columns = (
        TextColumn("tokenizing {task.fields[name]}"),
        BarColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[tokens]:,} tokens"),
    )
    console = Console(stderr=True)
    quiet = not console.is_terminal  # in a log, a bar is nothing but blank lines
    with Progress(*columns, console=console, transient=True, disable=quiet) as progress:
        total = sum(source.size for source in sources)
        bar = progress.add_task("", total=total, name="", tokens=0)
        done = 0
        for source in sources:
            progress.update(bar, name=source.name)
            for size, group in _groups(source.read(bad)):
                for document in encoder.encode(group, bad):
                    done += len(document.ids)
                    yield document
                progress.update(bar, advance=size, tokens=done)


def _groups(records: Iterator[tuple[int, Record]]) -> Iterator[tuple[int, list[Record]]]:
    group: list[Record] = []
    total = 0
    for size, record in records:
        group.append(record)
        total += size
        if len(group) == _BATCH:
            yield total, group
            group, total = [], 0
    yield total, group

"""Documents as flat files of tokens, memory-mapped, in a cache keyed by all their inputs."""

import dataclasses
import hashlib
import itertools
import json
import os
import shutil
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from training.data.encode import Encoded, Encoder, vocabulary_digest
from training.data.files import Source
from training.data.ledger import Ledger
from training.util.errors import adding_filename
from training.util.progress import progress

_BATCH = 512  # records that the tokenizer gets at once
_RECORD = "tokens.json"


@dataclasses.dataclass(frozen=True, eq=False)
class TokenFile:
    """Documents one behind the other."""

    tokens: np.ndarray  # uint16 or uint32 [n], memory-mapped
    learned: np.ndarray  # bool [n], memory-mapped: whether a token is a label
    ends: np.ndarray  # int64 [documents], end of each document in ``tokens``
    # uint64 [documents, 2]: ``group`` and ``prompt`` of ``encode.Encoded``.
    groups: np.ndarray
    description: dict  # counts, sources and the sha256 of all content, for the provenance
    # what was read of each source, in order: ``ledger.SourceCount`` and its ``documents``
    by_source: Sequence[Mapping[str, Any]] = ()

    @property
    def lengths(self) -> np.ndarray:
        """int64 [documents]."""
        return np.diff(self.ends, prepend=0)


def tokenized(
    sources: Sequence[Source], encoder: Encoder, cache: Path, max_bad_lines: int
) -> TokenFile:
    """Return the tokens of ``sources`` from ``cache``; missing ones are made there.

    A file is built aside and renamed when it is complete, so several processes may build it.

    Raises:
      ValueError: there are more than ``max_bad_lines``, no document, or ids of another tokenizer.
    """
    for source in sources:
        if source.vocabulary not in ("", vocabulary_digest(encoder.tokenizer)):
            raise ValueError(
                f"data {source.name!r} hold tokens of another tokenizer; generate them with this "
                "target, or read their messages with --data-format chat"
            )
    key = [encoder.digest, *((source.name, source.digest) for source in sources)]
    folder = cache / hashlib.sha256(json.dumps(key).encode()).hexdigest()[:32]
    if not (folder / _RECORD).exists():
        cache.mkdir(parents=True, exist_ok=True)
        aside = Path(tempfile.mkdtemp(prefix="building-", dir=cache))
        try:
            with adding_filename(folder):
                _build(aside, sources, encoder, Ledger(max_bad_lines))
            aside.rename(folder)
        except OSError:
            if not (folder / _RECORD).exists():  # else another process was faster
                raise
        finally:
            shutil.rmtree(aside, ignore_errors=True)
    facts = json.loads((folder / _RECORD).read_text())
    if facts["bad_lines"] > max_bad_lines:
        raise ValueError(
            f"the data hold {facts['bad_lines']} bad lines, and --max-bad-lines is "
            f"{max_bad_lines}; mend the data or raise the limit"
        )
    tokens = np.memmap(folder / "tokens.bin", facts["dtype"], mode="r")
    learned = np.memmap(folder / "learned.bin", np.bool_, mode="r")
    ends, groups = (np.load(folder / f"{name}.npy") for name in ("ends", "groups"))
    return TokenFile(tokens, learned, ends, groups, facts, facts.pop("by_source"))


def _build(folder: Path, sources: Sequence[Source], encoder: Encoder, ledger: Ledger) -> None:
    dtype = np.dtype(np.uint16 if encoder.vocab_size <= 1 << 16 else np.uint32)
    digest, lengths, groups, learned = hashlib.sha256(), [], [], 0
    documents: Counter[int] = Counter()
    with (folder / "tokens.bin").open("wb") as tokens, (folder / "learned.bin").open("wb") as marks:
        for number, document in _documents(sources, encoder, ledger):
            for file, array in ((tokens, document.ids.astype(dtype)), (marks, document.learned)):
                part = array.tobytes()
                file.write(part)
                digest.update(part)
            documents[number] += 1
            lengths.append(len(document.ids))
            groups.append((document.group, document.prompt))
            learned += int(document.learned.sum())
        for file in (tokens, marks):
            file.flush()
            os.fsync(file.fileno())
    names = [source.name for source in sources]
    if not lengths:
        raise ValueError(f"data {', '.join(names)} holds nothing to learn from; give other data")
    digest.update(np.array(lengths).tobytes())
    np.save(folder / "ends.npy", np.cumsum(lengths))
    np.save(folder / "groups.npy", np.array(groups, np.uint64))
    description = {
        "sources": names,
        "documents": len(lengths),
        "tokens": sum(lengths),
        "learned_tokens": learned,
        "bad_lines": ledger.bad_lines,
        "dtype": dtype.name,
        "sha256": digest.hexdigest(),
        "by_source": [
            source.facts() | {"documents": documents[number]}
            for number, source in enumerate(ledger.sources)
        ],
    }
    (folder / _RECORD).write_text(json.dumps(description, indent=2) + "\n")


def _documents(
    sources: Sequence[Source], encoder: Encoder, ledger: Ledger
) -> Iterator[tuple[int, Encoded]]:
    """Yield (number of the source, document) of all sources, with a progress bar on stderr."""
    total = sum(source.size for source in sources)
    with progress("tokenizing", total, counted=False) as update:
        size = tokens = 0
        for number, source in enumerate(sources):
            ledger.open(source.name)
            records = source.read(ledger)
            while group := list(itertools.islice(records, _BATCH)):
                for document in encoder.encode([record for _, record in group], ledger):
                    tokens += len(document.ids)
                    yield number, document
                size += sum(part for part, _ in group)
                update(size, f"{source.name} {tokens:,} tokens", False)

"""The corpus of a pre-training run: a tokenizer, and shuffled windows, with modules held out.

Text is tokenised once into a folder of flat uint16 files. A window is addressed by its number, so a
resumed run sees the same data as an uninterrupted one.
"""

import dataclasses
import hashlib
import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import tokenizers

from training.data.batch import Batch
from training.data.sources import Document, find_documents, is_package, print_left_out
from training.data.tokenizer import END_OF_TEXT, save_tokenizer, train_tokenizer

_TOGETHER = 256  # documents that the tokenizer gets at once


@dataclasses.dataclass(frozen=True)
class Corpus:
    """Token files of a prepared corpus: uint16 ids; the separator ends each document."""

    directory: Path
    train: np.ndarray  # [tokens], memory-mapped
    holdout: np.ndarray  # [tokens], memory-mapped
    description: dict  # sources, held-out modules, counts, hashes: for the provenance

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
    """Build the corpus in ``directory``, or open it if the same request built it before.

    Raises:
      ValueError: ``holdout`` names a module that no source holds, or leaves nothing to train on.
    """
    request = {
        "sources": list(sources),
        "holdout": sorted(holdout),
        "vocab_size": vocab_size,
        "source_megabytes": source_megabytes,
        "seed": seed,
    }
    if not all(map(is_package, sources)):
        request["files"] = "whole"  # earlier versions cleaned them like packages
    record = directory / "corpus.json"
    if not record.exists() or json.loads(record.read_text())["request"] != request:
        record.unlink(missing_ok=True)  # the files that it describes are about to be replaced
        left_out: Counter[str] = Counter()
        documents = find_documents(sources, package_paths, holdout, left_out)
        parts = _split(documents, holdout, seed)
        if source_megabytes:
            whole = parts["train"]
            parts["train"] = _capped(whole, 1e6 * source_megabytes)
            capped = Counter({"beyond --source-megabytes": len(whole) - len(parts["train"])})
            print_left_out(+capped)
            left_out += capped
        tokenizer = train_tokenizer([document.text for document in parts["train"]], vocab_size)
        save_tokenizer(tokenizer, directory / "tokenizer", max_length)
        counts = {
            name: _write_tokens(directory / f"{name}.bin", tokenizer, part)
            for name, part in parts.items()
        }
        modules = sorted({document.module for document in parts["train"]})
        facts = {"request": request, "train_modules": modules, "left_out": dict(left_out)}
        # Last: it marks a whole corpus.
        record.write_text(json.dumps(facts | counts, indent=2) + "\n")
    return open_corpus(directory)


def open_corpus(directory: Path) -> Corpus:
    """Map the files of a prepared corpus."""
    train, holdout = (
        np.memmap(directory / f"{name}.bin", np.uint16, mode="r") for name in ("train", "holdout")
    )
    return Corpus(directory, train, holdout, json.loads((directory / "corpus.json").read_text()))


def _split(
    documents: list[Document], holdout: Sequence[str], seed: int
) -> dict[str, list[Document]]:
    """Return the documents of each part, in a fixed shuffled order."""
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
    """Keep at most ``limit`` characters of each source, so no large package dominates."""
    used: Counter[str] = Counter()
    selected = []
    for document in documents:
        if used[document.source] + len(document.text) <= limit:
            used[document.source] += len(document.text)
            selected.append(document)
    return selected


def _write_tokens(path: Path, tokenizer, documents: list[Document]) -> dict:
    """Write the token ids of each text, ended by ``END_OF_TEXT``; return counts and a hash."""
    digest, count, end = hashlib.sha256(), 0, tokenizer.token_to_id(END_OF_TEXT)
    with path.open("wb") as file:
        for begin in range(0, len(documents), _TOGETHER):
            texts = [document.text for document in documents[begin : begin + _TOGETHER]]
            for entry in tokenizer.encode_batch(texts):
                block = np.asarray([*entry.ids, end], np.uint16).tobytes()
                digest.update(block)
                file.write(block)
                count += len(entry.ids) + 1
    size = sum(len(document.text.encode()) for document in documents)
    return {"files": len(documents), "bytes": size, "tokens": count, "sha256": digest.hexdigest()}


@dataclasses.dataclass(frozen=True)
class Windows:
    """Windows of ``length`` inputs and their labels over a token file: ``loader.Rows``.

    Raises:
      ValueError: the file is shorter than a window.
    """

    tokens: np.ndarray
    length: int

    def __post_init__(self):
        if not len(self):
            raise ValueError(
                f"length {self.length} is longer than the {len(self.tokens)} tokens of the data; "
                "give more data or a smaller --length"
            )

    def __len__(self) -> int:
        return max(len(self.tokens) - 1, 0) // self.length

    def __getitem__(self, index: int) -> Batch:
        """Return window ``index``, in file order: one segment, every token a label."""
        start = index * self.length
        tokens = np.asarray(self.tokens[start : start + self.length + 1], np.int32)
        return Batch(tokens, np.ones_like(tokens), np.ones(tokens.shape, np.float32))

"""What a run trains on: options of every distilling script, and the rows that they make."""

import dataclasses
import functools
import hashlib
import json
from collections import Counter
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import platformdirs

from training.data import readers
from training.data.encode import Encoder
from training.data.packing import LongDocuments, PackedRows, Packing, pack
from training.data.token_file import tokenized
from training.trainer.settings import bad_option


@dataclasses.dataclass(frozen=True)
class DataSettings:
    """The data of a run. Every field is an option of the command line: ``--length 1024``.

    Attributes:
      data: files or globs of text or JSON lines, folders of them, stdlib, package:NAME,
        hf:NAME[:SPLIT], or folders saved by datasets
      data_format: what lines of JSON hold; auto goes by their keys
      package_paths: more folders in which package:NAME is searched
      chat_template: file with the Jinja template of conversations (default: the tokenizer's own)
      max_bad_lines: lines to skip before giving up
      length: tokens of a training window
      packing: whether several documents share a window, each on its own (best_fit) or not (none)
      long_documents: longer than a window: cut into pieces, truncate to the first one, or drop
      held_out_share: share of the documents that is kept out of training
      held_out_data: more data, kept out of training even where --data holds it too
      held_out_modules: top-level modules of folders and packages that are kept out of training
      cache: folder of tokenised data (default: in the user's cache)

    Raises:
      ValueError: a value is out of range; the message names option, value and remedy.
    """

    data: tuple[str, ...] = ()
    data_format: Literal["auto", "text", "chat", "tokens"] = "auto"
    package_paths: tuple[str, ...] = ()
    chat_template: str = ""
    max_bad_lines: int = 0
    length: int = 1024
    packing: Packing = "best_fit"
    long_documents: LongDocuments = "cut"
    held_out_share: float = 0.0
    held_out_data: tuple[str, ...] = ()
    held_out_modules: tuple[str, ...] = ()
    cache: str = ""

    def __post_init__(self):
        if not self.data:
            raise bad_option("data", self.data, "name files, folders, stdlib or hf:NAME")
        if self.max_bad_lines < 0:
            raise bad_option("max_bad_lines", self.max_bad_lines, "it must be at least 0")
        if self.length < 1:
            raise bad_option("length", self.length, "it must be at least 1")
        if not 0 <= self.held_out_share < 1:
            raise bad_option("held_out_share", self.held_out_share, "take 0, or more and below 1")
        if self.held_out_share and (self.held_out_data or self.held_out_modules):
            raise bad_option(
                "held_out_share",
                self.held_out_share,
                "leave it out: --held-out-data or --held-out-modules says what is held out",
            )

    @property
    def cache_dir(self) -> Path:
        """Folder of tokenised data."""
        return Path(self.cache) if self.cache else platformdirs.user_cache_path("jspec") / "tokens"


class Data(NamedTuple):
    """Rows to train on, rows held out (None without any), and a record for the provenance."""

    train: PackedRows
    held_out: PackedRows | None
    description: dict


def open_data(settings: DataSettings, tokenizer: Any, vocab_size: int) -> Data:
    """Reads, tokenises (or finds tokenised), splits and packs the data.

    No document of the training rows is held out, be it by a copy.

    Args:
      settings: what to read.
      tokenizer: of the model that will see the tokens.
      vocab_size: of that model.

    Raises:
      ValueError: data cannot be read, hold too many bad lines, or leave one side of a split empty.
    """
    left_out, more = Counter(), Counter()
    find = functools.partial(
        readers.find, data_format=settings.data_format, package_paths=settings.package_paths
    )
    sources, apart = find(
        settings.data, held_out_modules=settings.held_out_modules, left_out=left_out
    )
    if settings.held_out_data:
        apart += find(settings.held_out_data, left_out=more)[0]
    if not sources:
        remedy = "it leaves nothing to train on; name fewer"
        raise bad_option("held_out_modules", settings.held_out_modules, remedy)
    encoder = Encoder(tokenizer, vocab_size, settings.chat_template)
    make = lambda part: tokenized(part, encoder, settings.cache_dir, settings.max_bad_lines)
    file = make(sources)
    if apart:
        other = make(apart)
        held, kept = np.arange(len(other.ends)), ~np.isin(file.groups, other.groups)
    else:
        other, kept = file, file.groups.astype(np.float64) / 2.0**64 >= settings.held_out_share
        held = np.flatnonzero(~kept)
    _check_split(settings, int(kept.sum()), len(held))
    rows = lambda file, documents: pack(
        file,
        documents,
        settings.length,
        packing=settings.packing,
        long_documents=settings.long_documents,
    )
    train = rows(file, np.flatnonzero(kept))
    held_out = rows(other, held) if len(held) else None
    told = {"left_out": dict(left_out + more)} if left_out or more else {}
    return Data(train, held_out, _describe(settings, train, held_out) | told)


def _check_split(settings: DataSettings, kept: int, held: int) -> None:
    """Refuses a split with an empty side."""
    if settings.held_out_share and not held:
        raise bad_option(
            "held_out_share",
            settings.held_out_share,
            f"it holds out none of {kept} documents; raise it, or name --held-out-data",
        )
    if not kept:
        raise bad_option("data", settings.data, "all of it is held out; give more")


def _describe(settings: DataSettings, train: PackedRows, held_out: PackedRows | None) -> dict:
    """What the provenance says of the data; ``sha256`` is that of everything in the rows."""
    parts = {"train": train} | ({"held_out": held_out} if held_out else {})
    described = {
        name: {
            "windows": len(rows),
            "tokens": int(rows.lengths.sum()),
            "padding": round(rows.padding, 4),
            "from": rows.file.description,
        }
        for name, rows in parts.items()
    }
    how = (settings.length, settings.packing, settings.long_documents, settings.held_out_share)
    facts = json.dumps((described, how)).encode()
    return described | {"sha256": hashlib.sha256(facts).hexdigest()}

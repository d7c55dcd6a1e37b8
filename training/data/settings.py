"""Options of the data, and the rows that they make."""

import dataclasses
import hashlib
import json
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple, get_args

import numpy as np
import platformdirs

from training.data.coverage import coverage
from training.data.encode import Encoder
from training.data.packing import LongDocuments, PackedRows, Packing, pack
from training.data.readers import SourceSettings, find
from training.data.split import are_linked, is_held_out, split_facts
from training.data.token_file import tokenized
from training.util.errors import bad_option, check_choice, check_each, check_least


@dataclasses.dataclass(frozen=True)
class DataSettings(SourceSettings):
    """The data of a run. Every field is an option of the command line: ``--length 1024``."""

    # files or globs of text or JSON lines, folders of them, stdlib, package:NAME, hf:NAME[:SPLIT],
    # or folders saved by datasets
    data: tuple[str, ...] = ()
    length: int = 1024  # tokens of a training window
    # pack several documents into a window, each a segment (best_fit), or not (none)
    packing: Packing = "best_fit"
    # documents longer than a window: cut into pieces, truncate to the first piece, or drop
    long_documents: LongDocuments = "cut"
    # share of the prompts (of texts, without prompts) that is held out of training
    held_out_share: float = 0.0
    held_out_data: tuple[str, ...] = ()  # more held-out data; its prompts in --data are left out
    cache: str = ""  # folder of tokenised data (default: in the user's cache)

    def __post_init__(self):
        super().__post_init__()
        if not self.data:
            raise bad_option("data", self.data, "name files, folders, stdlib or hf:NAME")
        check_least(self, 1, "length")
        check_choice(self, "packing", get_args(Packing))
        check_choice(self, "long_documents", get_args(LongDocuments))
        share, remedy = self.held_out_share, "take 0, or more and below 1"
        check_each(self, ["held_out_share"], lambda x: 0 <= x < 1, remedy)
        if share and (self.held_out_data or self.held_out_modules):
            remedy = "leave it out: --held-out-data or --held-out-modules decides what is held out"
            raise bad_option("held_out_share", share, remedy)


class Data(NamedTuple):
    """Training rows, held-out rows (None without any), and a record for the provenance."""

    train: PackedRows
    held_out: PackedRows | None
    description: dict


def open_data(settings: DataSettings, tokenizer: Any, vocab_size: int) -> Data:
    """Read, tokenise (or find tokenised), split and pack the data.

    The tokenizer and ``vocab_size`` are those of the model that reads the tokens. No training
    document is a copy of a held-out one, or answers the same prompt.

    Raises:
      ValueError: data cannot be read, hold too many bad lines, or leave one side of a split empty.
    """
    left_out, more = Counter(), Counter()
    sources, apart = find(settings.data, settings, left_out)
    if settings.held_out_data:
        whole = dataclasses.replace(settings, held_out_modules=())
        apart += find(settings.held_out_data, whole, more)[0]
    if not sources:
        remedy = "it leaves nothing to train on; name fewer"
        raise bad_option("held_out_modules", settings.held_out_modules, remedy)
    encoder = Encoder(tokenizer, vocab_size, settings.chat_template)
    cache = settings.cache or platformdirs.user_cache_path("jspec") / "tokens"
    make = lambda part: tokenized(part, encoder, Path(cache), settings.max_bad_lines)
    file = make(sources)
    if apart:
        other = make(apart)
        held, train = np.arange(len(other.ends)), ~are_linked(file.groups, other.groups)
    else:
        other, train = file, ~is_held_out(file.groups, settings.held_out_share)
        held = np.flatnonzero(~train)
    if settings.held_out_share and not len(held):
        remedy = f"it holds out none of {len(train)} documents; raise it, or name --held-out-data"
        raise bad_option("held_out_share", settings.held_out_share, remedy)
    if not train.any():
        raise bad_option("data", settings.data, "all of it is held out; give more")
    how = {"packing": settings.packing, "long_documents": settings.long_documents}
    rows = pack(file, np.flatnonzero(train), settings.length, **how)
    held_out = pack(other, held, settings.length, **how) if len(held) else None
    record = _describe(settings, rows, held_out)
    record["train"]["account"] = coverage(rows, np.flatnonzero(train), settings.long_documents)
    if held_out:
        record["held_out"]["account"] = coverage(held_out, held, settings.long_documents)
    moved = len(train) - int(train.sum()) if apart else 0
    record["split"] = split_facts(file.groups[train], other.groups[held], moved)
    record["read"] = [*file.by_source, *(other.by_source if apart else ())]
    record |= {"left_out": dict(left_out + more)} if left_out or more else {}
    return Data(rows, held_out, record)


def _describe(settings: DataSettings, train: PackedRows, held_out: PackedRows | None) -> dict:
    """Return the record of the data; ``sha256`` covers all content of the rows."""
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

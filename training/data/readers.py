"""Sources of records: JSON lines, text, folders, packages, Hugging Face datasets.

``files`` reads files. A ``Ledger`` counts unusable lines and fails if there are too many.
"""

import dataclasses
import hashlib
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal

from training.data import files, sources
from training.data.files import Source
from training.data.ledger import Ledger
from training.data.records import Record, Text
from training.util.errors import check_least

_EXAMPLE = 1 << 10  # assumed bytes of a dataset's example, for progress bars


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
            train += [files.source_of(path, settings.data_format) for path in paths]
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
        if path.suffix not in files.LINES or not files.looks_like_json(files.first_line(path)):
            return False
        lines[module in held_out].append(files.source_of(path, settings.data_format))
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

    def read(ledger: Ledger) -> Iterator[tuple[int, Record]]:
        for number, document in enumerate(documents, 1):
            where = f"file {number} of {document.module} in {Path(document.source).name}"
            if len(document.text) <= sources.MAX_BYTES:
                yield len(document.text), Text(where, document.text)
            else:
                yield from files.sections_of(where, document.text, ledger)

    size = sum(len(document.text) for document in documents)
    return [Source(", ".join(names), size, digest.hexdigest(), read)]


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
        except Exception as error:  # errors of the hub, of the format or of a script
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

    def entries() -> Iterator[files.Entry]:
        number = 0
        try:
            for number, entry in enumerate(dataset, 1):
                # Columns that an example lacks are None.
                filled = {key: value for key, value in entry.items() if value is not None}
                yield _EXAMPLE, f"{Path(where).name} example {number}", filled
        except UnicodeDecodeError as error:
            example = f"{Path(where).name} example {number + 1}"
            raise ValueError(f"{example}: no UTF-8 ({error.reason}); mend the data") from None

    return Source(
        Path(where).name,
        len(dataset) * _EXAMPLE,
        f"{data_format} {dataset._fingerprint}",
        lambda ledger: files.recognised(entries(), data_format, ledger),
    )

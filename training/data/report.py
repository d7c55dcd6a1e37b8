"""The report of a run's data: counts, what is left out, and examples with their learned tokens."""

import sys
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from rich.console import Console
from rich.text import Text

from training.data.coverage import LEFT_OUT
from training.data.ledger import listed
from training.data.packing import PackedRows
from training.data.settings import Data, DataSettings

_PARTS = {"train": "train", "held_out": "held out"}
_COLUMNS = ("documents", "tokens", "learned", "context", "left out")
_EXAMPLES = 3
_LEARNED, _CONTEXT = "bold green", "dim"  # styles on a terminal
_CROP, _ENDS = 600, (400, 100)  # longest piece of an example, and the ends that are shown of others

Piece = tuple[str, bool]  # text, and whether it is learned


def print_summary(data: Data, settings: DataSettings) -> None:
    """Print on stderr a line for each side of the split, and one for each finding."""
    for line in (*_totals(data.description), *findings(data.description, settings)):
        print(f"data: {line}", file=sys.stderr)


def print_all(data: Data, settings: DataSettings, tokenizer: Any) -> None:
    """Print on stdout everything that is recorded of the data, and three examples."""
    console = Console(soft_wrap=True, highlight=False, markup=False, emoji=False)
    for line in (*_read(data.description), "", *_table(data.description), ""):
        console.print(line)
    for line in (*_totals(data.description), *findings(data.description, settings)):
        console.print(line)
    for title, pieces in examples(data.train, tokenizer):
        console.print(f"\n{title}:")
        if console.is_terminal:
            styles = [(text, _LEARNED if learned else _CONTEXT) for text, learned in pieces]
            console.print(Text.assemble(*styles))
        else:
            print("".join(f"⟦{text}⟧" if learned else text for text, learned in pieces))
    shown = "green" if console.is_terminal else "in ⟦ ⟧"
    console.print(f"\nLearned tokens are {shown}. Nothing was trained or written.")


def findings(description: Mapping[str, Any], settings: DataSettings) -> Iterator[str]:
    """Yield a line for everything that is left out, cut, or without effect."""
    for source in description["read"]:
        if source["refused"]:
            read = _many(source["records"], "record")
            yield f"{source['name']}: {source['refused']:,} refused, {read} read"
        if source["unused"]:
            yield f"{source['name']}: without effect are {listed(source['unused'])}"
    for part, name in _PARTS.items():
        if part in description:
            yield from _cuts(name, description[part]["account"], settings)
    split = description["split"]
    if moved := split["documents_left_out_of_training"]:
        yield f"split: {_many(moved, 'document')} left out of training: the prompts are held out"
    if split["held_out_prompts"]:
        yield (
            f"split: {split['prompts_on_both_sides']} of {split['held_out_prompts']:,} held-out "
            "prompts are in training"
        )


def _cuts(name: str, account: Mapping[str, Any], settings: DataSettings) -> Iterator[str]:
    """Yield what becomes of long documents, and what holds nothing to learn."""
    left_out = dict(account["left_out"])
    if account["long_documents"]:
        line = (
            f"{name}: {account['long_documents']:,} of {_many(account['documents'], 'document')} "
            f"longer than --length {settings.length} (--long-documents "
            f"{settings.long_documents})"
        )
        if left := left_out.pop(LEFT_OUT[settings.long_documents], None):
            line += f"; {_share(left['tokens'], account['tokens'])} are left out"
        yield line
    for reason, left in left_out.items():
        yield (
            f"{name}: {_share(left['tokens'], account['tokens'])} are left out: {reason}, "
            f"in {_many(left['documents'], 'document')}"
        )
    if account["without_prompt"]:
        total = account["learned_tokens"]
        yield (
            f"{name}: {_share(account['without_prompt'], total, 'learned tokens')} "
            "are in pieces without their prompt; take a longer --length, or another "
            "--long-documents"
        )


def _many(count: int, noun: str) -> str:
    return f"{count:,} {noun}" + "s" * (count != 1)


def _share(count: int, total: int, noun: str = "tokens") -> str:
    return f"{count:,} of {total:,} {noun} ({100 * count / max(total, 1):.2f} %)"


def _read(description: Mapping[str, Any]) -> Iterator[str]:
    """Yield what was read of each source."""
    for source in description["read"]:
        yield (
            f"{source['name']}: {_many(source['records'], 'record')} read, {source['refused']:,} "
            f"refused, {_many(source['documents'], 'document')}"
        )
        yield from (f"  refused {reason}" for reason in source["why"])


def _totals(description: Mapping[str, Any]) -> Iterator[str]:
    """Yield a line for each side of the split."""
    for part, name in _PARTS.items():
        if part not in description:
            continue
        facts, account = description[part], description[part]["account"]
        yield (
            f"{name}: {_many(account['documents'], 'document')} of {account['tokens']:,} tokens in "
            f"{_many(facts['windows'], 'window')}, {100 * facts['padding']:.1f} % padding; "
            f"{_share(account['learned_tokens'], account['tokens'])} are learned"
        )


def _table(description: Mapping[str, Any]) -> list[str]:
    """Return the counts of both sides, and of each of their sources, in columns."""
    rows = [("", *_COLUMNS)]
    for part, name in _PARTS.items():
        if part in description:
            account = description[part]["account"]
            sources = [(f"  {source['name']}", source) for source in account["by_source"]]
            rows += [(label, *_cells(each)) for label, each in [(name, account), *sources]]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]) for row in rows
    ]


def _cells(account: Mapping[str, Any]) -> list[str]:
    tokens, learned = account["tokens"], account["learned_tokens"]
    left = sum(part["tokens"] for part in account["left_out"].values())
    counts = account["documents"], tokens, learned, tokens - learned - left, left
    return [f"{count:,}" for count in counts]


def examples(rows: PackedRows, tokenizer: Any) -> Iterator[tuple[str, list[Piece]]]:
    """Yield titles and texts of three pieces of documents, spread over the data as it is packed."""
    order = np.argsort(rows.starts)
    picked = np.unique(np.linspace(0, len(order) - 1, min(_EXAMPLES, len(order))).astype(int))
    for number, piece in enumerate(order[picked], 1):
        span = slice(rows.starts[piece], rows.starts[piece] + rows.lengths[piece])
        learned = np.array(rows.file.learned[span])
        learned[0] = False  # nothing predicts it
        document = int(np.searchsorted(rows.file.ends, span.start, side="right"))
        title = (
            f"example {number}, document {document + 1}: {len(learned):,} tokens, "
            f"{int(learned.sum()):,} learned"
        )
        yield title, _pieces(rows.file.tokens[span].tolist(), learned, tokenizer)


def _pieces(ids: list[int], learned: np.ndarray, tokenizer: Any) -> list[Piece]:
    """Return the text of the tokens, cut where learned tokens begin and end."""
    bounds = [*(np.flatnonzero(np.diff(learned)) + 1).tolist(), len(ids)]
    # The text of a token may depend on the tokens before it, so each prefix is decoded whole.
    texts = [""] + [tokenizer.decode(ids[:end], skip_special_tokens=False) for end in bounds]
    return [
        (_shown(texts[i + 1][len(texts[i]) :]), bool(learned[end - 1]))
        for i, end in enumerate(bounds)
    ]


def _shown(text: str) -> str:
    """Return a text without terminal codes, the middle of a long one left out."""
    text = "".join(char if char.isprintable() or char in "\n\t" else "\ufffd" for char in text)
    if len(text) <= _CROP:
        return text
    head, tail = _ENDS
    return f"{text[:head]} [... {len(text) - head - tail:,} characters ...] {text[-tail:]}"

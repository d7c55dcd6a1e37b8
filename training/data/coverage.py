"""The account of windows: which tokens of their documents are learned, and why not the others."""

from typing import Any

import numpy as np

from training.data.packing import PackedRows
from training.data.token_file import TokenFile

# Reasons why tokens are in no window, by ``long_documents``; the last one holds for all documents.
LEFT_OUT = {
    "drop": "longer than a window",
    "truncate": "behind the first window of a long document",
    "cut": "pieces without anything to learn",
}


def coverage(rows: PackedRows, documents: np.ndarray, long_documents: str) -> dict[str, Any]:
    """Return the account of ``documents`` int [n], of which ``pack`` made ``rows``.

    Counts are of documents and tokens:

    - ``documents``, ``tokens``: all of them, and ``labels``: tokens of texts and answers;
    - ``learned_tokens``: labels in windows that a token of their document precedes;
    - ``left_out``: documents and tokens in no window, by reason;
    - ``first_tokens``: labels that begin a piece, so that nothing predicts them;
    - ``long_documents``: documents longer than a window;
    - ``without_prompt``: learned tokens of an answer that were cut from what precedes it;
    - ``by_source``: the same for each source.
    """
    file, width = rows.file, rows.length + 1
    documents = np.sort(documents)
    counts = _counts(rows, documents)
    lengths = file.lengths[documents]
    left = lengths - counts["used"]
    reasons = np.where(
        (lengths <= width) | (left < lengths) & (long_documents != "truncate"),
        LEFT_OUT["cut"],
        LEFT_OUT[long_documents],
    )
    origins = _origins(file)[documents]

    def account(chosen: np.ndarray) -> dict[str, Any]:
        sums = {name: int(values[chosen].sum()) for name, values in counts.items()}
        return {
            "documents": int(chosen.sum()),
            "tokens": int(lengths[chosen].sum()),
            "labels": sums["labels"],
            "learned_tokens": sums["learned"],
            "first_tokens": sums["first"],
            "long_documents": int((lengths[chosen] > width).sum()),
            "without_prompt": sums["without_prompt"],
            "left_out": {
                str(reason): {
                    "documents": int((chosen & (left > 0) & (reasons == reason)).sum()),
                    "tokens": int(left[chosen & (reasons == reason)].sum()),
                }
                for reason in np.unique(reasons[chosen & (left > 0)])
            },
        }

    by_source = [
        {"name": source["name"]} | account(origins == number)
        for number, source in enumerate(file.by_source)
        if (origins == number).any()
    ]
    return account(np.ones(len(documents), bool)) | {"by_source": by_source}


def _counts(rows: PackedRows, documents: np.ndarray) -> dict[str, np.ndarray]:
    """Return counts of tokens, int [documents] each."""
    file = rows.file
    order = np.argsort(rows.starts)
    starts, lengths = rows.starts[order], rows.lengths[order]
    begins = (file.ends - file.lengths)[documents]
    owner = np.searchsorted(begins, starts, side="right") - 1
    total = lambda values: np.bincount(owner, values, len(documents)).astype(np.int64)
    learned = _sums(file.learned, starts + 1, starts + lengths)
    # A document that begins with a label is a text, which has no prompt.
    cut = (starts > begins[owner]) & file.learned[starts] & ~file.learned[begins[owner]]
    answers = np.zeros(len(starts), np.int64)
    for piece in np.flatnonzero(cut):
        marks = np.append(file.learned[starts[piece] : starts[piece] + lengths[piece]], False)
        answers[piece] = marks.argmin() - 1  # nothing predicts the first token of a piece
    return {
        "labels": _sums(file.learned, begins, file.ends[documents]),
        "used": total(lengths),
        "learned": total(learned),
        "first": total(file.learned[starts]),
        "without_prompt": total(answers),
    }


def _sums(marks: np.ndarray, begins: np.ndarray, ends: np.ndarray) -> np.ndarray:
    """Return the number of marks in each range; the ranges ascend and hold one token or more."""
    edges = np.stack([begins, ends], 1).ravel()
    inside = edges[: np.searchsorted(edges, len(marks))]  # the last end may be the file's
    return np.add.reduceat(marks, inside, dtype=np.int64)[::2]


def _origins(file: TokenFile) -> np.ndarray:
    """Return the number of each document's source, int [documents]."""
    counts = [source["documents"] for source in file.by_source] or [len(file.ends)]
    return np.repeat(np.arange(len(counts)), counts)

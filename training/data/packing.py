"""Documents packed into windows; each document is a segment of its own.

Best fit, longest first: each piece goes into the window that it fills best. Windows of real data
are full to the last per cent or so, and no document attends to another.
"""

import dataclasses
from typing import Literal

import numpy as np

from training.data.batch import Batch
from training.data.loader import Rows
from training.data.token_file import TokenFile

Packing = Literal["best_fit", "none"]
LongDocuments = Literal["cut", "truncate", "drop"]


@dataclasses.dataclass(frozen=True, eq=False)
class PackedRows:
    """Windows over a token file, addressed by number; ``pack`` makes them."""

    file: TokenFile  # the documents
    starts: np.ndarray  # int64 [pieces], start of each piece in the file, window by window
    lengths: np.ndarray  # int64 [pieces]
    first: np.ndarray  # int64 [windows + 1], number of each window's first piece
    length: int  # T; a window holds T + 1 tokens

    def __len__(self) -> int:
        return len(self.first) - 1

    def __getitem__(self, index: int) -> Batch:
        """Return window ``index``: segments from 1 on, zeros behind them.

        The first token of a segment has weight 0, because no row of its segment predicts it.
        """
        width = self.length + 1
        row = Batch(
            tokens=np.zeros(width, np.int32),
            segments=np.zeros(width, np.int32),
            weights=np.zeros(width, np.float32),
        )
        begin = 0
        for number, piece in enumerate(range(self.first[index], self.first[index + 1]), 1):
            source = slice(self.starts[piece], self.starts[piece] + self.lengths[piece])
            target = slice(begin, begin + int(self.lengths[piece]))
            row.tokens[target] = self.file.tokens[source]
            row.segments[target] = number
            row.weights[target] = self.file.learned[source]
            row.weights[begin] = 0
            begin = target.stop
        return row

    @property
    def padding(self) -> float:
        """Share of the windows that holds no document."""
        return 1 - float(self.lengths.sum()) / (len(self) * (self.length + 1))


def pack(
    file: TokenFile,
    documents: np.ndarray,
    length: int,
    *,
    packing: Packing = "best_fit",
    long_documents: LongDocuments = "cut",
) -> PackedRows:
    """Pack documents into windows.

    ``documents`` int [n] are their numbers in ``file``. A window holds T + 1 tokens, T = length.
    Longer documents are cut into pieces (``cut``), end with the first piece (``truncate``), or are
    left out (``drop``). So are pieces without labels and single tokens. ``packing="none"`` gives
    every piece a window of its own.

    Raises:
      ValueError: nothing is left.
    """
    starts, lengths = _pieces(file, np.sort(documents), length + 1, long_documents)
    if not len(starts):
        raise ValueError(
            f"no document is left in windows of --length {length} with --long-documents "
            f"{long_documents}; give more data, longer windows or --long-documents cut"
        )
    windows = np.arange(len(starts))
    if packing == "best_fit":
        windows = _best_fit(lengths, length + 1)
    order = np.argsort(windows, kind="stable")
    first = np.searchsorted(windows[order], np.arange(windows.max() + 2))
    return PackedRows(file, starts[order], lengths[order], first, length)


def token_counts(rows: Rows, vocab_size: int, *, learned: bool = True) -> np.ndarray:
    """Return the frequency of each token in ``rows``: int64 [vocab_size].

    ``learned`` only counts labels (weight above 0), by which a draft vocabulary is chosen.
    """
    counts = np.zeros(vocab_size, np.int64)
    for begin in range(0, len(rows), 1024):  # many at once: a count is as long as the vocabulary
        some = [rows[i] for i in range(begin, min(begin + 1024, len(rows)))]
        tokens = [row.tokens[row.weights > 0 if learned else row.segments > 0] for row in some]
        counts += np.bincount(np.concatenate(tokens), minlength=vocab_size)
    return counts


def _pieces(
    file: TokenFile, documents: np.ndarray, width: int, long_documents: LongDocuments
) -> tuple[np.ndarray, np.ndarray]:
    """Return starts and lengths of all pieces of at most ``width`` tokens, by document."""
    lengths = file.lengths[documents]
    starts = (file.ends - file.lengths)[documents]
    if long_documents == "drop":
        starts, lengths = starts[lengths <= width], lengths[lengths <= width]
    elif long_documents == "truncate":
        lengths = np.minimum(lengths, width)
    counts = -(-lengths // width)
    owner = np.repeat(np.arange(len(starts)), counts)
    offset = (np.arange(len(owner)) - np.repeat(np.cumsum(counts) - counts, counts)) * width
    begins, sizes = starts[owner] + offset, np.minimum(width, lengths[owner] - offset)
    begins, sizes = begins[sizes > 1], sizes[sizes > 1]
    # A piece is useful if any token but its first is a label.
    edges = np.stack([begins + 1, begins + sizes], 1).ravel()
    inside = edges[: np.searchsorted(edges, len(file.learned))]  # the last end may be the file's
    useful = np.logical_or.reduceat(file.learned, inside)[::2] if len(inside) else np.zeros(0, bool)
    return begins[useful], sizes[useful]


def _best_fit(lengths: np.ndarray, width: int) -> np.ndarray:
    """Return the window of each piece, int64 [pieces]: best fit, longest piece first.

    Bit r of ``rooms`` is set if some window has room for exactly r tokens: the best fit is the
    lowest bit at or above the length.
    """
    windows = np.zeros(len(lengths), np.int64)
    waiting: list[list[int]] = [[] for _ in range(width + 1)]  # windows by their room
    rooms, count = 0, 0
    for piece in np.argsort(-lengths, kind="stable"):
        size = int(lengths[piece])
        fitting = rooms >> size
        if fitting:
            room = size + (fitting & -fitting).bit_length() - 1
            window = waiting[room].pop()
            rooms ^= (not waiting[room]) << room
        else:
            room, window = width, count
            count += 1
        left = room - size
        waiting[left].append(window)
        rooms |= bool(left) << left
        windows[piece] = window
    return windows

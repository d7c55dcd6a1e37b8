"""Windows of two texts with padding behind them, and the texts alone."""

from collections.abc import Iterator

import numpy as np

from training.data.batch import Batch

FIRST, SECOND = 11, 8  # tokens of the two texts of a window


def packed(
    vocab_size: int, *, rows: int = 2, first: int = FIRST, second: int = SECOND, padding: int = 2
) -> Batch:
    """Return windows of two texts and padding; some tokens have weight 0."""
    rng = np.random.default_rng(1)
    tokens = rng.integers(0, vocab_size, (rows, first + second + padding)).astype(np.int32)
    segments = np.tile(np.repeat([1, 2, 0], [first, second, padding]).astype(np.int32), (rows, 1))
    weights = (rng.random(tokens.shape) < 0.8) & (segments > 0)
    return Batch(tokens, segments, weights.astype(np.float32))


def places(batch: Batch) -> Iterator[tuple[int, int, int]]:
    """Yield (row, start, end) of each text."""
    for row, segments in enumerate(batch.segments):
        for number in range(1, segments.max() + 1):
            inside = np.flatnonzero(segments == number)
            yield row, int(inside[0]), int(inside[-1]) + 1


def alone(batch: Batch) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield tokens and weights of each text."""
    for row, start, end in places(batch):
        yield batch.tokens[row, start:end], batch.weights[row, start:end]


def rows_of(batch: Batch) -> int:
    """Return the number of rows of a batch's losses; the last token of a window has none."""
    return batch.tokens[:, 1:].size


def log_softmax(x: np.ndarray) -> np.ndarray:
    """Return log-probabilities over the last axis."""
    return x - np.logaddexp.reduce(x, axis=-1, keepdims=True)

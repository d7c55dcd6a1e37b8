"""A window of two texts for the tiny target, and its texts."""

from collections.abc import Iterator

import numpy as np

from tests import tiny
from training.data.batch import Batch

FIRST, SECOND = 9, 6


def packed() -> Batch:
    """Return a window of two texts and padding; some tokens have weight 0."""
    rng = np.random.default_rng(1)
    tokens = rng.integers(0, tiny.VOCAB, (1, FIRST + SECOND + 2)).astype(np.int32)
    row = np.repeat([1, 2, 0], [FIRST, SECOND, 2]).astype(np.int32)
    weights = (rng.random(tokens.shape) < 0.8) & (row > 0)
    return Batch(tokens, row[None], weights.astype(np.float32))


def alone(batch: Batch) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield tokens and weights of each text."""
    for start, end in ((0, FIRST), (FIRST, FIRST + SECOND)):
        yield batch.tokens[0, start:end], batch.weights[0, start:end]

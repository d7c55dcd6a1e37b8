"""The sizes of prefill passes, and the choice of the next one.

A pass computes 16, 128 or 512 tokens: a chunk of one prompt, or an eighth as many of each of eight
prompts. So there are five programs, and a pass of a few short prompts costs little more than what
they hold. While sequences run, a pass has at most 128 tokens, which is what they wait for.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from jspec.core.logprobs import Scoring

TOTALS = (16, 128, 512)  # tokens of a pass
BUSY = 128  # most tokens of a pass between two launches
_SCORED = 32  # tokens of a pass with scores, which needs logits [C, V]
_ROWS = 8  # most prompts of a pass
_LEAST_WIDTH = 16  # tokens of each, where there are several
_PASS_TOKENS = 64  # tokens that are computed in the time of reading the weights
_BETTER = 1.1  # ratio by which several prompts must win, as one alone is done earlier


class Chunk(NamedTuple):
    """The size of a prefill pass."""

    rows: int  # prompts
    width: int  # tokens of each

    @property
    def total(self) -> int:
        """The tokens that the pass computes."""
        return self.rows * self.width

    def rate(self, left: Sequence[int]) -> float:
        """Return the tokens that are prefilled a unit of time, if prompts have ``left`` tokens."""
        read = sum(min(tokens, self.width) for tokens in left[: self.rows])
        return read / (self.total + _PASS_TOKENS)


def sizes(num_slots: int, scoring: Scoring | None = None, most: int = TOTALS[-1]) -> list[Chunk]:
    """Return the sizes of passes of up to ``most`` tokens in a batch of ``num_slots`` rows."""
    if scoring is not None:
        return [Chunk(1, _SCORED)]
    rows = min(_ROWS, 1 << (num_slots.bit_length() - 1))
    alone = [Chunk(1, total) for total in TOTALS if total <= most]
    widths = [total // rows for total in TOTALS if total <= most]
    return alone + [Chunk(rows, width) for width in widths if rows > 1 and width >= _LEAST_WIDTH]


def sizes_of_all(num_rows: int, scoring: Scoring | None = None) -> list[Chunk]:
    """Return the sizes of passes over all rows of a batch side by side."""
    widths = TOTALS if scoring is None else (_SCORED,)
    return [Chunk(num_rows, width) for width in widths]


def choose(left: Sequence[int], sizes: Sequence[Chunk], room: Sequence[int] | None = None) -> Chunk:
    """Return the pass that prefills the most tokens a unit of time.

    Args:
      left: tokens to be prefilled of each prompt that waits, in order.
      sizes: that a pass may have.
      room: slots behind what each prompt has cached, as a chunk writes all its width to a cache
        without pages; None for any number.
    """
    if room is not None:
        sizes = [size for size in sizes if size.width <= min(room[: size.rows])]
    return max(sizes, key=lambda size: size.rate(left) / (_BETTER if size.rows > 1 else 1))


class Arrays(NamedTuple):
    """A prefill pass; see ``loop.prefill``."""

    chunk: np.ndarray  # int32 [Q, C+1]
    start: np.ndarray  # int32 [Q]
    valid: np.ndarray  # int32 [Q]
    ready: np.ndarray  # bool [Q]


def assemble(
    texts: Sequence[Sequence[int]],
    starts: Sequence[int],
    size: Chunk,
    ends: Sequence[int] | None = None,
) -> Arrays:
    """Return the next pass over up to Q texts, of which the first ``starts`` tokens are cached.

    It ends at ``ends`` at most; None for all tokens but the last one, which is not prefilled.
    """
    ends = [len(text) - 1 for text in texts] if ends is None else ends
    chunk = np.zeros((size.rows, size.width + 1), np.int32)
    start, valid = np.zeros(size.rows, np.int32), np.zeros(size.rows, np.int32)
    ready = np.zeros(size.rows, bool)
    for row, (text, begin, end) in enumerate(zip(texts, starts, ends, strict=True)):
        part = text[begin : begin + size.width + 1]
        chunk[row, : len(part)] = part
        start[row], valid[row] = begin, min(end - begin, size.width)
        ready[row] = begin + valid[row] == len(text) - 1
    return Arrays(chunk, start, valid, ready)

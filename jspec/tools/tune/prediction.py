"""Rounds that a candidate would need, predicted from recorded rounds.

Each answer is replayed: a round accepts the part of a recorded path that the candidate's tree
contains, until the answer has its length. If there is a path for every token, the next round starts
at the token reached. Otherwise rounds are drawn at random from those of the same prompt. As in the
engine, an answer starts where a slot is free, and a round drafts if any row has a draft.
"""

import dataclasses
import itertools
from collections.abc import Sequence

import numpy as np

from jspec.core.static_trees import StaticTree
from jspec.engine.functional import Answer
from jspec.tools.tune.acceptance import Recording, Round, accepted_by

_REPLAYS = 64


@dataclasses.dataclass(frozen=True)
class Passes:
    """The rounds that all answers need together."""

    drafted: float  # rounds in which any row has a draft
    plain: float  # the other rounds
    tokens_per_pass: float  # of a row, the bonus token included


def replay(
    recording: Recording, tree: StaticTree | None, lengths: Sequence[int], num_slots: int
) -> Passes:
    """Replay answers of ``lengths`` with drafts of ``tree``; None replays the recorded drafts.

    ``num_slots`` answers run together. Every tree draws the same rounds. A prompt without any draws
    from those of all prompts.

    Raises:
      ValueError: there are no rounds.
    """
    if recording.is_empty:
        raise ValueError("no round is left to predict from: answers are too short for the drafts.")
    pooled = list(itertools.chain(*recording.prompts))
    rows, tokens = [], 0.0
    for index, rounds in enumerate(recording.prompts):
        by_position = recording.by_position and bool(rounds)
        random = None if by_position else np.random.default_rng((0, index))
        rows.append(_row(rounds or pooled, tree, lengths[index], random))
        tokens += len(rounds) if recording.by_position else lengths[index]
    return _passes(rows, num_slots, tokens)


def counted(answers: Sequence[Answer], num_slots: int) -> Passes:
    """Return the passes of a generation."""
    rows = [(answer.steps[1][None] > 0, np.full(1, answer.rounds, np.int64)) for answer in answers]
    return _passes(rows, num_slots, float(sum(len(answer.tokens) for answer in answers)))


def _passes(rows: Sequence[tuple[np.ndarray, np.ndarray]], num_slots: int, tokens: float) -> Passes:
    """Let rows of (draft of each round [replays, T], rounds [replays]) run in slots, in order."""
    counts = np.array([count for _, count in rows])  # [rows, replays]
    replays = np.arange(counts.shape[1])
    free = np.zeros((num_slots, len(replays)), np.int64)
    longest = counts.sum(0).max() + max(has_draft.shape[1] for has_draft, _ in rows)
    any_draft = np.zeros((len(replays), longest), bool)
    for has_draft, count in rows:
        slot = free.argmin(0)
        rounds = free[slot, replays][:, None] + np.arange(has_draft.shape[1])
        any_draft[replays[:, None], rounds] |= has_draft
        free[slot, replays] += count
    drafted = any_draft.sum(1)
    plain = free.max(0) - drafted
    per_pass = tokens / counts.sum(0).mean()
    return Passes(float(drafted.mean()), float(plain.mean()), float(per_pass))


def _row(
    rounds: Sequence[Round],
    tree: StaticTree | None,
    length: int,
    random: np.random.Generator | None,
) -> tuple[np.ndarray, np.ndarray]:
    """Return whether each round of an answer has a draft [replays, T], and their number [replays].

    Rounds are drawn with ``random``; without it there is one for every token.
    """
    paths = [round_.path for round_ in rounds]
    accepted = np.array([len(p) if tree is None else accepted_by(tree, p) for p in paths])
    has_draft = np.array([round_.drafted for round_ in rounds])
    if random is None:
        position, visited = 0, []
        while position < len(accepted):
            visited.append(position)
            position += int(accepted[position]) + 1
        every = np.broadcast_to(has_draft[visited], (_REPLAYS, len(visited)))
        return every, np.full(_REPLAYS, len(visited))
    picked = random.integers(len(accepted), size=(_REPLAYS, length))
    emitted = 1 + accepted[picked]
    runs = np.cumsum(emitted, 1) - emitted < length
    return has_draft[picked] & runs, runs.sum(1)

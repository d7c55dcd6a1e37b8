"""Rounds that a candidate would need, predicted from recorded rounds.

Each answer is replayed: a round accepts the part of a recorded path that the candidate's tree
contains, until the answer has its length. If there is a path for every token, the next round starts
at the token reached. Otherwise rounds are drawn at random from those of the same prompt. As in the
loop, a group runs as long as its slowest row, and a round drafts if any row has a draft.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np

from jspec.core.trees import StaticTree
from jspec.tools.tune.acceptance import Rounds, accepted_by

_REPLAYS = 64


@dataclasses.dataclass(frozen=True)
class Passes:
    """The rounds that the answers of all groups need."""

    drafted: float  # rounds in which any row has a draft
    plain: float  # the other rounds
    tokens_per_pass: float  # of a row, the bonus token included


def replay(
    prompts: Sequence[Rounds],
    tree: StaticTree | None,
    lengths: Sequence[int],
    groups: Sequence[Sequence[int]],
    seed: int = 0,
) -> Passes:
    """Replay all answers with drafts of ``tree``.

    Args:
      prompts: recorded rounds; a prompt without any draws from those of all prompts.
      tree: of the drafts; None replays the recorded drafts.
      lengths: tokens of every answer.
      groups: indices of prompts that run together.
      seed: equal seeds draw equal rounds for every tree.

    Raises:
      ValueError: there are no rounds.
    """
    pooled = Rounds([round_ for prompt in prompts for round_ in prompt.rounds], False)
    if not pooled.rounds:
        raise ValueError("no round is left to predict from: answers are too short for the drafts.")
    drafted = plain = row_rounds = tokens = 0.0
    for group in groups:
        rows = [
            _row(
                prompts[index] if prompts[index].rounds else pooled,
                tree,
                lengths[index],
                np.random.default_rng((seed, index)),
            )
            for index in group
        ]
        counts = np.array([[len(has_draft) for has_draft in row] for row in rows])
        any_draft = np.zeros((_REPLAYS, int(counts.max())), bool)
        for row in rows:
            for index, has_draft in enumerate(row):
                any_draft[index, : len(has_draft)] |= has_draft
        drafted += any_draft.sum(1).mean()
        plain += (counts.max(0) - any_draft.sum(1)).mean()
        row_rounds += counts.sum(0).mean()
        tokens += sum(_length(prompts[index], lengths[index]) for index in group)
    return Passes(float(drafted), float(plain), float(tokens / row_rounds))


def _length(prompt: Rounds, length: int) -> int:
    return len(prompt.rounds) if prompt.by_position else length


def _row(
    prompt: Rounds, tree: StaticTree | None, length: int, random: np.random.Generator
) -> list[np.ndarray]:
    """Return whether each round of an answer has a draft, bool [rounds] for each replay."""
    paths = [round_.path for round_ in prompt.rounds]
    accepted = np.array([len(p) if tree is None else accepted_by(tree, p) for p in paths])
    has_draft = np.array([round_.drafted for round_ in prompt.rounds])
    if prompt.by_position:
        position, visited = 0, []
        while position < len(accepted):
            visited.append(position)
            position += int(accepted[position]) + 1
        return [has_draft[visited]] * _REPLAYS
    picked = random.integers(len(accepted), size=(_REPLAYS, length))
    emitted = 1 + accepted[picked]
    counts = (np.cumsum(emitted, 1) - emitted < length).sum(1)
    return [has_draft[row[:count]] for row, count in zip(picked, counts, strict=True)]

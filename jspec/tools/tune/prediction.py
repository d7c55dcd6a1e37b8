"""Tokens a second that a shape of drafts is expected to bring, before it has ever generated a text.

The answers are played through: each round accepts what the shape holds of a recorded path, until
the answer is as long as it was. Where there is a path for every token, the next round is that of
the token reached; else it is drawn from all rounds of the same prompt, many times over. So a group
goes on for as long as its slowest row, and a round has a draft where any of its rows has one, as in
the loop itself.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np

from jspec.core.trees import StaticTree
from jspec.engine.batch import Answer
from jspec.tools.tune.acceptance import Recorded, accepted_by

_DRAWS = 64  # generations that are played through


@dataclasses.dataclass(frozen=True)
class Passes:
    """What the answers of all groups take.

    Attributes:
      drafted: rounds in which any row had a draft, all groups together.
      plain: the other rounds.
      tokens_per_pass: of a row, the bonus token included.
    """

    drafted: float
    plain: float
    tokens_per_pass: float


def play(
    recorded: Sequence[Recorded],
    tree: StaticTree | None,
    lengths: Sequence[int],
    groups: Sequence[Sequence[int]],
    seed: int = 0,
) -> Passes:
    """Plays the answers through.

    Args:
      recorded: of every prompt; where there are no rounds, those of all prompts are drawn from.
      tree: of the drafts; None for what was recorded, as it is.
      lengths: tokens of every answer; where rounds are those of every token, they say it better.
      groups: indices of prompts that run together.
      seed: equal seeds draw equal rounds, so that shapes are compared on the same.

    Raises:
      ValueError: there are no rounds at all.
    """
    every = Recorded([each for some in recorded for each in some.rounds], False)
    if not every.rounds:
        raise ValueError("no round is left to predict from: answers are too short for the drafts.")
    drafted = plain = spent = said = 0.0
    for group in groups:
        played = [
            _row(
                recorded[index] if recorded[index].rounds else every,
                tree,
                lengths[index],
                np.random.default_rng((seed, index)),
            )
            for index in group
        ]
        ran = np.array([[len(draw) for draw in row] for row in played])
        drafts = np.zeros((_DRAWS, int(ran.max())), bool)
        for row in played:
            for draw, had in enumerate(row):
                drafts[draw, : len(had)] |= had
        drafted += drafts.sum(1).mean()
        plain += (ran.max(0) - drafts.sum(1)).mean()
        spent += ran.sum(0).mean()
        said += sum(_length(recorded[index], lengths[index]) for index in group)
    return Passes(float(drafted), float(plain), float(said / spent))


def counted(answers: Sequence[Answer], groups: Sequence[Sequence[int]]) -> Passes:
    """The passes of a generation that was. Rows are taken to have drafts independently."""
    drafted = plain = 0.0
    for group in groups:
        some = [answers[index] for index in group]
        most = max(answer.rounds for answer in some)
        none = np.prod([1 - answer.drafts / max(answer.rounds, 1) for answer in some])
        drafted += most * (1 - none)
        plain += most * none
    tokens = sum(len(answer.tokens) for answer in answers)
    return Passes(float(drafted), float(plain), tokens / sum(answer.rounds for answer in answers))


def _length(recorded: Recorded, length: int) -> int:
    return len(recorded.rounds) if recorded.by_position else length


def _row(
    recorded: Recorded, tree: StaticTree | None, length: int, random: np.random.Generator
) -> list[np.ndarray]:
    """Whether there was a draft in each of a row's rounds, of many generations: bool [rounds]."""
    accepted = np.array(
        [
            len(each.path) if tree is None else accepted_by(tree, each.path)
            for each in recorded.rounds
        ]
    )
    has_draft = np.array([each.drafted for each in recorded.rounds])
    if recorded.by_position:
        place, visited = 0, []
        while place < len(accepted):
            visited.append(place)
            place += int(accepted[place]) + 1
        return [has_draft[visited]] * _DRAWS
    picked = random.integers(len(accepted), size=(_DRAWS, length))
    emitted = 1 + accepted[picked]
    runs = (np.cumsum(emitted, 1) - emitted < length).sum(1)
    return [has_draft[row[:count]] for row, count in zip(picked, runs, strict=True)]

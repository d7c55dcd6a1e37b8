"""Seconds of rounds and calls at one batch size, measured or bounded from below.

A round takes V(N, B), the target's pass over N nodes of B rows, and an overhead for drafting,
judging and committing. V is measured on its own. The overhead of an unmeasured candidate is
interpolated by depth between plain decoding and the cheapest measured drafts of its family. Beyond
them it does not grow. So a candidate never looks slower than it is before it is measured.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np

from jspec.tools.tune.families import Candidate, Family


@dataclasses.dataclass(frozen=True)
class RoundSeconds:
    """Seconds of a round in which any row has a draft, and of a round without a draft."""

    with_draft: float
    without: float


@dataclasses.dataclass(eq=False)
class Costs:
    """The measurements at one batch size."""

    sizes: Sequence[int]  # measured N, ascending
    passes: Sequence[float]  # seconds V(N, B) of each
    plain: float  # seconds of a round of plain decoding
    call: float  # seconds of a call for one token without its round: prompts and host
    # seconds of prefilling the prompts beyond those of plain decoding
    prefill: dict[Family, float] = dataclasses.field(default_factory=dict)
    # of measured candidates
    rounds: dict[Candidate, RoundSeconds] = dataclasses.field(default_factory=dict)

    def of_pass(self, size: int) -> float:
        """Return V(N, B), made monotone: a larger N that looks cheaper was a good moment."""
        least = np.minimum.accumulate(self.passes[::-1])[::-1]
        return float(np.interp(size, self.sizes, least))

    def of_call(self, family: Family) -> float:
        """Return the seconds that a call of a family takes beyond its rounds."""
        seconds = self.call + self.prefill.get(family, 0.0)
        return max(seconds, 0.0)  # of differences, which noise may make negative

    def of_round(self, candidate: Candidate) -> RoundSeconds:
        """Return the seconds of a candidate's rounds: measured, or a lower bound."""
        if candidate in self.rounds:
            return self.rounds[candidate]
        overhead = {0: self.plain - self.of_pass(1)}
        without = self.plain
        for other, seconds in self.rounds.items():
            if other.family == candidate.family:
                rest = seconds.with_draft - self.of_pass(other.size)
                overhead[other.depth] = min(rest, overhead.get(other.depth, rest))
                without = seconds.without
        depths = sorted(overhead)
        rest = np.interp(candidate.depth, depths, [overhead[depth] for depth in depths])
        return RoundSeconds(float(rest) + self.of_pass(candidate.size), without)

    def measured(self, candidate: Candidate, seconds: float, drafted: float) -> None:
        """Record the mean ``seconds`` of rounds, of which the share ``drafted`` had a draft.

        A round without a draft runs on one node, and so saves V(N, B) - V(1, B).
        """
        wider = self.of_pass(candidate.size) - self.of_pass(1)
        without = seconds - drafted * wider
        self.rounds[candidate] = RoundSeconds(without + wider, without)

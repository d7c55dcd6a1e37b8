"""What rounds take on this device, timed in the shipped loop, and what that says of other shapes.

A round takes ``V(N, B)``, the target's pass over N nodes of B rows, and a rest: drafting, judging
and committing. V is measured by itself. The rest is that of rounds of some shapes that were
measured; between those it is taken to grow in a straight line with the depth, from plain decoding's
on, and for trees with the nodes beside the chain. Where only one end is known, the line is the
lowest that there can be: so a shape never looks worse than it is, until it is measured itself.
Rounds without a draft, which methods that look up have, run on one node and are measured apart.
"""

import dataclasses
import statistics
from collections.abc import Sequence

import numpy as np

_RARE = 0.1  # share of rounds with a draft, too small to tell what they take


@dataclasses.dataclass(frozen=True)
class RoundTime:
    """Seconds of a round in which any row has a draft, and of one in which none has."""

    with_draft: float
    without: float

    def scaled(self, factor: float) -> "RoundTime":
        """The same on a machine that takes ``factor`` times as long."""
        return RoundTime(factor * self.with_draft, factor * self.without)


@dataclasses.dataclass(eq=False)
class Costs:
    """What rounds of a family take at a batch size.

    Attributes:
      sizes: N's of which V was measured, ascending.
      passes: seconds V(N, B) of each.
      plain: seconds of a round of plain decoding.
      bare: seconds of a round of the family without a draft; plain decoding's until known.
      chains: by depth, what chains were measured to take beyond their pass.
      trees: by (depth, nodes), likewise.
    """

    sizes: Sequence[int]
    passes: Sequence[float]
    plain: float
    bare: float
    chains: dict[int, float] = dataclasses.field(default_factory=dict)
    trees: dict[tuple[int, int], list[float]] = dataclasses.field(default_factory=dict)

    def of_pass(self, size: int) -> float:
        """V(N, B); never more than for a larger N, which only a disturbance makes look cheaper."""
        least = np.minimum.accumulate(self.passes[::-1])[::-1]
        return float(np.interp(size, self.sizes, least))

    def times(self, seconds: float, drafted: float, bare: float | None, size: int) -> RoundTime:
        """What rounds of a shape take.

        Args:
          seconds: of rounds, of which the share ``drafted`` had a draft.
          drafted: as said.
          bare: of rounds without, where that was measured; None for what the passes say.
          size: N.
        """
        wider = self.of_pass(size) - self.of_pass(1)
        if bare is None:
            self.bare = seconds - drafted * wider
            return RoundTime(self.bare + wider, self.bare)
        self.bare = bare
        if drafted < _RARE:
            return RoundTime(bare + wider, bare)
        return RoundTime((seconds - (1 - drafted) * bare) / drafted, bare)

    def learn(self, depth: int, size: int, measured: RoundTime) -> None:
        """Takes in what rounds of a shape were measured to take."""
        rest = measured.with_draft - self.of_pass(size)
        if size == depth + 1:
            self.chains[depth] = rest
        else:
            self.trees.setdefault((depth, size), []).append(rest)

    def expected(self, depth: int, size: int) -> RoundTime:
        """What rounds of a shape that was not measured are taken to take."""
        return RoundTime(self.rest(depth, size) + self.of_pass(size), self.bare)

    def rescale(self, factor: float) -> None:
        """Multiplies everything, as where the machine has become slower."""
        self.passes = [factor * each for each in self.passes]
        self.plain *= factor
        self.bare *= factor
        self.chains = {depth: factor * rest for depth, rest in self.chains.items()}
        self.trees = {
            shape: [factor * rest for rest in rests] for shape, rests in self.trees.items()
        }

    def rest(self, depth: int, size: int) -> float:
        """What rounds of a shape are taken to take beyond the pass."""
        along = self._chain(depth)
        if size == depth + 1:
            return along
        beside = [
            (rest - self._chain(d)) / (n - 1 - d)
            for (d, n), rests in self.trees.items()
            for rest in rests
        ]
        return along + max(statistics.median(beside), 0.0) * (size - 1 - depth) if beside else along

    def _chain(self, depth: int) -> float:
        first = self.plain - self.of_pass(1)
        known = sorted({0: first, **self.chains}.items())
        depths, rests = (np.array(part, float) for part in zip(*known, strict=True))
        if depth <= depths[-1]:
            return float(np.interp(depth, depths, rests))
        if len(known) == 1:
            return first
        slope = (rests[-1] - rests[-2]) / (depths[-1] - depths[-2])
        return float(rests[-1] + max(slope, 0.0) * (depth - depths[-1]))

"""What rounds take on this device, timed in the shipped loop, and what that says of other shapes.

A round takes ``V(N, B)``, the target's pass over N nodes of B rows, and a rest: drafting, judging
and committing. V is measured by itself. The rest is that of rounds of some shapes that were
measured; between those it is taken to grow in a straight line with the depth, from plain decoding's
on, and for trees with the nodes beside the chain. Where only one end is known, the line is the
lowest that there can be: so a shape never looks worse than it is, until it is measured itself.
Rounds without a draft, which methods that look up have, run on one node and are measured apart.
"""

import dataclasses
import functools
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jspec import tokens, topology
from jspec.bench.timing import Contender, Sample, race
from jspec.calibration import CostTable, copied, endless
from jspec.generate import Batch, advance, start, warps_of
from jspec.plan import Plan
from jspec.tuning.requests import Workload, begun
from jspec.types import Array, History, Params, Shared, Target

_ROUNDS = 12  # of a launch
_SECONDS = 0.2  # of a sample, at least: several launches
_RARE = 0.1  # share of rounds with a draft, too small to tell what they take


Clock = Callable[[], Sample]  # times something short; ``seconds`` are those of one


@dataclasses.dataclass(frozen=True)
class RoundTime:
    """Seconds of a round in which any row has a draft, and of one in which none has."""

    with_draft: float
    without: float

    def scaled(self, factor: float) -> "RoundTime":
        """The same on a machine that takes ``factor`` times as long."""
        return RoundTime(factor * self.with_draft, factor * self.without)


class Rounds:
    """A clock: rounds of the shipped loop in the middle of the answers of a batch.

    Attributes:
      drafted: share of them in which any row has a draft.
    """

    def __init__(
        self, plan: Plan, params: Params, work: Workload, said: Sequence, shared: Shared,
        *, bare: bool = False,
    ):  # fmt: skip
        """``bare`` is for rounds whose drafts are cut off: one token of every row is left."""
        self._plan, self._params = plan, params
        self._batch = endless(plan, halfway(plan, params, work, said, shared))
        self._rounds = _ROUNDS
        if bare:
            self._batch, self._rounds = _ending(self._batch), 1
        after = self._launch()  # compiles
        begin = time.perf_counter()
        after = self._launch()
        self._launches = max(1, int(_SECONDS / (time.perf_counter() - begin)))
        count = len(after.prompt_lengths)  # without padding rows
        drafts = np.asarray(after.state.stats.drafts)[:count] / self._count(after)
        self.drafted = float(1 - np.prod(1 - drafts))

    def __call__(self) -> Sample:
        """Seconds are those of one round, without the launch that all rounds of a call share."""
        seconds, rounds, cpu = 0.0, 0, time.process_time()
        for _ in range(self._launches):
            batch = copied(self._batch)
            times = [time.perf_counter()]
            for count in (0, self._rounds):
                batch = jax.block_until_ready(advance(self._plan, self._params, batch, count))
                times.append(time.perf_counter())
            empty, full = times[1] - times[0], times[2] - times[1]
            seconds += max(full - empty, full / 4)  # an empty launch may be disturbed, too
            rounds += self._count(batch)
        return Sample(seconds / rounds, time.process_time() - cpu, [])

    def _launch(self) -> Batch:
        batch = copied(self._batch)
        return jax.block_until_ready(advance(self._plan, self._params, batch, self._rounds))

    def _count(self, after: Batch) -> int:
        return int(after.state.round - self._batch.state.round)


class Repeated:
    """A clock: something short, as often as makes a sample."""

    def __init__(self, run: Callable[[], Any]):
        self._run = run
        jax.block_until_ready(run())  # compiles
        begin = time.perf_counter()
        jax.block_until_ready(run())
        self._times = max(1, int(_SECONDS / (time.perf_counter() - begin)))

    def __call__(self) -> Sample:
        """Seconds are those of one run."""
        begin, cpu = time.perf_counter(), time.process_time()
        for _ in range(self._times):
            jax.block_until_ready(self._run())
        seconds = (time.perf_counter() - begin) / self._times
        return Sample(seconds, time.process_time() - cpu, [])


def pass_over(plan: Plan, params: Params, batch: Batch, size: int) -> Repeated:
    """A clock: the target's pass over N = ``size`` nodes a row, on the caches of a batch."""
    state = batch.state
    return Repeated(lambda: _pass(plan.target, size, params.target, state.history, state.cache))


def launch() -> Repeated:
    """A clock: a program that does nothing."""
    return Repeated(_launch)


def first_tokens(plan: Plan, params: Params, work: Workload, shared: Shared) -> Repeated:
    """A clock: taking in the prompts of the middle group, and a round that ends all rows.

    In the programs of whole answers; what a method learns of a text that ended is included.
    """
    rows = work.rows()
    some = [rows[index] for index in work.middle]

    def run() -> Batch:
        batch = start(plan, params, some, warps=warps_of(rows))
        batch = _ending(batch.replace(shared=jax.tree.map(jnp.copy, shared)))
        return advance(plan, params, batch).state

    return Repeated(run)


def timed(clocks: Sequence[Clock], repeats: int, patience: int) -> list[float]:
    """Median seconds of clocks that take turns; of undisturbed samples, if there are any."""
    field = [Contender(str(index), clock) for index, clock in enumerate(clocks)]
    race(field, repeats, patience)
    return [median_seconds(each) for each in field]


def median_seconds(contender: Contender) -> float:
    """Of undisturbed samples, if there are any."""
    return statistics.median(sample.seconds for sample in contender.kept)


def halfway(
    plan: Plan, params: Params, work: Workload, said: Sequence, shared: Shared
) -> Batch:  # fmt: skip
    """The middle group in the middle of its answers."""
    rows = work.rows([text[: len(text) // 2] for text in said])
    return begun(plan, params, [rows[index] for index in work.middle], rows, CostTable(), shared)


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
        self.trees = {shape: [factor * rest for rest in rests]
                      for shape, rests in self.trees.items()}  # fmt: skip

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


def _ending(batch: Batch) -> Batch:
    """The batch with one token left to every row: so no draft is kept."""
    request, state = batch.request, batch.state
    last = jnp.where(state.done, request.max_length, state.history.length + 1)
    return batch.replace(request=request.replace(max_length=last))


@functools.partial(jax.jit, static_argnames=("target", "size"))
def _pass(target: Target, size: int, params, history: History, cache) -> Array:
    """The target's logits of a chain of ``size`` nodes a row."""
    root = tokens.root(history)
    drafted = jnp.broadcast_to(root[:, None], (root.shape[0], size))
    tree = topology.broadcast(
        topology.from_parents(topology.chain(size - 1), size - 1), root.shape[0]
    )
    return target.forward(params, drafted, tree, cache, ()).logits


@jax.jit
def _launch() -> Array:
    return jnp.int32(0)

"""The draft length K and the verification budget of the next launch, chosen on the host.

Every K and every size of the target's pass has an expected number of tokens a second (goodput:
TurboSpec, arXiv 2406.14066). The tokens follow from running acceptance rates of the rows, the
seconds are running means of launches. A launch has the best K. In its rounds the budget takes the
best pass for the tokens that were drafted.

What was given up is tried again, for a few rounds, after a wait that doubles every time: a row
whose drafts failed, and a size of the pass that was slow.
"""

from typing import NamedTuple

import numpy as np

from jspec.core.types import Array
from jspec.engine.budget import MOST_SURE, Budget, expected
from jspec.engine.launches import Launch
from jspec.engine.plan import Plan

_PRIOR = 4.0  # tokens that the prior of a rate counts for: one draft of usual length
_MEMORY = 24.0  # tokens of a row's past that count, some six drafts, as a text changes its topic
_MEAN = 32.0  # launches that a mean of seconds covers: noise of 20 % becomes 3 %
_PAUSE = 2.0  # most times that a launch counts longer than expected: the machine may have paused
_TRIAL = 2  # rounds of a launch that tries something, as one draft may fail by chance
# Rounds before a row is tried, and launches before a size is: a trial takes 25 % to 1 % of them.
_SOONEST, _LATEST = 8, 256


class LaunchPlan(NamedTuple):
    """The K, the budget and the size of a launch."""

    plan: Plan
    budget: Budget | None = None
    rounds: int | None = None  # at most; None for any number


def launch_plans(plan: Plan, width: int) -> list[LaunchPlan]:
    """Return a plan of every program that launches of ``width`` rows may have."""
    return SpeculationController(plan, width).launch_plans if plan.lengths else [LaunchPlan(plan)]


class SpeculationController:
    """Chooses the launches of a plan with a choice of K."""

    def __init__(self, plan: Plan, num_slots: int):
        self._plan, self._plans = plan, {k: plan.at_length(k) for k in plan.lengths}
        self._passes = {k: each.passes(num_slots) for k, each in self._plans.items()}
        sizes = [(k, each.total) for k, passes in self._passes.items() for each in passes]
        self._costs, self._rows = _Costs(sizes), _Rows(num_slots)
        self._last_rounds = 0  # rounds of the last launch that was read
        self.pinned: int | None = None  # K of all launches, if set

    @property
    def by_rows(self) -> bool:
        """True if the number of unfinished rows decides, so that a launch ends with any row."""
        return bool(self._plan.batch_sizes)

    @property
    def launch_plans(self) -> list[LaunchPlan]:
        """A launch of every K."""
        return [self._verifying_all(length) for length in self._plans]

    def forget(self, slot: int) -> None:
        """Start afresh for the next sequence of a slot."""
        self._rows.forget(slot)

    def choose(self, running: np.ndarray) -> LaunchPlan:
        """Return the next launch with the ``running`` rows, bool [B]."""
        if self.pinned is not None:
            return self._verifying_all(self.pinned)
        if self.by_rows:
            return self._verifying_all(self._plan.for_rows(int(running.sum())))
        if not self._costs.is_measured.any():
            return self._verifying_all(self._plan.max_depth)
        seconds = self._costs.seconds
        best = int(np.argmax(self._expected(running) / seconds))
        length = int(self._costs.lengths[best])
        if self._costs.is_due[best] or not self._costs.is_measured[best]:
            self._costs.postpone(best)
            only = np.where(np.arange(seconds.size) == best, seconds, np.inf)
            return self._launch(length, self._rows.surely, only, _TRIAL)
        rates, retried = self._rows.rates, running & self._rows.is_due & (length > 0)
        self._rows.postpone(retried, self._last_rounds)
        return self._launch(length, rates, seconds, _TRIAL if retried.any() else None)

    def learn(self, plan: LaunchPlan, ran: Launch, rows: np.ndarray, seconds: float | None) -> None:
        """Learn from a launch that was read.

        Args:
          plan: its plan.
          ran: its results, on the host.
          rows: bool [B], rows whose sequences still run.
          seconds: the time that it took; None if it was not timed alone.
        """
        count, length = int(ran.rounds), plan.plan.max_depth
        if self.by_rows or count == 0:
            return
        for accepted, proposed, drafted in zip(
            ran.accepted[:count], ran.proposed[:count], ran.drafted[:count], strict=True
        ):
            self._rows.learn(length, accepted, proposed, drafted, rows & (accepted >= 0))
        self._costs.learn(length, ran.passed[:count], seconds)
        self._last_rounds = count

    def _verifying_all(self, length: int) -> LaunchPlan:
        """Return a launch whose passes all cost the same, so that all nodes are verified."""
        if self.by_rows:
            return LaunchPlan(self._plans[length])
        return self._launch(length, self._rows.surely, np.ones(self._costs.lengths.size))

    def _launch(
        self, length: int, rates: np.ndarray, seconds: np.ndarray, rounds: int | None = None
    ) -> LaunchPlan:
        of_length = seconds[self._costs.lengths == length]
        budget = Budget(rates.astype(np.float32), of_length.astype(np.float32))
        return LaunchPlan(self._plans[length], budget, rounds)

    def _expected(self, running: np.ndarray) -> np.ndarray:
        """Return the tokens that a round of each size is expected to emit, [n]."""
        emitted, count = [], running.sum()
        for length, passes in self._passes.items():
            survival = np.where(running, self._rows.rates, 0)[:, None] ** np.arange(length + 1)
            survival[:, 0] = 0
            # A row proposes a share of its K tokens, as a lookup may find nothing.
            proposed = (self._rows.shares @ survival).cumsum()
            most = np.array([proposed[min(each.nodes, length + 1) - 1] for each in passes])
            emitted.append(np.minimum(expected(passes, survival, count), count + most))
        return np.concatenate(emitted)


class _Costs:
    """Running means of the seconds of a round, for each of n pairs (K, nodes of the pass)."""

    def __init__(self, sizes: list[tuple[int, int]]):
        self.lengths, self._nodes = np.array(sizes).T
        self._means, self._counts = np.zeros(len(sizes)), np.zeros(len(sizes))  # seconds, launches
        self._ages = np.full(len(sizes), _SOONEST)  # launches since the last measurement or trial
        self._waits = np.full(len(sizes), _SOONEST)  # launches before the next trial
        self._compiled: set[int] = set()  # K's that were launched

    @property
    def is_measured(self) -> np.ndarray:
        """Bool [n]: sizes with a mean."""
        return self._counts > 0

    @property
    def is_due(self) -> np.ndarray:
        """Bool [n]: sizes whose next trial may come."""
        return self._ages >= self._waits

    @property
    def seconds(self) -> np.ndarray:
        """The seconds of a round, [n]; a low estimate for sizes that are due or not measured.

        It is interpolated between the other means of no larger K, and 0 for 0 nodes.
        """
        fresh, low = self.is_measured & ~self.is_due, np.zeros(self._means.size)
        for size, (length, nodes) in enumerate(zip(self.lengths, self._nodes, strict=True)):
            near = np.flatnonzero(fresh & (self.lengths <= length))
            near = near[np.argsort(self._nodes[near], kind="stable")]
            low[size] = np.interp(nodes, [0, *self._nodes[near]], [1e-9, *self._means[near]])
        return np.where(fresh, self._means, low)

    def postpone(self, size: int) -> None:
        """Double the wait before the next trial of a size."""
        self._ages[size] = 0
        if self.is_measured[size]:
            self._waits[size] = min(2 * self._waits[size], _LATEST)

    def learn(self, length: int, passed: np.ndarray, seconds: float | None) -> None:
        """Add a launch, whose rounds ``passed`` so many nodes; the first of each K compiled."""
        self._ages += 1
        is_first = length not in self._compiled
        self._compiled.add(length)
        if is_first or seconds is None:
            return
        rounds = np.where(self.lengths == length, (self._nodes == passed[:, None]).sum(0), 0)
        ran, shares = rounds > 0, rounds / rounds.sum()
        estimates = np.where(self.is_measured, self._means, self.seconds)
        ratio = seconds / (rounds @ estimates)
        is_paused = ratio > _PAUSE and self.is_measured[ran].all()
        if ratio < 1 / _PAUSE:
            self._counts[ran] = 0  # Launches that were paused count no more.
        self._counts = np.minimum(self._counts + shares, _MEAN)
        steps = shares[ran] / (_MEAN if is_paused else self._counts[ran])
        ratio = _PAUSE if is_paused else ratio
        self._means[ran] = estimates[ran] * (1 + steps * (ratio - 1))
        self._ages[ran] = 0


class _Rows:
    """Running acceptance rates of the drafts of B rows."""

    def __init__(self, size: int):
        # Sums over the past of all rows: accepted and tried tokens, proposed shares and rounds.
        self._total = np.full((4, 1), _PRIOR)
        self._sums = np.repeat(self._total, size, 1)  # the same of each row
        self._idle = np.zeros(size, int)  # rounds since a draft of the row was verified
        self._waits = np.full(size, _SOONEST)  # rounds before its next trial
        self.surely = np.full(size, MOST_SURE)  # rates that verify all nodes

    def forget(self, row: int) -> None:
        """Take the mean of all rows as the prior of a new sequence; the wait of its slot stays."""
        self._sums[:, row] = _faded(self._total, _PRIOR)[:, 0]

    @property
    def is_due(self) -> np.ndarray:
        """Bool [B]: rows whose next trial may come."""
        return self._idle >= self._waits

    @property
    def rates(self) -> np.ndarray:
        """Probabilities that a drafted token is accepted, [B]; high ones for a trial."""
        rates = np.minimum(self._sums[0] / self._sums[1], MOST_SURE)
        return np.where(self.is_due, MOST_SURE, rates)

    @property
    def shares(self) -> np.ndarray:
        """Shares of K tokens that rows propose, [B]."""
        return np.where(self.is_due, 1, self._sums[2] / self._sums[3])

    def postpone(self, rows: np.ndarray, in_flight: int) -> None:
        """Double the wait before the next trial of ``rows``, bool [B], and let it count anew.

        The rounds ``in_flight``, which began before this trial, are still to be read.
        """
        self._idle[rows] = -in_flight
        self._waits[rows] = np.minimum(2 * self._waits[rows], _LATEST)

    def learn(
        self, length: int, accepted: Array, proposed: Array, drafted: Array, ran: Array
    ) -> None:
        """Add a round of the rows that ``ran``, bool [B]."""
        tries, rests = ran & (drafted > 0), ran & ((length == 0) | (proposed > drafted))
        self._waits[tries & (accepted == drafted)] = _SOONEST
        self._idle = np.where(tries, 0, self._idle + rests)
        fresh = np.zeros_like(self._sums)
        fresh[:2] = np.where(tries, (accepted, accepted + (accepted < drafted)), 0)
        if length:
            fresh[2:] = np.where(ran, (proposed / length, np.ones(ran.size)), 0)
        self._sums = _faded(self._sums + fresh, _MEMORY)
        self._total = _faded(self._total + fresh.sum(1, keepdims=True), _MEMORY * ran.size)


def _faded(sums: np.ndarray, most: float) -> np.ndarray:
    """Scale sums of accepted, tried, proposed and rounds to ``most`` tokens and rounds."""
    return sums * np.repeat(np.minimum(1, most / sums[1::2]), 2, 0)

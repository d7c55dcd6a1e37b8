"""The length of drafts and the verification budget of the next launch, chosen on the host.

A row proposes a share of the tokens that it could, as a lookup may find nothing, and its drafts
succeed at a running rate of acceptance. With both, and with the costs learned so far, every length
and every pass has an expected number of tokens a second (goodput: TurboSpec, arXiv 2406.14066). The
next launch takes the best length; in its rounds the budget takes the best pass of what was really
drafted. Now and then a launch of a few rounds tries what may be better than it is believed to be. A
row that drafts nothing is retried after some rounds, more if drafts are slow, and after twice as
many whenever a retry fails.
"""

from typing import Any, NamedTuple

import numpy as np

from jspec.engine.budget import MOST_SURE, Budget, expected
from jspec.engine.costs import Costs
from jspec.engine.launches import Launch
from jspec.engine.plan import Plan

_PRIOR, _FIRST = 0.6, 4.0  # acceptance rate before any draft, and the tried tokens it counts for
_EVIDENCE, _MEMORY = 24.0, 400.0  # most tried tokens that the past of a row, and of all, counts for
_HOPE = 0.9  # acceptance rate that a retry hopes for
_DOUBT = 0.5  # standard errors that a rate is believed above the observed one
_FADING = 0.95  # weight of the past after a round without a draft, as a text changes
_FAINT = 0.1  # tried tokens below which the past fades no further
_SOONEST, _PATIENCE, _LATEST = 4, 32, 256  # rounds without a draft before a retry; of a new row
_LOYALTY = 1.03  # ratio by which another length must be better
_UNSURE = 0.1  # relative doubt from which a cost may be tried
_TRIALS, _TRIAL_ROUNDS = 4, 4  # of a kind until costs are settled, and rounds of such a launch
_RETRY_ROUNDS = 2  # of a launch that retries rows
_RETRY_SHARE = 0.03  # of the time that the first retry of a row may take
_SETTLED = 256  # launches after which kinds may be tried again
_NEVER = np.float32(1e9)  # seconds


class Pace(NamedTuple):
    """The draft length, the budget and the size of a launch."""

    plan: Plan
    budget: Budget | None = None
    rounds: int | None = None  # at most; None for any number


class Pacing:
    """Chooses the pace of an engine's launches for a plan with a choice of K."""

    def __init__(self, plan: Plan, num_slots: int):
        self._plan, lengths = plan, plan.lengths
        self._plans = {length: plan.at_length(length) for length in lengths}
        self._passes = {length: each.passes(num_slots) for length, each in self._plans.items()}
        kinds = [(length, each.total) for length in lengths for each in self._passes[length]]
        self.costs = Costs(kinds)
        self._known = _Experience(num_slots)
        self._length = lengths[-1]  # of the last launch
        self.pinned: int | None = None  # length of all launches, if one is
        self._trials, self._num_launches = np.zeros(len(kinds), int), 0
        self._warm = np.zeros(len(kinds), bool)  # kinds that ran: the first time is slow
        self._even = np.ones(len(kinds))  # costs before any are known: all nodes are verified

    @property
    def by_rows(self) -> bool:
        """True if the number of unfinished rows decides, so that a launch ends with any row."""
        return bool(self._plan.batch_sizes)

    def forget(self, slot: int) -> None:
        """Start afresh for the next sequence of a slot."""
        self._known.forget(slot)

    def choose(self, running: np.ndarray) -> Pace:
        """Return the pace of a launch with the ``running`` rows, bool [B]."""
        if self.pinned is not None:
            return self._even_pace(self.pinned)
        if self.by_rows:
            return Pace(self._plans[self._plan.for_rows(int(running.sum()))])
        if not self.costs.is_known:
            return self._even_pace(self._length)
        rates = self._known.rates()
        emitted = self._expected(rates, running)
        trial = self._trial(emitted)
        if trial is not None:
            self._trials[trial] += 1
            length = self.costs.kinds[trial][0]
            only = np.full(len(emitted), _NEVER)
            only[trial] = 1
            surely = np.full_like(rates, MOST_SURE)
            return Pace(self._plans[length], self._budget(length, surely, only), _TRIAL_ROUNDS)
        seconds = self.costs.seconds
        self._known.first_patience = self._first_patience(seconds)
        goodput = emitted / seconds
        loyal = np.array([length == self._length for length, _ in self.costs.kinds])
        best = int(np.argmax(goodput * np.where(loyal, _LOYALTY, 1)))
        self._length = self.costs.kinds[best][0]
        budget = self._budget(self._length, rates, seconds)
        due = running & self._known.is_due
        if not self._length or not due.any():
            return Pace(self._plans[self._length], budget)
        self._known.retry(due)
        return Pace(self._plans[self._length], budget, _RETRY_ROUNDS)

    @property
    def paces(self) -> list[Pace]:
        """A pace of every length."""
        return [self._even_pace(length) for length in self._plans]

    def _even_pace(self, length: int) -> Pace:
        """Return a pace whose budget verifies all nodes; without one if rows decide."""
        budget = None if self.by_rows else self._budget(length, self._known.rates(), self._even)
        return Pace(self._plans[length], budget)

    def learn(self, pace: Pace, ran: Launch, rows: np.ndarray, seconds: float | None) -> None:
        """Learn from a launch that was read.

        Args:
          pace: that it had.
          ran: its results, on the host.
          rows: bool [B], rows whose sequences still run.
          seconds: that it took; None if this is not known.
        """
        count = int(ran.rounds)
        length, rounds = pace.plan.max_depth, np.zeros(len(self.costs.kinds), int)
        of_rounds = ran.accepted[:count], ran.proposed[:count], ran.drafted[:count]
        for accepted, proposed, drafted in zip(*of_rounds, strict=True):
            ran_rows = rows & (accepted >= 0)
            self._known.learn(accepted, drafted, ran_rows)
            if length:
                self._known.learn_share(proposed / length, ran_rows)
        self._num_launches += 1
        if count == 0 or self.by_rows:
            return
        for total in ran.passed[:count]:
            rounds[self.costs.kinds.index((length, int(total)))] += 1
        is_timed = seconds is not None and self._warm[rounds > 0].all()
        is_surprise = is_timed and self.costs.learn(rounds, seconds)
        if is_surprise or self._num_launches % _SETTLED == 0:
            self._trials[:] = 0
        self._warm |= rounds > 0

    def _expected(self, rates: np.ndarray, running: np.ndarray) -> np.ndarray:
        """Return the tokens that a round of each kind is expected to emit, [n]."""
        emitted, count = [], running.sum()
        for length, passes in self._passes.items():
            survival = np.where(running[:, None], rates[:, None] ** np.arange(length + 1), 0)
            survival[:, 0] = 0
            proposed = (self._known.shares()[:, None] * survival).sum(0).cumsum()
            most = np.array([proposed[min(each.nodes, length + 1) - 1] for each in passes])
            emitted.append(np.minimum(expected(passes, survival, count), count + most))
        return np.concatenate(emitted)

    def _first_patience(self, seconds: np.ndarray) -> int:
        """Return after how many rounds a new row is retried, by what the fastest drafts add."""
        drafts = np.array([length > 0 for length, _ in self.costs.kinds])
        if drafts.all():
            return _PATIENCE
        added = seconds[drafts].min() / seconds[~drafts].min() - 1
        return int(np.clip(_RETRY_ROUNDS * added / _RETRY_SHARE, _PATIENCE, _LATEST))

    def _trial(self, emitted: np.ndarray) -> int | None:
        """Return the kind that is worth a trial; None if there is none."""
        seconds, hopeful = self.costs.seconds, self.costs.hopeful
        is_worth = (self.costs.doubt > _UNSURE * seconds) & (self._trials < _TRIALS)
        hoped = np.where(is_worth, emitted / hopeful, 0)
        best = int(np.argmax(hoped))
        return best if hoped[best] > _LOYALTY * (emitted / seconds).max() else None

    def _budget(self, length: int, rates: np.ndarray, seconds: np.ndarray) -> Budget:
        of_length = np.array([each == length for each, _ in self.costs.kinds])
        return Budget(rates.astype(np.float32), seconds[of_length].astype(np.float32))


class _Experience:
    """The success of each row's drafts, all [B], and of all rows together."""

    def __init__(self, size: int):
        self._all = _PRIOR * _FIRST, _FIRST  # fading sums of accepted and of tried tokens
        self._accepted, self._tried = np.zeros(size), np.zeros(size)  # the same of each row
        self._shares_of_all = _FIRST, _FIRST  # fading sums of proposed shares, and of rounds
        self._shares, self._rounds = np.zeros(size), np.zeros(size)  # the same of each row
        self._idle, self._patience = np.zeros(size, int), np.zeros(size, int)
        self.first_patience = _PATIENCE  # rounds without a draft before the first retry
        for row in range(size):
            self.forget(row)

    def forget(self, row: int) -> None:
        """Believe of a new row what all rows showed."""
        self._accepted[row], self._tried[row] = self._all[0] / self._all[1] * _FIRST, _FIRST
        share = self._shares_of_all[0] / self._shares_of_all[1]
        self._shares[row], self._rounds[row] = share * _FIRST, _FIRST
        self._idle[row] = 0  # rounds since the last draft
        self._patience[row] = self.first_patience  # the same before the next one

    @property
    def is_due(self) -> np.ndarray:
        """Bool [B]: rows to retry."""
        return self._idle >= self._patience

    def retry(self, rows: np.ndarray) -> None:
        """Wait again: the next launch tries ``rows``, bool [B], if they have a draft."""
        self._idle[rows] = 1

    def rates(self) -> np.ndarray:
        """Return the acceptance rates, with the benefit of the doubt; of rows to retry, a hope."""
        rate = self._accepted / self._tried
        doubt = _DOUBT * np.sqrt(rate * (1 - rate) / self._tried)
        rate = np.where(self._idle > 0, rate, rate + doubt)
        return np.minimum(np.where(self.is_due, np.maximum(rate, _HOPE), rate), MOST_SURE)

    def shares(self) -> np.ndarray:
        """Return the shares of the tokens that rows propose; of rows to retry, a hope."""
        return np.where(self.is_due, 1, self._shares / self._rounds)

    def learn_share(self, share: np.ndarray, ran: np.ndarray) -> None:
        """Add the proposed ``share``, [B], of a round of the rows that ``ran``, bool [B]."""
        fresh = np.where(ran, share, 0)
        fresh_of_all = self._shares_of_all[0] + fresh.sum(), self._shares_of_all[1] + ran.sum()
        self._shares_of_all = _faded(*fresh_of_all, _MEMORY)
        self._shares, self._rounds = _faded(self._shares + fresh, self._rounds + ran, _EVIDENCE)

    def learn(self, accepted: np.ndarray, drafted: np.ndarray, ran: np.ndarray) -> None:
        """Add a round of the rows that ``ran``, bool [B].

        If the retry of a paused row is rejected entirely, the row's patience doubles. If it is
        accepted entirely, its patience is reset.
        """
        tries, rests = ran & (drafted > 0), ran & (drafted == 0)
        fresh = np.where(tries, accepted, 0), np.where(tries, accepted + (accepted < drafted), 0)
        self._all = _faded(self._all[0] + fresh[0].sum(), self._all[1] + fresh[1].sum(), _MEMORY)
        is_retry = tries & (self._idle > 0)
        longer = np.minimum(2 * self._patience, _LATEST)
        self._patience = np.where(is_retry & (accepted == 0), longer, self._patience)
        self._patience = np.where(is_retry & (accepted == drafted), _SOONEST, self._patience)
        keep = np.where(rests & (self._tried > _FAINT), _FADING, 1)
        sums = keep * self._accepted + fresh[0], keep * self._tried + fresh[1]
        self._accepted, self._tried = _faded(*sums, _EVIDENCE)
        self._idle = np.where(tries, 0, self._idle + rests)


def _faded(accepted: Any, tried: Any, most: float) -> tuple[Any, Any]:
    """Scale the sums so that at most ``most`` tokens were tried."""
    weight = np.minimum(1, most / tried)
    return weight * accepted, weight * tried

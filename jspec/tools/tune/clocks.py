"""What times something short on this device, in turns with others.

A launch takes a while to get going, milliseconds on some machines, once it has anything to do; one
of nothing does not show that. So rounds and passes are timed in launches of one and of many, by
what the many take beyond the one.
"""

import functools
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jspec.core import trees
from jspec.core.history import root_token
from jspec.core.types import Array, History, Params, Shared, Target
from jspec.engine.batch import Batch, advance, filters_of, start
from jspec.engine.costs import CostTable, copied, endless
from jspec.engine.plan import Plan
from jspec.tools.bench.timing import Contender, Sample, race
from jspec.tools.tune.requests import Workload, begun

_MORE = 12  # repetitions in a launch of many than in one of one
_SECONDS = 0.2  # of a sample, at least: several launches

Clock = Callable[[], Sample]  # times something short; ``seconds`` are those of one
Launch = Callable[[], tuple[float, int]]  # its seconds, and the repetitions in it


class Rounds:
    """A clock: rounds of the shipped loop in the middle of the answers of a batch.

    Attributes:
      drafted: share of them in which any row has a draft.
    """

    def __init__(
        self,
        plan: Plan,
        params: Params,
        work: Workload,
        said: Sequence,
        shared: Shared,
        *,
        bare: bool = False,
    ):
        """``bare`` is for rounds whose drafts are cut off: one token of every row is left."""
        self._plan, self._params = plan, params
        self._batch = endless(plan, halfway(plan, params, work, said, shared))
        self._launches = [self._launch(self._batch, 1), self._launch(self._batch, 1 + _MORE)]
        if bare:
            self._launches.append(self._launch(_ending(self._batch), 1))
        self._times = _times(self._launches)
        after = self._advanced(copied(self._batch), 1 + _MORE)
        count = len(after.prompt_lengths)  # without padding rows
        drafts = np.asarray(after.state.stats.drafts)[:count] / self._count(after)
        self.drafted = float(1 - np.prod(1 - drafts))

    def __call__(self) -> Sample:
        """Seconds are those of one round, without the launch that all rounds of a call share."""
        cpu = time.process_time()
        one, many, *bare = _added(self._launches, self._times)
        seconds = beyond(one, many)
        if bare:
            [(alone, rounds)] = bare
            seconds = max(seconds + (alone - one[0]) / rounds, alone / rounds / 4)
        return Sample(seconds, time.process_time() - cpu, [])

    def _launch(self, batch: Batch, rounds: int) -> Launch:
        def launch() -> tuple[float, int]:
            one, begin = copied(batch), time.perf_counter()
            after = self._advanced(one, rounds)
            return time.perf_counter() - begin, self._count(after)

        return launch

    def _advanced(self, batch: Batch, rounds: int) -> Batch:
        return jax.block_until_ready(advance(self._plan, self._params, batch, rounds))

    def _count(self, after: Batch) -> int:
        return int(after.state.round - self._batch.state.round)


class TargetPasses:
    """A clock: the target's pass over N = ``size`` nodes a row, on the caches of a batch."""

    def __init__(self, plan: Plan, params: Params, batch: Batch, size: int):
        self._target, self._params, self._state = plan.target, params.target, batch.state
        self._size = size
        self._launches = [self._launch(1), self._launch(1 + _MORE)]
        self._times = _times(self._launches)

    def __call__(self) -> Sample:
        """Seconds are those of one pass, without the launch that all passes of a call share."""
        cpu = time.process_time()
        seconds = beyond(*_added(self._launches, self._times))
        return Sample(seconds, time.process_time() - cpu, [])

    def _launch(self, count: int) -> Launch:
        def launch() -> tuple[float, int]:
            begin, state = time.perf_counter(), self._state
            jax.block_until_ready(
                _passes(self._target, self._size, self._params, state.history, state.cache, count)
            )
            return time.perf_counter() - begin, count

        return launch


class Repeated:
    """A clock: something short, as often as makes a sample."""

    def __init__(self, run: Callable[[], Any]):
        self._run = run
        self._times = _times([self._launch])

    def __call__(self) -> Sample:
        """Seconds are those of one run."""
        cpu = time.process_time()
        [(seconds, runs)] = _added([self._launch], self._times)
        return Sample(seconds / runs, time.process_time() - cpu, [])

    def _launch(self) -> tuple[float, int]:
        begin = time.perf_counter()
        jax.block_until_ready(self._run())
        return time.perf_counter() - begin, 1


def first_tokens(plan: Plan, params: Params, work: Workload, shared: Shared) -> Repeated:
    """A clock: taking in the prompts of the middle group, and a round that ends all rows.

    In the programs of whole answers; what a method learns of a text that ended is included.
    """
    rows = work.rows()
    some = [rows[index] for index in work.middle]

    def run() -> Batch:
        batch = start(plan, params, some, filters=filters_of(rows))
        batch = _ending(batch.replace(shared=jax.tree.map(jnp.copy, shared)))
        return advance(plan, params, batch).state

    return Repeated(run)


def beyond(one: tuple[float, int], many: tuple[float, int]) -> float:
    """Seconds of a repetition: what launches of many took beyond launches of one.

    Args:
      one: their seconds and repetitions, added up; a launch of one may be disturbed, too.
      many: likewise of as many launches; where the first repetition ended everything, no more.
    """
    (less, few), (more, most) = one, many
    if most == few:
        return more / most
    return max(more - less, more / 4) / (most - few)


def timed(clocks: Sequence[Clock], repeats: int, patience: int) -> list[float]:
    """Median seconds of clocks that take turns; of undisturbed samples, if there are any."""
    field = [Contender(str(index), clock) for index, clock in enumerate(clocks)]
    race(field, repeats, patience)
    return [median_seconds(each) for each in field]


def median_seconds(contender: Contender) -> float:
    """Of undisturbed samples, if there are any."""
    return statistics.median(sample.seconds for sample in contender.kept)


def halfway(plan: Plan, params: Params, work: Workload, said: Sequence, shared: Shared) -> Batch:
    """The middle group in the middle of its answers."""
    rows = work.rows([text[: len(text) // 2] for text in said])
    return begun(plan, params, [rows[index] for index in work.middle], rows, CostTable(), shared)


def _times(launches: Sequence[Launch]) -> int:
    """How often they make a sample; compiles them."""
    for launch in launches:
        launch()
    return max(1, int(_SECONDS / sum(launch()[0] for launch in launches)))


def _added(launches: Sequence[Launch], times: int) -> list[tuple[float, int]]:
    """Seconds and repetitions of each, run in turns so many times."""
    ran = [[launch() for launch in launches] for _ in range(times)]
    return [tuple(map(sum, zip(*own, strict=True))) for own in zip(*ran, strict=True)]


def _ending(batch: Batch) -> Batch:
    """The batch with one token left to every row: so no draft is kept."""
    request, state = batch.request, batch.state
    last = jnp.where(state.done, request.max_length, state.history.length + 1)
    return batch.replace(request=request.replace(max_length=last))


@functools.partial(jax.jit, static_argnames=("target", "size"))
def _passes(target: Target, size: int, params, history: History, cache, count: int) -> Array:
    """Likeliest tokens behind chains of N = ``size`` nodes a row, int32 [B, N], ``count`` times.

    Each pass reads what the one before said, or XLA would run one for all.
    """
    root = root_token(history)
    tree = trees.broadcast(trees.from_parents(trees.chain(size - 1), size - 1), root.shape[0])

    def again(_, drafted: Array) -> Array:
        logits = target.forward(params, drafted, tree, cache, ()).logits
        return jnp.argmax(logits, -1).astype(drafted.dtype)

    drafted = jnp.broadcast_to(root[:, None], (root.shape[0], size))
    return jax.lax.fori_loop(0, count, again, drafted)

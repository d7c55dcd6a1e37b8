"""Clocks of short device programs, which take turns.

Starting a launch takes up to milliseconds. Rounds and passes are thus timed by the difference
between a launch of many repetitions and a launch of one.
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
from jspec.engine.functional import Batch, advance, copied, start
from jspec.engine.plan import Plan
from jspec.engine.profile import Profile
from jspec.tools.bench.timing import Contender, Sample, race
from jspec.tools.tune.settings import Settings
from jspec.tools.tune.workload import Workload
from jspec.util.promotion import standard_promotion

_MANY = 13  # repetitions in the longer launch
_SECONDS = 0.2  # of a sample, at least

# Runs so many repetitions; returns the seconds, and the repetitions that there were.
Launch = Callable[[int], tuple[float, int]]


class Clock:
    """Times one repetition of a launch; calling it returns a sample."""

    def __init__(self, launch: Launch, many: int = _MANY):
        self._launch, self._many = launch, many
        self._repeats = 1
        self._run()  # compiles
        self._repeats = max(1, int(_SECONDS / self._run()[:, 0].sum()))

    def __call__(self) -> Sample:
        """Return a sample whose seconds are those of one repetition."""
        cpu = time.process_time()
        return Sample(beyond(*self._run().tolist()), time.process_time() - cpu, [])

    def _run(self) -> np.ndarray:
        """Return the seconds and repetitions of the short, and of the long launches, [2, 2]."""
        pairs = [(self._launch(1), self._launch(self._many)) for _ in range(self._repeats)]
        return np.sum(pairs, 0)


def beyond(short: tuple[float, int], long: tuple[float, int]) -> float:
    """Return the seconds of a repetition from the totals of short and of long launches.

    If the long launches have no more repetitions, the whole launch counts. A disturbed short launch
    must not make a repetition free: a quarter of the long launches counts at least.
    """
    (less, few), (more, many) = short, long
    return more / many if many == few else max(more - less, more / 4) / (many - few)


def rounds(
    plan: Plan, params: Params, work: Workload, texts: Sequence, shared: Shared
) -> tuple[Clock, float]:
    """Return a clock of the loop's rounds in the middle of the answers ``texts``.

    The second value is the share of these rounds in which any row has a draft.
    """
    batch = _endless(plan, work.batch(plan, params, texts, shared))

    def run(count: int) -> tuple[float, int, Batch]:
        fresh = copied(batch)
        seconds, after = _seconds(lambda: advance(plan, params, fresh, count))
        return seconds, int(after.state.round - batch.state.round), after

    clock, (_, ran, after) = Clock(lambda count: run(count)[:2]), run(_MANY)
    drafts = np.array([answer.drafts for answer in after.answers]) / ran
    return clock, float(1 - np.prod(1 - drafts))


def _endless(plan: Plan, batch: Batch) -> Batch:
    """Return the batch without stop tokens, limited by its buffers alone."""
    request = batch.request
    room = batch.state.history.tokens.shape[1] - plan.drafter.max_depth - 1
    limit = jnp.where(batch.state.done, request.max_length, room)
    stops = jnp.full_like(request.stop_tokens, -1)
    return batch.replace(request=request.replace(max_length=limit, stop_tokens=stops))


def passes(plan: Plan, params: Params, batch: Batch, size: int) -> Clock:
    """Return a clock of the target's pass over ``size`` nodes a row, on the caches of a batch."""
    history, cache = batch.state.history, batch.state.cache
    run = lambda count: _passes(plan.target, size, params, history, cache, count)
    return Clock(lambda count: (_seconds(lambda: run(count))[0], count))


def prefill(plan: Plan, params: Params, work: Workload) -> Clock:
    """Return a clock of prefilling the middle group, in the programs of whole answers."""
    rows = work.rows()
    group, profile = [rows[index] for index in work.middle], Profile().grown(rows)
    return whole(lambda: start(plan, params, group, profile=profile).state)


def whole(run: Callable[[], Any]) -> Clock:
    """Return a clock of ``run``, launch included."""
    return Clock(lambda _: (_seconds(run)[0], 1), many=1)


def _seconds(run: Callable[[], Any]) -> tuple[float, Any]:
    begin = time.perf_counter()
    result = jax.block_until_ready(run())
    return time.perf_counter() - begin, result


def timed(clocks: Sequence[Clock], settings: Settings) -> list[float]:
    """Return the median seconds of clocks that take turns, of undisturbed samples if any."""
    field = [Contender(str(index), clock) for index, clock in enumerate(clocks)]
    race(field, settings.repeats, settings.patience)
    return [statistics.median(sample.seconds for sample in each.usable) for each in field]


@functools.partial(jax.jit, static_argnames=("target", "size"))
@standard_promotion
def _passes(target: Target, size: int, params, history: History, cache, count: int) -> Array:
    """Run ``count`` passes over chains of N = ``size`` nodes; return int32 [B, N].

    Each pass reads the tokens of the one before, or XLA would run one for all.
    """
    root = root_token(history)
    tree = trees.chain_tree(root.shape[0], size)

    def again(_, drafted: Array) -> Array:
        logits = target.forward(params, drafted, tree, cache, ()).logits
        return jnp.argmax(logits, -1).astype(drafted.dtype)

    drafted = jnp.broadcast_to(root[:, None], (root.shape[0], size))
    return jax.lax.fori_loop(0, count, again, drafted)

"""Measured seconds of a round for each draft length, in the program that will run it."""

import time

import jax
import jax.numpy as jnp
import numpy as np

from jspec.core.types import Params, Shared
from jspec.drafters.adaptive.drafter import Adaptive, Costs
from jspec.engine.batch import Batch, Price, advance, with_prompts
from jspec.engine.plan import Plan

_LAUNCH_SECONDS, _MIN_ROUNDS = 0.1, 4  # of a timed launch
_MIN_TURNS, _MAX_TURNS, _SECONDS = 3, 24, 3.5  # timed turns over all lengths
_NEVER = np.float32(1e30)  # seconds
_MIN_EXTENSION, _MAX_EXTENSION = 64, 512  # tokens added to prompts; fewer are not worth a prefill


class CostTable:
    """Costs per batch shape, each measured at its first use."""

    def __init__(self):
        self._seconds: dict[tuple[int, ...], np.ndarray] = {}

    def pricing(self, plan: Plan) -> Price | None:
        """Return ``price`` if the plan's drafter chooses by costs, else None."""
        return self.price if _chooses_by_costs(plan) else None

    def price(self, plan: Plan, params: Params, batch: Batch) -> Shared:
        """Return ``batch.shared``, with measured costs if the drafter chooses by costs."""
        if not _chooses_by_costs(plan):
            return batch.shared
        shape = batch.state.history.tokens.shape
        if shape not in self._seconds:
            self._seconds[shape] = np.asarray(calibrate(plan, params, batch).seconds)
        return batch.shared.replace(seconds=self._seconds[shape])


def _chooses_by_costs(plan: Plan) -> bool:
    return isinstance(plan.drafter, Adaptive) and plan.drafter.by_costs


def calibrate(plan: Plan, params: Params, batch: Batch) -> Costs:
    """Return ``batch.shared`` with the measured seconds of a round of each draft length.

    Rounds of each length run on copies of the batch, in the program that decodes it. All lengths
    take about the same time: a launch has a fixed cost, which would favour longer drafts at equal
    numbers of rounds. The copies are half way through their texts, since every drafted token reads
    the whole text. Stop tokens and length limits are removed, because final drafts are short;
    lookup drafters are timed as if they always match.

    Only ratios of costs matter, and the speed of a machine varies. So the lengths take turns, and
    a length costs its median ratio to the first length of the same turn.
    """
    count = len(plan.drafter.lengths)
    timed = endless(plan, halfway(plan, params, batch))
    only = [np.where(np.arange(count) == index, 1, _NEVER) for index in range(count)]
    shared = [timed.shared.replace(seconds=costs, timed=jnp.array(True)) for costs in only]
    batches = [timed.replace(shared=each) for each in shared]
    rounds = [_MIN_ROUNDS] * count

    def turn() -> np.ndarray:
        pairs = zip(batches, rounds, strict=True)
        return np.array([_seconds_per_round(plan, params, *pair) for pair in pairs])

    for _ in range(3):  # the first turn compiles, the second is a rough estimate
        rounds = np.maximum(_MIN_ROUNDS, _LAUNCH_SECONDS / turn()).astype(int).tolist()
    turns, begin = [], time.perf_counter()
    while len(turns) < _MIN_TURNS or (
        len(turns) < _MAX_TURNS and time.perf_counter() - begin < _SECONDS
    ):
        turns.append(turn())
    seconds = np.array(turns)
    costs = np.median(seconds[:, 0]) * np.median(seconds / seconds[:, :1], 0)
    costs = np.maximum.accumulate(costs)  # a length that looks cheaper than a shorter one is noise
    return batch.shared.replace(seconds=jnp.asarray(costs, jnp.float32))


def _seconds_per_round(plan: Plan, params: Params, batch: Batch, rounds: int) -> float:
    """Time one launch; ``_NEVER`` if no round fits."""
    copy, begin = copied(batch), time.perf_counter()
    copy = jax.block_until_ready(advance(plan, params, copy, rounds))
    seconds, ran = time.perf_counter() - begin, int(copy.state.round - batch.state.round)
    return seconds / ran if ran else _NEVER


def halfway(plan: Plan, params: Params, batch: Batch) -> Batch:
    """Return the batch with prompts repeated to half of their longest texts.

    A few hundred tokens are enough. A batch of short texts is returned as it is.
    """
    state = batch.state
    history, done, limit = jax.device_get((state.history, state.done, batch.request.max_length))
    lengths, tokens = history.length, history.tokens
    added = np.where(done, 0, np.minimum((limit - lengths) // 2, _MAX_EXTENSION)).astype(np.int32)
    if added.max() < _MIN_EXTENSION:
        return batch
    repeated = np.arange(tokens.shape[1]) % lengths[:, None]
    prompts = np.take_along_axis(tokens, repeated, 1)
    return with_prompts(plan, params, batch, prompts, lengths + added)


def endless(plan: Plan, batch: Batch) -> Batch:
    """Return the batch without stop tokens, limited by its buffers alone."""
    request = batch.request
    room = batch.state.history.tokens.shape[1] - plan.drafter.max_depth - 1
    limit = jnp.where(batch.state.done, request.max_length, room)
    stops = jnp.full_like(request.stop_tokens, -1)
    return batch.replace(request=request.replace(max_length=limit, stop_tokens=stops))


def copied(batch: Batch) -> Batch:
    """Return a copy that may be consumed."""
    state, shared = jax.tree.map(jnp.copy, (batch.state, batch.shared))
    return jax.block_until_ready(batch.replace(state=state, shared=shared))

"""What rounds of each length take on this machine, measured in the program that will run them."""

import time

import jax
import jax.numpy as jnp
import numpy as np

from jspec.core.types import Params, Shared
from jspec.drafters.adaptive.drafter import Adaptive, Costs
from jspec.engine.batch import Batch, advance, elsewhere
from jspec.engine.plan import Plan

_LAUNCH, _FEW = 0.1, 4  # seconds of a launch, and its rounds at least
_LEAST, _MOST, _SECONDS = 3, 24, 3.5  # turns at least and at most, and when there are enough
_NEVER = np.float32(1e30)  # seconds
_NEAR, _FURTHEST = 64, 512  # tokens before the middle of a text: not worth a prefill, and enough


class CostTable:
    """Costs of every shape of batch that has come by, each measured when it first did."""

    def __init__(self):
        self._seconds: dict[tuple[int, ...], np.ndarray] = {}

    def price(self, plan: Plan, params: Params, batch: Batch) -> Shared:
        """``batch.shared``, with the costs of such batches where the plan chooses by costs."""
        if not (isinstance(plan.drafter, Adaptive) and plan.drafter.by_costs):
            return batch.shared
        shape = batch.state.history.tokens.shape
        if shape not in self._seconds:
            self._seconds[shape] = np.asarray(calibrate(plan, params, batch).seconds)
        return batch.shared.replace(seconds=self._seconds[shape])


def calibrate(plan: Plan, params: Params, batch: Batch) -> Costs:
    """``batch.shared`` with the seconds of a round of each length, for batches of this shape.

    Runs rounds of each length on copies of the batch, in the program that decodes it, for about as
    long each: a launch takes a while to get going, which would make longer drafts look cheap that
    had as many rounds. ``batch`` stays as it is. Its copies are half way through their texts, as a
    long text makes long drafts dearer: every drafted token reads it. In them no row stops or is as
    long as it may be, as last drafts of a text are short and cheap, and a drafter that looks up
    what it drafts is timed as where it finds something.

    What decides is how costs compare, and machines are quick and slow by moments: lengths take
    turns, and a length costs what it typically took beside the first one in the same turn.
    """
    count = len(plan.drafter.lengths)
    forever = endless(plan, halfway(plan, params, batch))
    only = [np.where(np.arange(count) == index, 1, _NEVER) for index in range(count)]
    alone = [forever.shared.replace(seconds=each, timed=jnp.array(True)) for each in only]
    batches = [forever.replace(shared=each) for each in alone]
    rounds = [_FEW] * count

    def turn() -> np.ndarray:
        return np.array([_round(plan, params, *each) for each in zip(batches, rounds, strict=True)])

    for _ in range(3):  # the first one compiles, the second tells roughly
        rounds = np.maximum(_FEW, _LAUNCH / turn()).astype(int).tolist()
    turns, begin = [], time.perf_counter()
    while len(turns) < _LEAST or (len(turns) < _MOST and time.perf_counter() - begin < _SECONDS):
        turns.append(turn())
    seconds = np.array(turns)
    costs = np.median(seconds[:, 0]) * np.median(seconds / seconds[:, :1], 0)
    costs = np.maximum.accumulate(costs)  # one that looks cheaper than a shorter was disturbed
    return batch.shared.replace(seconds=jnp.asarray(costs, jnp.float32))


def _round(plan: Plan, params: Params, batch: Batch, rounds: int) -> float:
    """Seconds of one of a launch's rounds; ``_NEVER`` where there is no room for any."""
    one, begin = copied(batch), time.perf_counter()
    one = jax.block_until_ready(advance(plan, params, one, rounds))
    seconds, ran = time.perf_counter() - begin, int(one.state.round - batch.state.round)
    return seconds / ran if ran else _NEVER


def halfway(plan: Plan, params: Params, batch: Batch) -> Batch:
    """The batch where half of what its rows may say is said: that prompts go on, from their start.

    A few hundred tokens are enough, and a batch whose texts are short stays where it is.
    """
    history, done, limit = jax.device_get(
        (batch.state.history, batch.state.done, batch.request.max_length)
    )
    lengths, tokens = history.length, history.tokens
    further = np.where(done, 0, np.minimum((limit - lengths) // 2, _FURTHEST)).astype(np.int32)
    if further.max() < _NEAR:
        return batch
    place = np.arange(tokens.shape[1]) % lengths[:, None]
    return elsewhere(plan, params, batch, np.take_along_axis(tokens, place, 1), lengths + further)


def endless(plan: Plan, batch: Batch) -> Batch:
    """The batch without ends of texts, but for that of its buffers."""
    request = batch.request
    room = batch.state.history.tokens.shape[1] - plan.drafter.max_depth - 1
    return batch.replace(
        request=request.replace(
            max_length=jnp.where(batch.state.done, request.max_length, room),
            stop_tokens=jnp.full_like(request.stop_tokens, -1),
        )
    )


def copied(batch: Batch) -> Batch:
    """A batch that may be consumed."""
    state, shared = jax.tree.map(jnp.copy, (batch.state, batch.shared))
    return jax.block_until_ready(batch.replace(state=state, shared=shared))

"""What rounds of each length take on this machine, measured in the program that will run them."""

import time

import jax
import jax.numpy as jnp
import numpy as np

from jspec.drafters.adaptive import Adaptive, Costs
from jspec.generate import Batch, advance
from jspec.plan import Plan
from jspec.types import Params, Shared

_ROUNDS, _REPEATS = 12, 3  # of a length: rounds in one launch, launches of which the best counts
_NEVER = np.float32(1e30)  # seconds


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

    Runs a few rounds of each length on a copy of the batch, in the program that decodes it; the
    best of several launches counts, less what a launch of no rounds takes: a text is one launch,
    and what all lengths have in common would make long drafts look cheap. ``batch`` stays as it is.
    In the copy no row stops or is as long as it may be: last drafts of a text are short and cheap.
    """
    count, forever = len(plan.drafter.lengths), endless(plan, batch)
    seconds = np.full(count, _NEVER)
    # The first time compiles. Lengths take turns: a slow moment is everybody's.
    for repeat in range(_REPEATS + 1):
        for index in range(count):
            only = np.where(np.arange(count) == index, np.float32(1), _NEVER)
            one = copied(forever.replace(shared=forever.shared.replace(seconds=only)))
            times = [time.perf_counter()]
            for rounds in (0, _ROUNDS):
                one = jax.block_until_ready(advance(plan, params, one, rounds))
                times.append(time.perf_counter())
            rounds = int(one.state.round - batch.state.round)
            if repeat and rounds:
                empty, full = np.diff(times)
                spent = max(full - empty, full / 4)  # an empty launch may be disturbed, too
                seconds[index] = min(seconds[index], spent / rounds)
    return batch.shared.replace(seconds=jnp.asarray(seconds))


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

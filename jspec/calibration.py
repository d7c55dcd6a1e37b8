"""What rounds of each length take on this machine, measured in the program that will run them."""

import dataclasses
import time

import jax
import jax.numpy as jnp
import numpy as np

from jspec.drafters.adaptive import Adaptive, Costs
from jspec.generate import Batch, advance
from jspec.plan import Plan
from jspec.types import Params

_ROUNDS, _REPEATS = 4, 3  # of a length: rounds in one launch, launches of which the best counts


def is_due(plan: Plan, batch: Batch) -> bool:
    """Whether the plan chooses lengths by costs, and ``batch.shared`` has none."""
    adaptive = isinstance(plan.drafter, Adaptive) and not plan.drafter.batch_sizes
    return adaptive and isinstance(batch.shared, Costs) and not bool(batch.shared.seconds.all())


def calibrate(plan: Plan, params: Params, batch: Batch) -> Costs:
    """``batch.shared`` with the seconds of a round of each length, for batches of this size.

    Runs a few rounds of each length on a copy of the batch, in the program that decodes it; the
    best of several launches counts. ``batch`` stays as it is.
    """
    count = len(plan.drafter.lengths)
    seconds = np.full(count, np.inf)
    # The first time compiles. Lengths take turns: a slow moment is everybody's.
    for repeat in range(_REPEATS + 1):
        for index in range(count):
            only = jnp.where(jnp.arange(count) == index, 1.0, np.float32(1e30))
            one = _copied(batch.replace(shared=dataclasses.replace(batch.shared, seconds=only)))
            begin = time.perf_counter()
            after = jax.block_until_ready(advance(plan, params, one, _ROUNDS))
            spent = time.perf_counter() - begin
            rounds = int(after.state.round - batch.state.round)
            if repeat and rounds:
                seconds[index] = min(seconds[index], spent / rounds)
    return dataclasses.replace(batch.shared, seconds=jnp.asarray(seconds, jnp.float32))


def _copied(batch: Batch) -> Batch:
    """A batch that may be consumed."""
    state, shared = jax.tree.map(jnp.copy, (batch.state, batch.shared))
    return jax.block_until_ready(batch.replace(state=state, shared=shared))

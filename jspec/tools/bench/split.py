"""Where the time of a generation goes: prompts, drafting, target, acceptance and commit, host.

The loop is one program on the device, which no clock sees into. So some rounds are run once more,
each part in a program of its own on the state that the round began with; what the whole round takes
beyond drafting and the target's pass is acceptance and commit. A round that is launched alone takes
longer than one in the loop: of the loop's round, parts have the shares that they have of that one.
"""

import dataclasses
import functools
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jspec.core import trees
from jspec.core.types import Array, Params, Request, Shared
from jspec.engine.batch import Batch, SequenceParams, advance, read, start
from jspec.engine.costs import copied
from jspec.engine.loop import DecodeState, init_shared
from jspec.engine.plan import Plan

_ROUNDS, _REPEATS = 6, 4  # that are looked at; runs of each part, of which the best counts
_WARM_UP = 2  # rounds before, if there are more: a drafter may still be taking in the prompt


@dataclasses.dataclass(frozen=True)
class Split:
    """Seconds.

    Attributes:
      prompt: taking in the prompts of a batch.
      drafting: of a round.
      target: its pass, of a round.
      accepting: judging, committing and counting, of a round; 0 where it is lost in the noise.
      round: of the shipped loop, all parts in one program.
      host: of a call, outside the device: checking, padding, reading back.
    """

    prompt: float
    drafting: float
    target: float
    accepting: float
    round: float
    host: float


def split(
    plan: Plan,
    params: Params,
    rows: list[SequenceParams],
    generate: Callable[[], Any],
    forget: Callable[[], None],
) -> Split:
    """Takes a generation apart.

    Args:
      plan: of a contender.
      params: its weights.
      rows: of one batch; answers must be long enough for a few rounds.
      generate: the same rows through ``LLM.generate``.
      forget: makes it forget what it learnt from the rows; not timed.
    """
    begun = lambda: start(plan, params, rows).replace(shared=init_shared(plan))
    prompt = _best(begun)
    whole = _best(lambda batch: advance(plan, params, batch), begun)
    done = read(advance(plan, params, begun()))
    rounds = max(max(answer.rounds for answer in done), 1)
    host = _best(lambda _: generate(), forget) - prompt - whole
    parts = (share * whole / rounds for share in _shares(plan, params, begun, rounds))
    return Split(prompt, *parts, whole / rounds, max(host, 0.0))


def _shares(plan: Plan, params: Params, begun: Callable[[], Batch], rounds: int) -> list[float]:
    """What drafting, the target's pass, and the rest take of a round, adding up to 1.

    However few ``rounds`` there are, the last of them is looked at.
    """
    before = min(_WARM_UP, rounds - 1)
    batch, totals = advance(plan, params, begun(), before), np.zeros(3)
    for _ in range(_ROUNDS):
        if bool(batch.state.done.all()):
            break
        given = plan, params, batch.request, batch.shared, batch.state
        last = int(_last_node(*given)[0])
        size = next(bucket_of for bucket_of in plan.node_buckets if bucket_of > last)
        begun = lambda batch=batch: copied(batch)
        # Every program is the one before and a part more. A launch is in all, and counts in none.
        seconds = [
            _best(lambda given=given: _last_node(*given)),
            _best(lambda given=given, size=size: _logits(size, *given)),
            _best(lambda batch: advance(plan, params, batch, 1), begun),
        ]
        totals += np.maximum(np.diff([_best(_launch), *seconds]), 0.0)
        batch = advance(plan, params, batch, 1)
    return (totals / max(totals.sum(), 1e-12)).tolist()


@jax.jit
def _launch() -> Array:
    return jnp.int32(0)


@functools.partial(jax.jit, static_argnames="plan")
def _last_node(
    plan: Plan, params: Params, request: Request, shared: Shared, state: DecodeState
) -> Array:
    """Drafts; the last node that is valid, and a sum of the tokens, lest they be left out."""
    draft, _ = plan.drafter.propose(params, request, shared, state.memory, state.history)
    drafted = jnp.where(draft.valid, draft.tokens, 0).sum()
    last = jnp.where(draft.valid, jnp.arange(draft.valid.shape[1]), 0).max()
    return jnp.stack([last, drafted])


@functools.partial(jax.jit, static_argnames=("size", "plan"))
def _logits(
    size: int, plan: Plan, params: Params, request: Request, shared: Shared, state: DecodeState
) -> Array:
    """Drafts, and runs the target over the first ``size`` nodes."""
    draft, _ = plan.drafter.propose(params, request, shared, state.memory, state.history)
    tree = trees.from_parents(draft.parents, draft.max_depth)
    tree = trees.first_nodes(trees.broadcast(tree, draft.tokens.shape[0]), size)
    out = plan.target.forward(
        params.target, draft.tokens[:, :size], tree, state.cache, plan.drafter.capture_layers
    )
    return out.logits


def _best(run: Callable, prepare: Callable[[], Any] | None = None) -> float:
    """Least seconds of a few runs, after one that compiles; ``prepare`` is not timed."""
    seconds = []
    for _ in range(_REPEATS + 1):
        given = () if prepare is None else (jax.block_until_ready(prepare()),)
        begin = time.perf_counter()
        jax.block_until_ready(run(*given))
        seconds.append(time.perf_counter() - begin)
    return min(seconds[1:])

"""The decoding loop: draft a tree, verify it in one target pass, commit the accepted path."""

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from jax import lax

from jspec import sharding
from jspec.core import kv_cache, logprobs, paging, shape_checks, trees
from jspec.core.logprobs import Logprobs, Scoring
from jspec.core.types import (
    Array,
    Params,
    Request,
    Shared,
)
from jspec.engine import launches
from jspec.engine.budget import Budget
from jspec.engine.launches import Launch
from jspec.engine.plan import Plan
from jspec.engine.round import Carry, DecodeState, forward, run_round
from jspec.util.promotion import standard_promotion

if TYPE_CHECKING:
    from jspec.engine.profile import Profile


@functools.partial(jax.jit, static_argnames="plan", donate_argnames=("shared", "state"))
@standard_promotion
def decode(
    plan: Plan, params: Params, request: Request, shared: Shared, state: DecodeState, until: Array
) -> tuple[Shared, DecodeState]:
    """Run rounds up to ``until``; see ``jspec.decode``, which also takes it as a Python number."""
    is_running = functools.partial(_is_running, until)
    shared, state, _ = _loop(plan, params, request, None, is_running, (shared, state, None))
    return sharding.whole(shared), state.settled()


@functools.partial(
    jax.jit, static_argnames=("plan", "profile"), donate_argnames=("shared", "state")
)
@standard_promotion
def launch(
    plan: Plan,
    profile: "Profile",
    params: Params,
    request: Request,
    shared: Shared,
    state: DecodeState,
    rounds: Array,
    watched: Array,
    tables: tuple[Array, ...] | None = None,
    budget: Budget | None = None,
) -> tuple[Shared, DecodeState, Launch]:
    """Run up to ``rounds`` rounds; return what they did.

    The loop ends as soon as a row of ``watched`` is done, at once if one is done already. So the
    next launch may be dispatched before this one is read: it does nothing while a row is to leave.

    Args:
      plan: static.
      profile: static; ``profile.rounds`` are run at most.
      params: weights.
      request: settings of the rows.
      shared: the drafter's state that outlives calls; consumed.
      state: consumed.
      rounds: int32 [].
      watched: bool [B].
      tables: the pages of each row in ``state.pools``, int32 [B, M] for each kind of layers (see
        ``paging.kinds``); None for caches without pages.
      budget: which of the drafted nodes are verified; None for all.
    """
    state = state.attached(tables)
    until = state.round + jnp.minimum(rounds, profile.rounds)
    # A row that is done counts 1, and a watched one more than all rows: one sum across chips.
    weights = jnp.where(watched, 1 + len(watched), 1)

    def is_running(carry: Carry) -> Array:
        state = carry[1]
        return ((state.done * weights).sum() < len(watched)) & (state.round < until)

    empty = empty_launch(plan, profile, params, state)
    shared, state, ran = _loop(plan, params, request, budget, is_running, (shared, state, empty))
    state = state.settled(tables)
    ran = launches.ended(ran, plan.max_depth, state.history, state.done, state.num_cached)
    shared, ran = sharding.whole((shared, ran))
    return shared, state, ran


def empty_launch(plan: Plan, profile: "Profile", params: Params, state: DecodeState) -> Launch:
    """Return the results of a launch before its first round."""
    return launches.empty(
        state.history,
        rounds=profile.rounds,
        max_depth=plan.max_depth,
        num_nodes=plan.tree_size if profile.nodes else None,
        scoring=profile.scoring,
        captured=launches.shapes_of_captured(plan, params, profile.capture_layers),
    )


Condition = Callable[[Carry], Array]


def _loop(
    plan: Plan,
    params: Params,
    request: Request,
    budget: Budget | None,
    is_running: Condition,
    carry: Carry,
) -> Carry:
    run = functools.partial(run_round, plan, params, request, budget)
    return lax.while_loop(is_running, functools.partial(_same_form, plan, run), carry)


def _is_running(until: Array, carry: Carry) -> Array:
    return ~carry[1].done.all() & (carry[1].round < until)


def _same_form(plan: Plan, run: Callable, carry: Carry) -> Carry:
    """Run one iteration; refuse a drafter whose state changes its shapes or dtypes."""
    of_drafter = lambda shared, state, _: {"memory": state.memory, "shared": shared}
    after = run(carry)
    shape_checks.check_carry(plan.drafter, of_drafter(*carry), of_drafter(*after))
    return after


@functools.partial(jax.jit, static_argnames=("plan", "scoring"), donate_argnames="state")
@standard_promotion
def prefill(
    plan: Plan,
    params: Params,
    state: DecodeState,
    chunk: Array,
    start: Array,
    valid: Array,
    ready: Array,
    rows: Array | None = None,
    scoring: Scoring | None = None,
    tables: tuple[Array, ...] | None = None,
) -> tuple[DecodeState, Logprobs | None]:
    """Prefill chunks of the prompts of Q rows, in the caches of target and drafter.

    A prompt's last token is not prefilled: it is the root of the first round. Between two chunks a
    row is done, and its history ends one token behind what the caches hold.

    Args:
      plan: static.
      params: weights.
      state: consumed; the caches hold the first ``start`` tokens of every prompt that is longer.
      chunk: int32 [Q, C+1], C tokens and one of look-ahead, which the history gets too.
      start: int32 [Q], position of the chunk's first token.
      valid: int32 [Q], number of the C tokens that each row prefills.
      ready: bool [Q], rows whose prompts are complete now. They take part in the next round.
      rows: int32 [Q], distinct; those beyond the batch are padding. None for all rows.
      scoring: static; how to score the C tokens after the chunk's first. None: no scores.
      tables: as of ``launch``.
    """
    state = state.attached(tables)
    size, batch = chunk.shape[1] - 1, state.done.shape[0]
    whole = state.cache, state.memory
    cache, memory = whole if rows is None else paging.rows_of(whole, rows)
    tree = trees.chain_tree(len(start), size)
    out = forward(plan, params, chunk[:, :-1], tree, cache)
    prefilled = plan.drafter.prefill(params, memory, chunk, out.features, start, valid)
    shape_checks.check_carry(plan.drafter, {"memory": memory}, {"memory": prefilled}, prompt=True)
    scores = None
    if scoring is not None:
        scores = logprobs.score(out.logits, chunk[:, 1:], scoring.count, scoring.mode)
    part = kv_cache.append_prompt(cache, out.tree_kv, valid), prefilled
    cache, memory = part if rows is None else paging.with_rows(whole, rows, part)
    rows = jnp.arange(batch) if rows is None else rows
    positions = start[:, None] + jnp.arange(size + 1)
    old = state.history
    history = old.replace(
        tokens=old.tokens.at[rows[:, None], positions].set(chunk, mode="drop"),
        length=old.length.at[rows].set(start + valid + 1, mode="drop"),
    )
    done = state.done.at[rows].set(~ready, mode="drop")
    state = state.replace(history=history, cache=cache, memory=memory, done=done)
    return state.settled(tables), sharding.whole(scores)


def init_shared(plan: Plan) -> Shared:
    """Return the drafter's state that outlives calls, before the first call; () if it has none."""
    return sharding.whole(plan.drafter.init_shared())


@functools.partial(jax.jit, static_argnames="plan", donate_argnames=("shared", "state"))
@standard_promotion
def cancel(
    plan: Plan, request: Request, shared: Shared, state: DecodeState, rows: Array
) -> tuple[Request, Shared, DecodeState]:
    """End ``rows``, bool [B], as at a stop string: their length becomes their limit.

    A drafter with shared state is handed their texts. Consumes ``shared`` and ``state``.
    """
    limit = jnp.where(rows, state.history.length, request.max_length)
    learned = plan.drafter.on_finished(shared, state.memory, state.history, rows)
    memory, shared = shape_checks.check_update(plan.drafter, learned)
    state = state.replace(memory=memory)
    state = state.replace(done=state.done | rows).settled()
    request = sharding.whole(request.replace(max_length=limit))
    return request, sharding.whole(shared), state

"""The rows of a batch: their state before a prompt is prefilled, and a sequence's seat in one."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jspec import sharding
from jspec.core import kv_cache, paging, token_fsm
from jspec.core.types import Array, History, Params, Request
from jspec.engine import backlog
from jspec.engine.loop import DecodeState
from jspec.engine.plan import Plan
from jspec.engine.profile import Profile, request_of
from jspec.util.promotion import standard_promotion
from jspec.util.values import bucket

_TILE_SLOTS = 16  # a kernel copies a cache that ends inside a tile of the device's memory layout


def buffer_size(plan: Plan, longest: int) -> int:
    """Return the length S of buffers for histories of up to ``longest`` tokens."""
    needed = bucket(longest) + plan.drafter.max_depth + 1
    return -(-needed // _TILE_SLOTS) * _TILE_SLOTS


@functools.partial(jax.jit, static_argnames=("plan", "batch", "size", "has_pages", "keeps"))
@standard_promotion
def allocate(
    plan: Plan, params: Params, batch: int, size: int, has_pages: bool, keeps: bool = False
) -> DecodeState:
    """Return the state of ``batch`` empty rows in buffers of ``size`` tokens.

    All rows are done. With pages, caches have no slots of their own. If it ``keeps``, recurrent
    states have room for a copy behind the last page's end.
    """
    request, _ = request_of([None] * batch, Profile(), plan.target.vocab_size)
    missed, spare = None, 0
    if plan.may_pause:
        missed = backlog.init(plan.target, plan.drafter, params, batch)
        spare = backlog.SIZE  # tokens that are prefilled at once
    state = DecodeState(
        history=History(jnp.zeros((batch, size), jnp.int32), jnp.ones(batch, jnp.int32)),
        cache=plan.target.init_cache(batch, size),
        memory=plan.drafter.init(params, request, size + spare),
        done=jnp.ones(batch, bool),
        round=jnp.int32(0),
        missed=missed,
    )
    if keeps:
        cache, memory = paging.over_caches(_keeping, (state.cache, state.memory))
        state = state.replace(cache=cache, memory=memory)
    return (state.detached().replace(pools=()) if has_pages else state).settled()


def _keeping(cache: kv_cache.KVCache) -> kv_cache.KVCache:
    return cache.replace(layers=tuple(entry.with_copy() for entry in cache.layers))


@functools.partial(jax.jit, static_argnames=("plan", "has_pages", "keeps"), donate_argnames="state")
@standard_promotion
def seat(
    plan: Plan,
    params: Params,
    state: DecodeState,
    request: Request,
    streams: Array,
    slot: Array,
    text: Array,
    cached: Array,
    ready: Array,
    has_pages: bool,
    keeps: bool = False,
) -> tuple[Request, DecodeState]:
    """Write a sequence into a row of the batch, where ``prefill`` reads its text.

    Return the request with its keys, and the state. Every leaf of a state has the batch on axis 0,
    but for numbers that belong to the whole batch.

    Args:
      plan: static.
      params: weights.
      state: consumed. Its history has a grammar's states if ``request`` has grammars.
      request: settings of all rows, from ``profile.request_of``, which gives ``streams`` too.
      streams: uint32 [B].
      slot: int32 [].
      text: int32 [S]; its history has one token until the first chunk is prefilled.
      cached: int32 [], the tokens of the text that pages hold.
      ready: bool [], true if the text has one token, so that nothing is to be prefilled.
      has_pages: static.
      keeps: static, as of ``allocate``.
    """
    request = with_keys(request, streams)
    first = token_fsm.first_state(request.sampling.automaton)
    first = None if first is None else first[slot][None]
    row = allocate(plan, params, 1, len(text), has_pages, keeps)
    row = row.replace(
        history=History(text[None], jnp.ones(1, jnp.int32), first),
        cache=_with_length(row.cache, cached) if has_pages else row.cache,
        memory=_with_length(row.memory, cached) if has_pages else row.memory,
        done=~ready[None],
    )

    def put(all_rows: Array, one: Array) -> Array:
        if all_rows.ndim == 0:
            return all_rows
        return lax.dynamic_update_slice_in_dim(all_rows, one.astype(all_rows.dtype), slot, 0)

    return request, jax.tree.map(put, state, row).settled()


@functools.partial(jax.jit, static_argnames=("plan", "width", "has_pages", "keeps"))
@standard_promotion
def widened(
    plan: Plan,
    params: Params,
    state: DecodeState,
    width: int,
    has_pages: bool,
    keeps: bool = False,
) -> DecodeState:
    """Return the state with ``width`` rows, of which the new ones are empty."""
    fresh = allocate(plan, params, width, state.history.tokens.shape[1], has_pages, keeps)
    if state.history.state is not None:
        states = jnp.full(width, token_fsm.FREE, state.history.state.dtype)
        fresh = fresh.replace(history=fresh.history.replace(state=states))

    def put(new: Array, old: Array) -> Array:
        return old if new.ndim == 0 else lax.dynamic_update_slice_in_dim(new, old, 0, 0)

    return jax.tree.map(put, fresh, state).settled()


@jax.jit
def with_keys(request: Request, streams: Array) -> Request:
    """Return the request with keys derived from the words of the seeds, and the streams [B]."""
    keys = jax.random.wrap_key_data(request.keys, impl="threefry2x32")
    return sharding.whole(request.replace(keys=jax.vmap(jax.random.fold_in)(keys, streams)))


def _with_length(tree: Any, length: Array) -> Any:
    """Return a pytree of one row whose caches have a certain length."""
    return paging.over_caches(lambda cache: cache.replace(length=length[None]), tree)

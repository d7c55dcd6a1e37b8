"""Admission: prompts are prefilled into caches of their own, then their sequences join a batch."""

import dataclasses
import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jspec.core import kv_cache, token_fsm
from jspec.core.logprobs import Logprobs, Scoring
from jspec.core.types import Array, History, Params, Request
from jspec.engine.loop import DecodeState, prefill
from jspec.engine.pages import Pool
from jspec.engine.plan import Plan
from jspec.util.buckets import bucket
from jspec.util.promotion import standard_promotion

PREFILL_CHUNK = 512  # tokens of a prompt per launch: bounds the memory of a prefill
_WHOLE_CHUNK = 128  # a chunk up to which padding costs less than another pass
_PASS_TOKENS = 64  # that take about as long as the reading of the weights
_SCORED_CHUNK = 32  # the same where prompts are scored, which needs logits [B, C, V]
_TILE_SLOTS = 16  # a kernel copies a cache that ends inside a tile of the device's memory layout


def buffer_size(plan: Plan, longest: int) -> int:
    """Return the length S of buffers for histories of up to ``longest`` tokens."""
    needed = bucket(longest) + plan.drafter.max_depth + 1
    return -(-needed // _TILE_SLOTS) * _TILE_SLOTS


@dataclasses.dataclass
class Intake:
    """Sequences whose prompts are being prefilled; padding rows are done.

    ``request`` holds the words of the seeds as keys until ``begin`` derives them.
    """

    request: Request
    state: DecodeState
    prompts: np.ndarray  # int32 [B, S]
    lengths: np.ndarray  # int32 [B]
    num_prefilled: np.ndarray  # int32 [B], tokens that the caches hold
    scoring: Scoring | None = None  # of the prompts; None for no scores
    table: np.ndarray | None = None  # int32 [B, M], pages of the caches; None without pages
    scores: list[Logprobs] = dataclasses.field(default_factory=list)

    @property
    def is_complete(self) -> bool:
        """True once all prompts are prefilled but for their last tokens."""
        return bool((self.num_prefilled >= self.lengths - 1).all())

    def advance(self, plan: Plan, params: Params, pool: Pool | None = None) -> None:
        """Prefill one chunk of every prompt; ``pool`` has the pages of the table."""
        begin = self.num_prefilled
        width = chunk_width(int((self.lengths - begin).max()), self.scoring)
        index = begin[:, None] + np.arange(width + 1)
        chunk = np.take_along_axis(self.prompts, np.minimum(index, self.prompts.shape[1] - 1), 1)
        valid = np.clip(self.lengths - 1 - begin, 0, width).astype(np.int32)
        history = self.state.history  # not passed: grammars add to it, and need no other program
        state = self.state.replace(history=None)
        inputs = state if pool is None else pool.lend(state), chunk, begin, valid
        state, scores = prefill(plan, params, *inputs, self.scoring, self.table)
        state = state if pool is None else pool.take_back(state)
        self.state = state.replace(history=history)
        self.num_prefilled = begin + valid
        if scores is not None:
            self.scores.append(scores)

    def complete(self, plan: Plan, params: Params) -> None:
        """Prefill all that is left."""
        while not self.is_complete:
            self.advance(plan, params)

    def prompt_scores(self, row: int) -> Logprobs | None:
        """Return the scores of a prompt's tokens but the first; None without ``scoring``."""
        if self.scoring is None:
            return None
        parts = [jax.tree.map(lambda x: x[row], part) for part in jax.device_get(self.scores)]
        parts = parts or [jax.tree.map(lambda x: np.asarray(x)[0], self.scoring.empty(1, 0))]
        scores = jax.tree.map(lambda *parts: np.concatenate(parts), *parts)
        return scores[: self.lengths[row] - 1]


def begin(
    plan: Plan,
    params: Params,
    request: Request,
    streams: np.ndarray,
    prompts: Sequence[Sequence[int]],
    size: int,
    scoring: Scoring | None = None,
    cached: np.ndarray | None = None,
    table: np.ndarray | None = None,
) -> Intake:
    """Allocate the state of a batch in buffers of ``size`` tokens.

    ``request`` and ``streams`` come from ``profile.request_of``. Rows without a prompt are done.
    With a ``table`` of pages, these hold the first ``cached`` [B] tokens already.
    """
    batch = len(streams)
    tokens = np.zeros((batch, size), np.int32)
    lengths = np.ones((batch,), np.int32)  # padding holds one token, its root
    for row, prompt in enumerate(prompts):
        lengths[row] = len(prompt)
        tokens[row, : lengths[row]] = prompt
    done = np.arange(batch) >= len(prompts)
    history = History(tokens, lengths, token_fsm.first_state(request.sampling.automaton))
    request, state = allocate(plan, params, request, streams, history, done, cached)
    begun = np.zeros(batch, np.int32) if cached is None else cached
    return Intake(request, state, tokens, lengths, begun, scoring, table)


def chunk_width(length: int, scoring: Scoring | None = None) -> int:
    """Return the tokens of the next chunk of a prompt with ``length`` tokens left.

    It is one of few, since each is a program. Two chunks replace a long one that would be padding
    by a quarter or more.
    """
    most = PREFILL_CHUNK if scoring is None else _SCORED_CHUNK
    width = min(bucket(length - 1, smallest=16), most)
    return width // 2 if width > _WHOLE_CHUNK and 4 * (length - 1) <= 3 * width else width


def prefill_cost(length: int, rows: int = 1) -> int:
    """Return the cost of prefilling ``rows`` prompts of ``length`` tokens together, in tokens."""
    cost = 0
    while length > 1:
        width = chunk_width(length)
        cost, length = cost + rows * width + _PASS_TOKENS, length - width
    return cost


def chunk_widths(longest: int, scoring: Scoring | None = None) -> list[int]:
    """Return the chunk widths of all prompts of up to ``longest`` tokens."""
    lengths = [*(1 << power for power in range(longest.bit_length())), longest]
    return sorted({chunk_width(length, scoring) for length in lengths})


@functools.partial(jax.jit, static_argnames="plan")
@standard_promotion
def allocate(
    plan: Plan,
    params: Params,
    request: Request,
    streams: Array,
    history: History,
    done: Array,
    cached: Array | None,
) -> tuple[Request, DecodeState]:
    """Derive the keys and allocate the state, in one launch instead of one per buffer."""
    request = _with_keys(request, streams)
    return request, empty_state(plan, params, request, history, done, cached)


def _with_keys(request: Request, streams: Array) -> Request:
    keys = jax.random.wrap_key_data(request.keys, impl="threefry2x32")
    return request.replace(keys=jax.vmap(jax.random.fold_in)(keys, streams))


@functools.partial(jax.jit, static_argnames="plan")
@standard_promotion
def empty_state(
    plan: Plan,
    params: Params,
    request: Request,
    history: History,
    done: Array,
    cached: Array | None = None,
) -> DecodeState:
    """Return the state of a batch before its prompts are prefilled.

    Its caches have no layers of their own if pages hold the first ``cached`` [B] tokens.
    """
    size, capacity = history.tokens.shape
    state = DecodeState(
        history=history,
        cache=plan.target.init_cache(size, capacity),
        memory=plan.drafter.init(params, request, capacity),
        done=done,
        round=jnp.int32(0),
    )
    if cached is None:
        return state
    bare = state.detached().replace(pools=())
    skip = functools.partial(kv_cache.over_caches, lambda cache: cache.replace(length=cached))
    return bare.replace(cache=skip(bare.cache), memory=skip(bare.memory))


@functools.partial(jax.jit, donate_argnames="state")
@standard_promotion
def join(
    state: DecodeState, row: DecodeState, request: Request, streams: Array, slot: Array
) -> tuple[Request, DecodeState]:
    """Write the state of one sequence into a slot of the batch; consumes ``state``.

    Every leaf has the batch on axis 0, but for numbers that belong to the whole batch.
    ``request`` and ``streams`` are those of all slots, from ``profile.request_of``.
    """

    def put(all_rows: Array, one: Array) -> Array:
        if all_rows.ndim == 0:
            return all_rows
        return lax.dynamic_update_slice_in_dim(all_rows, one.astype(all_rows.dtype), slot, 0)

    return _with_keys(request, streams), jax.tree.map(put, state, row)

"""Rounding noise of a target's logits, measured, and the gap between two tokens.

The same text is scored by plain passes of several shapes: token by token, in chunks as long as a
draft, whole, alone and in a batch. Exact arithmetic would give the same logits. The differences are
the noise of the dtype on this device; a speculative run has no part in it.
"""

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jspec.core import kv_cache, sampling, trees
from jspec.core.types import Array, History, Params, Sampling, Target
from jspec.drafters.none import NoDrafter
from jspec.engine import chunks
from jspec.engine.loop import DecodeState, prefill
from jspec.engine.plan import Plan
from jspec.engine.profile import Profile, request_of
from jspec.engine.sequences import SequenceParams
from jspec.util.promotion import standard_promotion
from jspec.util.values import bucket

_LIKELIEST = 16  # tokens of a position whose logits are compared
_LARGEST_GAP = 2.0**14
_NUDGES = 6  # ways to change logits for one of two tokens
# Limits of rounding: units in the last place of the largest logit, and a share of the spread of all
# logits. Passes that differ by more do not compute the same thing.
_MOST_UNITS, _MOST_SPREAD = 1024, 0.25


def scored(
    target: Target, params: Params, row: SequenceParams, text: Sequence[int], chunk: int, batch: int
) -> tuple[np.ndarray, float]:
    """Return the logits before each token of ``text``, and their noise over shapes of passes.

    Passes have one token, ``chunk`` tokens or all, and one row or ``batch`` rows. The logits are
    those of the pass token by token, float32 [len(text), V]. The noise is the largest change of the
    difference of two logits, among the likeliest tokens of any position.
    """
    score = functools.partial(_scored, target, params, row.prompt, text)
    reference, noise = score(1, 1), 0.0
    top = np.argpartition(-reference, min(_LIKELIEST, reference.shape[1]) - 1, 1)[:, :_LIKELIEST]
    for width, rows in ((chunk, 1), (bucket(len(text)), 1), (1, batch), (chunk, batch)):
        change = np.take_along_axis(score(width, rows) - reference, top, 1)
        noise = max(noise, float((change.max(1) - change.min(1)).max()))
    return reference, noise


def plausible(logits: np.ndarray, params: Params) -> float:
    """Return the largest plausible rounding of the difference of two of ``logits`` [T, V]."""
    leaves = jax.tree.leaves(params.target)
    dtypes = {x.dtype for x in leaves if jnp.issubdtype(x.dtype, jnp.floating)}
    unit = max((float(jnp.finfo(dtype).eps) for dtype in dtypes), default=0.0)
    if jax.default_backend() != "cpu" and jax.config.jax_default_matmul_precision is None:
        unit = max(unit, float(jnp.finfo(jnp.bfloat16).eps))  # accelerators round float32 factors
    finite = np.where(np.isfinite(logits), logits, np.nan)
    spread = float(np.median(np.nanstd(finite, 1)))
    return min(_MOST_UNITS * unit * float(np.nanmax(np.abs(finite))), _MOST_SPREAD * spread)


def _scored(
    target: Target,
    params: Params,
    prompt: Sequence[int],
    text: Sequence[int],
    width: int,
    batch: int,
) -> np.ndarray:
    """Logits before each token of ``text`` in passes of ``width`` tokens and ``batch`` rows."""
    size = bucket(len(text))
    count = -(-size // width)
    most = chunks.TOTALS[-1]
    capacity = bucket(len(prompt)) + count * width + most
    plan, weights = Plan(target, NoDrafter()), Params(params.target)
    last = len(prompt) - 1  # not prefilled
    state = _empty(target, batch, capacity)
    step = min(bucket(last, smallest=16), most)
    for begin in range(0, last, step):
        chunk = np.zeros((batch, step + 1), np.int32)  # the last token is look-ahead
        part = prompt[begin : begin + step + 1]
        chunk[:, : len(part)] = part
        counts = np.full(batch, min(last - begin, step), np.int32)
        start, ready = np.full(batch, begin, np.int32), np.zeros(batch, bool)
        state, _ = prefill(plan, weights, state, chunk, start, counts, ready)
    fed = np.zeros(count * width, np.int32)
    fed[: len(text)] = [prompt[-1], *text[:-1]]
    logits = _feed(target, params.target, state.cache, fed.reshape(count, width))
    return np.asarray(logits, np.float32)[: len(text)]


def _empty(target: Target, batch: int, capacity: int) -> DecodeState:
    """Return the state of prompts before they are prefilled."""
    history = History(np.zeros((batch, 1), np.int32), np.ones(batch, np.int32))
    cache = target.init_cache(batch, capacity)
    return DecodeState(history, cache, (), np.zeros(batch, bool), np.int32(0))


@functools.partial(jax.jit, static_argnames="target")
@standard_promotion
def _feed(target: Target, params, cache: kv_cache.KVCache, chunks: Array) -> Array:
    """Logits of the first row behind each token of ``chunks`` [C, W]: [C * W, V]."""
    batch, size = len(cache.length), chunks.shape[1]
    tree = trees.chain_tree(batch, size)
    path = jnp.broadcast_to(jnp.arange(size), (batch, size))
    lengths = jnp.full((batch,), size, jnp.int32)

    def step(cache: kv_cache.KVCache, chunk: Array) -> tuple[kv_cache.KVCache, Array]:
        out = target.forward(params, jnp.broadcast_to(chunk, (batch, size)), tree, cache, ())
        return kv_cache.append(cache, out.tree_kv, path, lengths), out.logits[0]

    _, logits = lax.scan(step, cache, chunks)
    return logits.reshape(-1, logits.shape[-1])


def gap(row: SequenceParams, position: int, logits: np.ndarray, pair: tuple[int, int]) -> float:
    """Return a change of logit differences with which a row draws either of two tokens.

    The row draws with its own noise and filters from the target's ``logits`` [V] at a position of
    its text. Without filters the change is the smallest; at temperature 0 it is the difference of
    the two logits. It is infinite if no change is enough.
    """
    request, streams = request_of([row], Profile().grown([row]), len(logits))
    keys = jax.random.wrap_key_data(request.keys, impl="threefry2x32")
    keys = jax.vmap(jax.random.fold_in)(keys, streams)
    positions = np.full((1, _NUDGES), len(row.prompt) + position, np.int32)

    def either(change: float) -> bool:
        nudged = _nudged(logits.astype(np.float32), *pair, change)
        drawn = _draws(nudged[None], request.sampling, keys, positions)[0]
        return set(pair) <= set(np.asarray(drawn).tolist())

    high = 2.0**-24
    while not either(high):
        high *= 2
        if high > _LARGEST_GAP:
            return float("inf")
    low = high / 2
    for _ in range(12):
        middle = (low + high) / 2
        low, high = (low, middle) if either(middle) else (middle, high)
    return high


def _nudged(logits: np.ndarray, first: int, second: int, change: float) -> np.ndarray:
    """Logits with differences changed by at most ``change``, for either token: [_NUDGES, V]."""
    half, rows = change / 2, []
    for favoured, other in ((first, second), (second, first)):
        alone = np.zeros_like(logits)
        # The favoured token enters the set of top-k and top-p, or the other one leaves it.
        enters = np.where(logits > logits[favoured], -half, half)
        leaves = np.where(logits > logits[other], half, -half)
        for nudge in (alone, enters, leaves):
            nudge[favoured], nudge[other] = half, -half
            rows.append(logits + nudge)
    return np.stack(rows).astype(np.float32)


@jax.jit
@standard_promotion
def _draws(logits: Array, settings: Sampling, keys: Array, positions: Array) -> Array:
    """The draws of one row at each of ``positions`` [1, C] from ``logits`` [1, C, V]: [1, C]."""
    processed = sampling.process_logits(logits, settings)
    return sampling.draw_target(processed, settings, keys, positions)

"""How far rounding moves a target's logits, measured, and how far two texts part.

The same text is scored by plain passes of several shapes: token by token, in chunks as long as a
draft, whole, alone and in a batch. Exact arithmetic would give the same logits; what differs is the
noise of the dtype on this device. Nothing of it comes from a speculative run.
"""

import functools
from collections.abc import Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jspec.core import kv_cache, sampling, trees
from jspec.core.types import Array, Params, Request, Sampling, Target
from jspec.drafters import NoDrafter
from jspec.engine.batch import PREFILL_CHUNK
from jspec.engine.loop import prefill
from jspec.engine.plan import Plan
from jspec.engine.sequences import SequenceParams, request_of
from jspec.util.buckets import bucket

_LIKELIEST = 16  # tokens of a position whose logits are compared
_FARTHEST = 2.0**14  # of gaps
_NUDGES = 6  # ways to change logits for one of two tokens
# What no rounding does: so many units in the last place of the largest logit, or so much of the
# spread of all. Passes that differ by more do not compute the same thing.
_MOST_UNITS, _MOST_SPREAD = 1024, 0.25


def scored(
    target: Target, params: Params, row: SequenceParams, text: Sequence[int], chunk: int, batch: int
) -> tuple[np.ndarray, float]:
    """Logits before each token of ``text``, and how far passes of other shapes move them.

    Args:
      target: the language model.
      params: its weights, as ``params.target``.
      row: of the prompt.
      text: what was generated behind it, at least one token.
      chunk: tokens of a pass besides one and all, such as the nodes of a draft.
      batch: rows of a pass besides one.

    Returns:
      Logits of the pass token by token, float32 [len(text), V]; and by how much the difference of
      two logits, of the likeliest tokens of any position, changes with the shape at most.
    """
    score = functools.partial(_scored, target, params, row.prompt, text)
    reference, noise = score(1, 1), 0.0
    top = np.argpartition(-reference, min(_LIKELIEST, reference.shape[1]) - 1, 1)[:, :_LIKELIEST]
    for width, rows in ((chunk, 1), (bucket(len(text)), 1), (1, batch), (chunk, batch)):
        moved = np.take_along_axis(score(width, rows) - reference, top, 1)
        noise = max(noise, float((moved.max(1) - moved.min(1)).max()))
    return reference, noise


def plausible(logits: np.ndarray, params: Params) -> float:
    """The most that rounding may change the difference of two of ``logits`` [T, V]."""
    kinds = {
        x.dtype for x in jax.tree.leaves(params.target) if jnp.issubdtype(x.dtype, jnp.floating)
    }
    unit = max((float(jnp.finfo(kind).eps) for kind in kinds), default=0.0)
    if jax.default_backend() != "cpu" and jax.config.jax_default_matmul_precision is None:
        unit = max(unit, float(jnp.finfo(jnp.bfloat16).eps))  # of float32, factors are rounded
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
    capacity = bucket(len(prompt)) + count * width + PREFILL_CHUNK
    cache = target.init_cache(batch, capacity)
    plain = Plan(target, NoDrafter())
    for chunk, begin, valid in _chunks(prompt):
        wide = np.broadcast_to(chunk, (batch, len(chunk)))
        cache, _, _ = prefill(
            plain,
            Params(params.target),
            cache,
            (),
            wide,
            np.int32(begin),
            np.full(batch, valid, np.int32),
        )
    fed = np.zeros(count * width, np.int32)
    fed[: len(text)] = [prompt[-1], *text[:-1]]
    logits = _feed(target, params.target, cache, fed.reshape(count, width))
    return np.asarray(logits, np.float32)[: len(text)]


def _chunks(prompt: Sequence[int]) -> Iterator[tuple[np.ndarray, int, int]]:
    """The prompt but for its last token, in chunks with a token of look-ahead."""
    last = len(prompt) - 1
    width = min(bucket(last, smallest=16), PREFILL_CHUNK)
    for begin in range(0, last, width):
        chunk = np.zeros(width + 1, np.int32)
        part = prompt[begin : begin + width + 1]
        chunk[: len(part)] = part
        yield chunk, begin, min(last - begin, width)


@functools.partial(jax.jit, static_argnames="target")
def _feed(target: Target, params, cache: kv_cache.KVCache, chunks: Array) -> Array:
    """Logits of the first row behind each token of ``chunks`` [C, W]: [C * W, V]."""
    batch, size = len(cache.length), chunks.shape[1]
    tree = trees.broadcast(trees.from_parents(trees.chain(size - 1), size - 1), batch)
    rows = jnp.broadcast_to(jnp.arange(size), (batch, size))
    kept = jnp.full((batch,), size, jnp.int32)

    def one(cache: kv_cache.KVCache, chunk: Array) -> tuple[kv_cache.KVCache, Array]:
        out = target.forward(params, jnp.broadcast_to(chunk, (batch, size)), tree, cache, ())
        return kv_cache.append(cache, out.tree_kv, rows, kept), out.logits[0]

    _, logits = lax.scan(one, cache, chunks)
    return logits.reshape(-1, logits.shape[-1])


def gap(row: SequenceParams, place: int, logits: np.ndarray, pair: tuple[int, int]) -> float:
    """A change of differences between logits that suffices for a row to draw either of two tokens.

    With its own noise and filters. Without filters it is the least, at temperature 0 the difference
    of the two logits.

    Args:
      row: its settings, seed and stream.
      place: of the token in the text behind the prompt.
      logits: of the target there, [V].
      pair: the tokens.

    Returns:
      The change; infinity where none is enough.
    """
    request = _request(row, len(logits))
    positions = np.full((1, _NUDGES), len(row.prompt) + place, np.int32)

    def either(change: float) -> bool:
        nudged = _nudged(logits.astype(np.float32), *pair, change)
        drawn = _draws(nudged[None], request.sampling, request.keys, positions)[0]
        return set(pair) <= set(np.asarray(drawn).tolist())

    high = 2.0**-24
    while not either(high):
        high *= 2
        if high > _FARTHEST:
            return float("inf")
    low = high / 2
    for _ in range(12):
        middle = (low + high) / 2
        low, high = (low, middle) if either(middle) else (middle, high)
    return high


def _nudged(logits: np.ndarray, one: int, other: int, change: float) -> np.ndarray:
    """Logits whose differences are changed by ``change`` at most, for and against two tokens."""
    half, found = change / 2, []
    for wanted, unwanted in ((one, other), (other, one)):
        beside = np.zeros_like(logits)
        # The wanted one enters what top-k and top-p keep; or the unwanted one falls out of it.
        enters = np.where(logits > logits[wanted], -half, half)
        leaves = np.where(logits > logits[unwanted], half, -half)
        for nudge in (beside, enters, leaves):
            nudge[wanted], nudge[unwanted] = half, -half
            found.append(logits + nudge)
    return np.stack(found).astype(np.float32)


@jax.jit
def _draws(logits: Array, settings: Sampling, keys: Array, positions: Array) -> Array:
    """What one row draws at each of ``positions`` [1, C] from ``logits`` [1, C, V]: [1, C]."""
    return sampling.draw_target(
        sampling.process_logits(logits, settings), settings, keys, positions
    )


def _request(row: SequenceParams, vocab_size: int) -> Request:
    request, streams = request_of([row], 1, row.filters, vocab_size)
    keys = jax.random.wrap_key_data(request.keys, impl="threefry2x32")
    return request.replace(keys=jax.vmap(jax.random.fold_in)(keys, streams))

"""The cost of a pass over N nodes, which bounds the gain of speculation on a device.

A round costs ``V(K+1) / V(1)`` instead of 1, and ``c`` for each of its K drafted tokens. With
acceptance length tau the gain is at most ``tau / (V(K+1)/V(1) + K c)``.
"""

import functools
import time
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from jspec.core import kv_cache, trees
from jspec.core.types import Array, Tree
from jspec.models import decoder

_LOOPS = 24  # passes inside one program: long enough to time, short enough to be undisturbed
_CAPACITY = 512


def pass_seconds(
    config: decoder.DecoderConfig,
    params: decoder.DecoderParams,
    widths: Sequence[int],
    *,
    batch: int = 1,
    prefix: int = 192,
    rounds: int = 12,
) -> dict[int, float]:
    """Return the seconds of a pass over N nodes a row with its KV writes, for N in ``widths``.

    Passes run inside a jitted ``fori_loop``, and each reads the tokens of the one before. Widths
    take turns, and the best of ``rounds`` counts.
    """
    runs = {width: passes(config, params, width, batch=batch, prefix=prefix) for width in widths}
    best = dict.fromkeys(widths, float("inf"))
    for _ in range(rounds):
        for width, run in runs.items():
            best[width] = min(best[width], run())
    return best


def passes(
    config: decoder.DecoderConfig,
    params: decoder.DecoderParams,
    width: int,
    *,
    batch: int = 1,
    prefix: int = 192,
) -> Callable[[], float]:
    """Return a compiled function that runs passes over ``width`` nodes and times one."""
    program = _program(config, width)
    cache = decoder.init_cache(config, batch, _CAPACITY)
    cache = cache.replace(length=jnp.full((batch,), prefix, jnp.int32))
    state = [program(params, cache, jnp.ones((batch, width), jnp.int32))]

    def run() -> float:
        start = time.perf_counter()
        state[0] = jax.block_until_ready(program(params, *state[0]))
        return (time.perf_counter() - start) / _LOOPS

    return run


def _program(config: decoder.DecoderConfig, width: int):
    tree = trees.from_parents(trees.chain(width - 1), width - 1)

    @functools.partial(jax.jit, donate_argnames="cache")
    def run(params, cache, tokens):
        return repeat(config, params, cache, tokens, tree, _LOOPS)

    return run


def repeat(
    config: decoder.DecoderConfig,
    params: decoder.DecoderParams,
    cache: kv_cache.KVCache,
    tokens: Array,
    tree: Tree,
    count: int,
) -> tuple[kv_cache.KVCache, Array]:
    """Run ``count`` passes over the nodes ``tokens`` [B, N] of ``tree``, each fed by the last.

    Every pass writes the KV of all its nodes, and the prefix keeps its length.
    """
    rows = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    none = jnp.zeros(tokens.shape[:1], jnp.int32)

    def body(_, carry):
        cache, tokens = carry
        out = decoder.forward(params, config, tokens, tree, cache)
        cache = kv_cache.append(cache, out.tree_kv, rows, none)
        return cache, jnp.argmax(out.logits, -1).astype(jnp.int32)

    return jax.lax.fori_loop(0, count, body, (cache, tokens))


def speedup_bound(
    acceptance_length: float, widening: float, draft_cost: float, depth: int
) -> float:
    """Return the largest speed-up of a chain of ``depth`` drafted tokens.

    Args:
      acceptance_length: tokens per round, bonus included.
      widening: V(K+1) / V(1).
      draft_cost: c, a pass of the draft model over a pass of the target.
      depth: K.
    """
    return acceptance_length / (widening + depth * draft_cost)


def logit_gap(
    config: decoder.DecoderConfig, params: decoder.DecoderParams, tokens: Sequence[int]
) -> float:
    """Return the difference of the two largest logits after ``tokens``."""
    length = len(tokens)
    padded = np.zeros((1, -(-length // 64) * 64), np.int32)
    padded[0, :length] = tokens
    size = padded.shape[1]
    tree = trees.from_parents(trees.chain(size - 1), size - 1)
    cache = decoder.init_cache(config, 1, 1)
    logits = _forward(params, config, jnp.array(padded), tree, cache)[0, length - 1]
    largest = jax.lax.top_k(logits, 2)[0]
    return float(largest[0] - largest[1])


@functools.partial(jax.jit, static_argnames="config")
def _forward(params, config, tokens, tree, cache):
    return decoder.forward(params, config, tokens, tree, cache).logits

"""The committed tokens that a drafter missed while nothing was drafted, and how it catches up.

In launches with K = 0 a network does not run, but the text grows. ``Drafter.missing`` counts the
tokens that it lacks. ``prefill`` processes them like a prompt, with the target's features at their
positions if the drafter reads any; those wait in ``DecodeState.missed`` until then.

That happens in a loop of zero or more turns and not in a branch: a loop updates a cache in place,
whereas a cache that leaves a branch is copied.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax

from jspec.core.types import Array, Drafter, History, Memory, Params, Target, TargetOutput, Verdict

SIZE = 32  # most missing tokens whose features wait

# The target's features of the missing positions, from slot 0: [B, SIZE, D] a captured layer.
Waiting = tuple[Array, ...]


def init(target: Target, drafter: Drafter, params: Params, batch: int) -> Waiting:
    """Return empty buffers."""
    if not drafter.capture_layers:
        return ()
    ids = jax.ShapeDtypeStruct((batch, SIZE), jnp.int32)
    like = jax.eval_shape(target.embed, params.target, ids)
    return tuple(jnp.zeros(like.shape, like.dtype) for _ in drafter.capture_layers)


def push(waiting: Waiting, missing: Array, out: TargetOutput, verdict: Verdict) -> Waiting:
    """Append the features of the accepted path to the ``missing`` [B] ones."""

    def put(buffer: Array, feature: Array) -> Array:
        fresh = jnp.take_along_axis(feature, verdict.path[..., None], 1).astype(buffer.dtype)
        write = functools.partial(lax.dynamic_update_slice_in_dim, axis=0)
        return jax.vmap(write)(buffer, fresh, missing)

    return tuple(map(put, waiting, out.features))


def catch_up(
    drafter: Drafter,
    params: Params,
    memory: Memory,
    waiting: Waiting,
    history: History,
    drafts: bool,
) -> Memory:
    """Return the drafter's memory after all missing tokens are processed, if that is needed.

    It is needed if the round ``drafts``, or if the buffers of features are full. Tokens are
    processed ``SIZE`` at a time, and the rest K + 1 at a time.
    """
    before = drafter.missing(memory, history)
    needed = drafts or before.max() >= SIZE
    step = drafter.max_depth + 1

    def stride(memory: Memory, size: int, rest: int) -> Memory:
        """Process ``size`` tokens at a time until at most ``rest`` are missing."""

        def behind(carry: tuple[Memory, Array]) -> Array:
            memory, turn = carry
            # A row of NaN never catches up, so the number of turns is bounded.
            more = (drafter.missing(memory, history) > rest).any()
            return needed & more & (turn <= before.max() // size)

        def advance(carry: tuple[Memory, Array]) -> tuple[Memory, Array]:
            memory, turn = carry
            left = drafter.missing(memory, history)
            first = history.length - 1 - left
            offset = jnp.arange(size + 1)
            chunk = jnp.take_along_axis(history.tokens, first[:, None] + offset, 1, mode="clip")
            slots = (before - left)[:, None] + offset[:-1]
            features = tuple(
                jnp.take_along_axis(buffer, slots[..., None], 1, mode="clip") for buffer in waiting
            )
            count = jnp.clip(left, 0, size)
            return drafter.prefill(params, memory, chunk, features, first, count), turn + 1

        return lax.while_loop(behind, advance, (memory, jnp.int32(0)))[0]

    if step < SIZE:
        memory = stride(memory, SIZE, step)
    return stride(memory, step, 0)

"""What a drafter that sits out has still to take in, and its way back to the text.

While nothing is drafted a network has nothing to do, but the text goes on. A drafter says how many
committed tokens are ``missing``; ``prefill``, which takes in a prompt, takes in these as well, with
the target's features at their positions where it reads any: those wait in buffers until then.

That happens outside of any branch, in a loop of no turns or more: what goes round a loop stays
where it is, and a cache that left a branch would be copied.
"""

from typing import Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax

from jspec.core.types import Array, Drafter, History, Memory, Params, Target, TargetOutput, Verdict

SIZE = 32  # committed tokens that are missing at most while features of theirs are waiting


@runtime_checkable
class Following(Protocol):
    """What a drafter has besides if it can miss rounds: of those it hears by ``prefill`` alone."""

    def missing(self, memory: Memory, history: History) -> Array:
        """int32 [B]: committed tokens that ``prefill`` must take in before the row can draft."""


@struct.dataclass
class Waiting:
    """The target's features that have not been taken in: of ``missing`` positions, from slot 0."""

    features: tuple[Array, ...]  # [B, SIZE, D], one for each captured layer


def init(drafter: Drafter, target: Target | None, params: Params, batch: int) -> Waiting:
    """Nothing waits. ``target`` may be None where the drafter reads no features."""
    if not drafter.capture_layers:
        return Waiting(())
    ids = jax.ShapeDtypeStruct((batch, SIZE), jnp.int32)
    like = jax.eval_shape(target.embed, params.target, ids)
    return Waiting(tuple(jnp.zeros(like.shape, like.dtype) for _ in drafter.capture_layers))


def push(waiting: Waiting, missing: Array, out: TargetOutput, verdict: Verdict) -> Waiting:
    """``waiting`` with the features of the accepted path behind the ``missing`` [B] ones."""

    def put(buffer: Array, feature: Array) -> Array:
        fresh = jnp.take_along_axis(feature, verdict.path[..., None], 1).astype(buffer.dtype)
        one = lambda buffer, fresh, slot: lax.dynamic_update_slice_in_dim(buffer, fresh, slot, 0)
        return jax.vmap(one)(buffer, fresh, missing)

    return Waiting(tuple(map(put, waiting.features, out.features)))


def catch_up(
    drafter: Drafter,
    params: Params,
    memory: Memory,
    waiting: Waiting,
    history: History,
    wanted: Array,
) -> Memory:
    """The drafter's memory once it has taken in all that is missing.

    Only where a draft is ``wanted`` (bool []) or there is no room for more features, once ``SIZE``
    tokens are missing. Runs of ``SIZE`` tokens go through the network at once, the rest K + 1 at a
    time.
    """
    before, needed = drafter.missing(memory, history), wanted
    if drafter.capture_layers:
        needed |= before.max() >= SIZE  # a run of them, and nothing is left
    step = drafter.max_depth + 1

    def stride(memory: Memory, size: int, rest: int) -> Memory:
        """Takes in ``size`` tokens at a time until no more than ``rest`` are missing."""

        def behind(carry: tuple[Memory, Array]) -> Array:
            memory, turn = carry
            # A row whose numbers are broken takes nothing in: turns are counted, or it would hang.
            more = (drafter.missing(memory, history) > rest).any()
            return needed & more & (turn <= before.max() // size)

        def take_in(carry: tuple[Memory, Array]) -> tuple[Memory, Array]:
            memory, turn = carry
            left = drafter.missing(memory, history)
            first = history.length - 1 - left
            offset = jnp.arange(size + 1)
            chunk = jnp.take_along_axis(history.tokens, first[:, None] + offset, 1, mode="clip")
            slots = (before - left)[:, None] + offset[:-1]
            features = tuple(
                jnp.take_along_axis(buffer, slots[..., None], 1, mode="clip")
                for buffer in waiting.features
            )
            count = jnp.clip(left, 0, size)
            return drafter.prefill(params, memory, chunk, features, first, count), turn + 1

        return lax.while_loop(behind, take_in, (memory, jnp.int32(0)))[0]

    if step < SIZE:
        memory = stride(memory, SIZE, step)
    return stride(memory, step, 0)

"""Instructions of a launch, counted in the compiler's texts. Compile time grows with them."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jspec.core.types import Params
from jspec.engine import pages, slots
from jspec.engine.loop import init_shared, launch
from jspec.engine.plan import Plan
from jspec.engine.profile import Profile, request_of
from tests import shipped

SLOTS, CAPACITY, PAGE_SIZE = 8, 256, 64


class Size(NamedTuple):
    """Lines of a program."""

    stablehlo: int
    hlo: int


def lowered(
    plan: Plan, params: Params, profile: Profile, rounds: Plan | None = None
) -> jax.stages.Lowered:
    """Lower a launch of ``SLOTS`` rows over pages, as an engine on a CPU runs it.

    ``params`` may be shapes. ``rounds`` is the plan of the rounds, if not ``plan``.
    """
    request, _ = request_of([None] * SLOTS, profile, plan.target.vocab_size)
    request = request.replace(keys=jax.vmap(jax.random.key)(jnp.arange(SLOTS)))

    empty = functools.partial(slots.allocate, plan, has_pages=False)
    state = jax.eval_shape(lambda given: empty(given, SLOTS, CAPACITY).detached(), params)
    num_pages = SLOTS * CAPACITY // PAGE_SIZE + 1
    caches = pages.shapes_of(plan, params, PAGE_SIZE)
    pools = functools.partial(pages.allocate, caches, (num_pages,), PAGE_SIZE, in_bits=True)
    state = state.replace(pools=jax.eval_shape(pools))
    return launch.lower(
        rounds or plan,
        profile,
        params,
        request,
        jax.eval_shape(lambda: init_shared(plan)),
        state,
        jnp.int32(0),
        jnp.zeros(SLOTS, bool),
        (jax.ShapeDtypeStruct((SLOTS, CAPACITY // PAGE_SIZE), jnp.int32),),
    )


def size_of(lowered: jax.stages.Lowered) -> Size:
    """Compile a lowered program with the options of users, and count its lines."""
    compiled = shipped.compiled(lowered)
    return Size(lowered.as_text().count("\n"), compiled.as_text().count("\n"))

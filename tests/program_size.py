"""Instructions of a launch, counted in the compiler's texts. Compile time grows with them."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jspec.core import kv_cache
from jspec.core.types import History, Params
from jspec.engine.loop import DecodeState, init_shared, launch
from jspec.engine.pages import page_layers
from jspec.engine.plan import Plan, RoundPlan
from jspec.engine.profile import Profile, request_of
from tests import shipped

SLOTS, CAPACITY, PAGE_SIZE = 8, 256, 64


class Size(NamedTuple):
    """Lines of a program."""

    stablehlo: int
    hlo: int


def lowered(
    plan: Plan, params: Params, profile: Profile, rounds: RoundPlan | None = None
) -> jax.stages.Lowered:
    """Lower a launch of ``SLOTS`` rows over pages, as an engine on a CPU runs it.

    ``params`` may be shapes. ``rounds`` is the plan of the rounds, if not ``plan``.
    """
    request, _ = request_of([None] * SLOTS, profile, plan.target.vocab_size)
    request = request.replace(keys=jax.vmap(jax.random.key)(jnp.arange(SLOTS)))

    def empty(params):
        return DecodeState(
            history=History(jnp.zeros((SLOTS, CAPACITY), jnp.int32), jnp.ones(SLOTS, jnp.int32)),
            cache=plan.target.init_cache(SLOTS, CAPACITY),
            memory=plan.drafter.init(params, request, CAPACITY),
            done=jnp.zeros(SLOTS, bool),
            round=jnp.int32(0),
        ).detached()

    state = jax.eval_shape(empty, params)
    num_pages = SLOTS * CAPACITY // PAGE_SIZE + 1
    layers = page_layers(plan, params, PAGE_SIZE)
    pool = functools.partial(kv_cache.allocate_pool, num_pages=num_pages, in_bits=True)
    state = state.replace(pools=tuple(jax.eval_shape(pool, each) for each in layers))
    return launch.lower(
        rounds or plan,
        profile,
        params,
        request,
        jax.eval_shape(lambda: init_shared(plan)),
        state,
        jnp.int32(0),
        jnp.zeros(SLOTS, bool),
        jax.ShapeDtypeStruct((SLOTS, CAPACITY // PAGE_SIZE), jnp.int32),
    )


def size_of(lowered: jax.stages.Lowered) -> Size:
    """Compile a lowered program with the options of users, and count its lines."""
    compiled = shipped.compiled(lowered)
    return Size(lowered.as_text().count("\n"), compiled.as_text().count("\n"))

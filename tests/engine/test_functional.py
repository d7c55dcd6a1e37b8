"""``jspec.decode``, ``step`` and ``generate``, called by scripts and inside ``jax.jit``."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jspec
from jspec.engine import functional as host
from jspec.engine.loop import init_shared
from jspec.engine.plan import Plan
from jspec.engine.sequences import SequenceParams
from tests import tiny

PLAN = Plan(tiny.TARGET, tiny.NGRAM)


def begun():
    """Return a new batch of one prompt, of which arguments may be consumed."""
    inputs = [SequenceParams((5, 7, 9, 5, 7), max_tokens=8, temperature=0.0)]
    return host.start(PLAN, tiny.params(), inputs)


def decoded(until):
    batch = begun()
    state = jspec.decode(PLAN, tiny.params(), batch.request, init_shared(PLAN), batch.state, until)[
        1
    ]
    return state.history.tokens, int(state.history.length[0])


def compilations(caplog, name):
    return len(re.findall(rf"Compiling jit\({name}\)", caplog.text))


def test_a_number_of_rounds_in_python_is_that_of_an_array_in_one_program(caplog):
    expected, length = decoded(jnp.int32(100))
    with jax.log_compiles():
        for until in (100, np.int64(100), np.int32(100), jnp.int32(100)):
            tokens, ends = decoded(until)
            assert ends == length and (tokens == expected).all()
    assert compilations(caplog, "decode") == 0
    jitted = jax.jit(jspec.decode, static_argnums=0)
    batch = begun()
    state = jitted(PLAN, tiny.params(), batch.request, init_shared(PLAN), batch.state, 100)[1]
    assert (state.history.tokens == expected).all()
    with pytest.raises(ValueError, match=r"until=1\.5 must be a whole number"):
        decoded(1.5)


def test_steps_in_a_script_are_traced_once_and_end_in_the_text_of_decode(caplog):
    expected, length = decoded(100)
    batch = begun()
    shared, state = init_shared(PLAN), batch.state
    with jax.log_compiles():
        while not bool(state.done.all()):
            before = state
            shared, state = jspec.step(PLAN, tiny.params(), batch.request, shared, state)
            assert not before.done.is_deleted()  # nothing is consumed
    assert int(state.history.length[0]) == length
    assert (state.history.tokens == expected).all()
    assert int(state.round) > 1 and compilations(caplog, "step") == 1


@pytest.mark.parametrize("traced", ["params", "prompts"])
def test_generate_under_jit_names_decode(traced):
    generate = functools.partial(jspec.generate, tiny.TARGET, max_new_tokens=2)
    call = lambda params: generate(params, [[1, 2]])
    value = tiny.params().target
    if traced == "prompts":
        call, value = lambda prompts: generate(tiny.params().target, prompts), jnp.ones((1, 2), int)
    message = f"{traced} holds traced arrays, but generate runs on the host; use jspec.decode"
    with pytest.raises(ValueError, match=message):
        jax.jit(call)(value)

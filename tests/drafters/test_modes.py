"""Tests of the switch between propose functions: its drafts, and the outputs of its branches."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec.core import trees
from jspec.core.history import root_alone
from jspec.core.types import Draft, History, Params
from jspec.drafters.base import modes

HISTORY = History(jnp.array([[4, 5, 6, 0]]), jnp.array([3]))
MEMORY = {"cache": jnp.arange(60.0).reshape(3, 20), "count": jnp.array([1]), "other": jnp.zeros(2)}
PARAMS = Params(None, {"vocabulary": jnp.arange(5)})


def alone(memory):
    """Return the draft of the root alone."""
    return root_alone(HISTORY), memory


def chain(depth, change=None, vocabulary=False):
    """Return a propose function that drafts 1, 2, ... and adds ``depth`` to one memory leaf."""

    def propose(memory):
        drafted = jnp.concatenate([jnp.array([[6]]), jnp.arange(1, depth + 1)[None]], 1)
        if change:
            memory = memory | {change: memory[change] + depth}
        return Draft(
            drafted,
            trees.chain(depth),
            jnp.ones_like(drafted, bool),
            jnp.ones((1, depth + 1, 5)),
            draft_to_target=PARAMS.drafter["vocabulary"] if vocabulary else None,
            max_depth=depth,
        ), memory

    return propose


PROPOSERS = [alone, chain(2, "count", True), chain(4, "other", True)]


@pytest.mark.parametrize("index", range(3))
def test_the_selected_function_drafts_and_padding_is_not_valid(index):
    draft, memory = jax.jit(lambda i: modes.switch(i, PROPOSERS, MEMORY, PARAMS)[0:2])(index)
    depth = (0, 2, 4)[index]
    np.testing.assert_array_equal(draft.tokens, [[6, *range(1, depth + 1), *[0] * (4 - depth)]])
    np.testing.assert_array_equal(draft.valid, [np.arange(5) <= depth])
    assert draft.max_depth == 4 and draft.logits.shape == (1, 5, 5)
    np.testing.assert_array_equal(draft.parents, trees.chain(4))
    np.testing.assert_array_equal(draft.draft_to_target, np.arange(5))
    changed = {1: "count", 2: "other"}.get(index)
    for name, value in MEMORY.items():
        np.testing.assert_array_equal(memory[name], value + depth * (name == changed))


def test_chains_stay_static_and_no_cache_leaves_a_branch():
    seen = {}

    def run(index):
        draft, memory = modes.switch(index, PROPOSERS, MEMORY, PARAMS)
        seen["parents"] = draft.parents
        return draft.tokens, memory["count"]

    program = jax.make_jaxpr(run)(0)
    assert isinstance(seen["parents"], np.ndarray)
    (switch,) = [line for line in program.jaxpr.eqns if line.primitive.name == "cond"]
    shapes = [out.aval.shape for out in switch.outvars]
    assert MEMORY["cache"].shape not in shapes and (5,) not in shapes


def test_trees_are_padded_with_invalid_nodes():
    def bush(memory):
        drafted = jnp.array([[6, 1, 2, 3]])
        return Draft(drafted, jnp.array([[-1, 0, 0, 1]]), drafted > 0, max_depth=2), memory

    for index, parents in enumerate(([-1, 0, 0, 0], [-1, 0, 0, 1])):
        proposers = [alone, bush]
        draft, _ = modes.switch(jnp.int32(index), proposers, MEMORY, PARAMS)
        np.testing.assert_array_equal(draft.parents, [parents])
        np.testing.assert_array_equal(draft.valid, [[True] + [bool(index)] * 3])

"""Grammars on the device: which tokens may come next, and where each of them leads.

A grammar is an automaton over token ids, compiled on the host (``jspec.grammar.automata``). Its transitions
are kept sparse, state by state, those of all grammars of a batch side by side: memory grows with
what the grammars allow, not with states times vocabulary. Along a branch of a draft the automaton
takes a step a token, so every drafted node knows what may come after it.
"""

import jax.numpy as jnp
from flax import struct

from jspec.core.types import Array

FREE = 0  # the state of rows without a grammar, where every token is allowed and leads back


@struct.dataclass
class Automaton:
    """The grammars of a batch, of S states and E transitions, sizes being rounded up."""

    first: Array  # [S + 1] int32, where the transitions of each state begin
    tokens: Array  # [E] int32, ascending in each state
    following: Array  # [E] int32, the states that they lead to
    # What a state allows, or what it forbids where that is less.
    first_listed: Array  # [S + 1] int32
    listed: Array  # [L] int32
    forbids: Array  # [S] bool
    start: Array  # [B] int32, of each row behind its prompt
    longest: int = struct.field(pytree_node=False)  # of the lists
    steps: int = struct.field(pytree_node=False)  # of a search among a state's transitions


def find(automaton: Automaton, state: Array, token: Array) -> tuple[Array, Array]:
    """Where ``token`` [...] leads from ``state`` [...], and whether it is allowed.

    A token that is not allowed leads to ``FREE``: nothing but a drafted node ever gets there, and
    it has no weight.
    """
    low, end = automaton.first[state], automaton.first[state + 1]
    high = end
    for _ in range(automaton.steps):
        middle = (low + high) // 2
        less = automaton.tokens[jnp.minimum(middle, automaton.tokens.size - 1)] < token
        inside = low < high
        low = jnp.where(inside & less, middle + 1, low)
        high = jnp.where(inside & ~less, middle, high)
    place = jnp.minimum(low, automaton.tokens.size - 1)
    found = (low < end) & (automaton.tokens[place] == token)
    following = jnp.where(found, automaton.following[place], FREE)
    return following, found | (state == FREE)


def forced(automaton: Automaton, state: Array) -> tuple[Array, Array]:
    """A token that may follow ``state`` [...], and whether it is the only one."""
    first = automaton.first[state]
    token = automaton.tokens[jnp.minimum(first, automaton.tokens.size - 1)]
    return token, automaton.first[state + 1] - first == 1


def advance(automaton: Automaton, state: Array, said: Array, valid: Array) -> Array:
    """The state after the ``valid`` ones of tokens ``said`` [..., M], in order, from ``state``."""
    for place in range(said.shape[-1]):
        following, _ = find(automaton, state, said[..., place])
        state = jnp.where(valid[..., place], following, state)
    return state


def allowed(automaton: Automaton, state: Array, vocab_size: int) -> Array:
    """Which tokens may come next: bool [B, F, V] of ``state`` [B, F]."""
    begin, end = automaton.first_listed[state], automaton.first_listed[state + 1]
    place = begin[..., None] + jnp.arange(automaton.longest)
    ids = automaton.listed[jnp.minimum(place, automaton.listed.size - 1)]
    ids = jnp.where(place < end[..., None], ids, vocab_size)
    rows, nodes = jnp.indices(state.shape, sparse=True)
    listed = jnp.zeros((*state.shape, vocab_size), bool)
    listed = listed.at[rows[..., None], nodes[..., None], ids].set(True, mode="drop")
    return listed ^ automaton.forbids[state][..., None]

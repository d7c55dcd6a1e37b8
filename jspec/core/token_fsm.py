"""Grammars on the device: the allowed tokens of each state, and the states that follow.

A grammar is an automaton over token ids, compiled on the host (``jspec.grammar.automata``). Its
transitions are sparse, and those of all grammars of a batch lie side by side: memory grows with the
allowed tokens, not with states times vocabulary. The automaton takes one step per token of a
branch, so every drafted node has its own state.
"""

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax

from jspec.core import trees
from jspec.core.branches import Branches
from jspec.core.types import Array, Draft, History, Tree

_WAYS = 64  # branches of a search: three steps suffice for 262,144 tokens, and compile fast
FREE = 0  # the state of sequences without a grammar: every token is allowed and leads back


@struct.dataclass
class Automaton:
    """The grammars of a batch, with S states and E transitions, both rounded up."""

    first: Array  # [S + 1] int32, where the transitions of each state begin
    tokens: Array  # [E] int32, ascending within a state
    following: Array  # [E] int32, next states
    # The allowed tokens of a state, or its forbidden tokens if those are fewer.
    first_listed: Array  # [S + 1] int32
    listed: Array  # [L] int32
    forbids: Array  # [S] bool
    start: Array  # [B] int32, the state after each prompt
    longest: int = struct.field(pytree_node=False)  # length of the longest list
    steps: int = struct.field(pytree_node=False)  # steps of a search in a state's transitions


def num_steps(longest: int) -> int:
    """Return the steps of a search among up to ``longest`` transitions of a state.

    >>> num_steps(1), num_steps(64), num_steps(65), num_steps(49_152)
    (1, 1, 2, 3)
    """
    steps = 1
    while _WAYS**steps < longest:
        steps += 1
    return steps


def find(automaton: Automaton, state: Array, token: Array) -> tuple[Array, Array]:
    """Return the state after ``token`` [...] in ``state`` [...], and whether it is allowed.

    A forbidden token leads to ``FREE``. Only drafted nodes of probability 0 get there.
    """
    low, end = automaton.first[state], automaton.first[state + 1]
    for power in reversed(range(automaton.steps)):
        # The first token that is not smaller is in one of _WAYS blocks; all blocks are compared.
        size = _WAYS**power
        last = low[..., None] + size * jnp.arange(1, _WAYS) - 1  # ends of all blocks but the last
        tokens = automaton.tokens[jnp.minimum(last, automaton.tokens.size - 1)]
        smaller = (last < end[..., None]) & (tokens < token[..., None])
        low += size * smaller.sum(-1, dtype=jnp.int32)
    index = jnp.minimum(low, automaton.tokens.size - 1)
    allowed = (low < end) & (automaton.tokens[index] == token)
    following = jnp.where(allowed, automaton.following[index], FREE)
    return following, allowed | (state == FREE)


def forced(automaton: Automaton, state: Array) -> tuple[Array, Array]:
    """Return a token that may follow ``state`` [...], and whether it is the only one."""
    first = automaton.first[state]
    token = automaton.tokens[jnp.minimum(first, automaton.tokens.size - 1)]
    return token, automaton.first[state + 1] - first == 1


def advance(automaton: Automaton, state: Array, tokens: Array, valid: Array) -> Array:
    """Return the state after the valid tokens of [..., M], in order."""
    automaton, tokens, valid = jax.tree.map(jnp.asarray, (automaton, tokens, valid))

    def step(index: Array, state: Array) -> Array:
        following, _ = find(automaton, state, tokens[..., index])
        return jnp.where(valid[..., index], following, state)

    if tokens.shape[-1] == 0:
        return state
    # Unrolled, the search would be compiled once for each token.
    return lax.fori_loop(0, tokens.shape[-1], step, state)


def allowed(automaton: Automaton, state: Array, vocab_size: int) -> Array:
    """Return the tokens that may follow ``state`` [B, F]: bool [B, F, V]."""
    begin, end = automaton.first_listed[state], automaton.first_listed[state + 1]
    index = begin[..., None] + jnp.arange(automaton.longest)
    ids = automaton.listed[jnp.minimum(index, automaton.listed.size - 1)]
    ids = jnp.where(index < end[..., None], ids, vocab_size)
    rows, nodes = jnp.indices(state.shape, sparse=True)
    listed = jnp.zeros((*state.shape, vocab_size), bool)
    listed = listed.at[rows[..., None], nodes[..., None], ids].set(True, mode="drop")
    return listed ^ automaton.forbids[state][..., None]


def first_state(automaton: Automaton | None) -> Array | None:
    """Return the states after the prompts, int32 [B]; None without grammars."""
    return None if automaton is None else automaton.start


def prune(automaton: Automaton, history: History, draft: Draft, tree: Tree) -> Draft:
    """Drop looked-up nodes that the grammar forbids, and their descendants.

    They could never be accepted. Drawn nodes stay: they come from a distribution over allowed
    tokens, and dropping a node for its drawn value would not be exact.
    """
    states = branch_states(automaton, Branches.of_draft(history, draft, tree))
    before = jnp.take_along_axis(states, tree.parents, 1)
    _, fits = find(automaton, before, draft.tokens)
    nodes = draft.tokens.shape[1]
    forbidden = ~fits & ~draft.drawn & (jnp.arange(nodes) > 0)
    above = trees.unpack_bits(tree.ancestors, nodes)
    return draft.replace(valid=draft.valid & ~(above & forbidden[:, None]).any(-1))


def force(automaton: Automaton, history: History, draft: Draft) -> Draft:
    """Extend a deterministic chain wherever the grammar allows a single token.

    Other drafts stay as they are: a distribution over allowed tokens drafts such tokens itself.
    """
    if draft.logits is not None or not trees.is_chain(draft.parents):
        return draft

    def step(node: Array, carry: tuple[Draft, Array]) -> tuple[Draft, Array]:
        draft, state = carry
        token, only = forced(automaton, state)
        drafted = draft.valid[:, node]
        token = jnp.where(drafted, draft.tokens[:, node], token)
        valid = draft.valid[:, node - 1] & (drafted | only)
        draft = draft.replace(
            tokens=draft.tokens.at[:, node].set(token), valid=draft.valid.at[:, node].set(valid)
        )
        return draft, find(automaton, state, token)[0]

    size = draft.tokens.shape[1]
    alone = draft.replace(parents=None)  # parents may be static
    automaton, *carry = jax.tree.map(jnp.asarray, (automaton, alone, history.state))
    alone, _ = lax.fori_loop(1, size, step, tuple(carry))
    return alone.replace(parents=draft.parents)


def branch_states(automaton: Automaton, branches: Branches) -> Array:
    """Return the states after the tokens of each branch: [B, F]."""
    drafted = branches.drafted
    start = jnp.broadcast_to(branches.history.state[:, None], drafted.shape[:2])
    return advance(automaton, start, drafted, drafted >= 0)

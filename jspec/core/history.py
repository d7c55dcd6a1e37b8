"""The committed tokens of every row: the root token, and the update by a verdict."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jspec.core import token_fsm, trees
from jspec.core.types import Array, Draft, History, Request, Tree, Verdict


def root_token(history: History) -> Array:
    """Return the last committed token of every row, [B]: node 0 of the next draft."""
    last = history.length[:, None] - 1
    return jnp.take_along_axis(history.tokens, last, 1, mode="promise_in_bounds")[:, 0]


def root_alone(history: History) -> Draft:
    """Return the draft of the root alone."""
    root = root_token(history)[:, None]
    return Draft(root, trees.chain(0), jnp.ones_like(root, dtype=bool))


def with_root(draft: Draft, history: History) -> Draft:
    """Return ``draft`` with the last committed token at node 0."""
    is_root = jnp.arange(draft.tokens.shape[1]) == 0
    return draft.replace(tokens=jnp.where(is_root, root_token(history)[:, None], draft.tokens))


def trim_draft(request: Request, history: History, draft: Draft, tree: Tree, done: Array) -> Draft:
    """Drop nodes past a row's length limit, and all nodes of rows that are ``done``.

    In dynamic trees, nodes deeper than ``max_depth`` or detached from the root are dropped too;
    they cannot raise on the device. The decision never reads token values, so rules stay exact.
    """
    remaining = request.max_length - history.length  # the last of these tokens is never drafted
    reachable = (tree.depth < remaining[:, None]) & ~done[:, None]
    if not isinstance(tree.depth, np.ndarray):
        reachable &= (tree.depth <= tree.max_depth) & (tree.ancestors[..., 0] & 1 > 0)
    return draft.replace(valid=draft.valid & reachable)


def extend_history(
    request: Request, history: History, draft: Draft, verdict: Verdict
) -> tuple[History, Verdict, Array]:
    """Append the emitted tokens, clipped at stop tokens and length limits.

    Returns the history, the clipped verdict, and bool [B]: rows that finished in this round, at a
    stop token, at the limit, or where every token has probability 0. A clipped row ends with a
    drafted token, so its new root is on the path.
    """
    emitted = emitted_tokens(draft, verdict)
    index = jnp.arange(emitted.shape[1])
    room = jnp.maximum(request.max_length - history.length, 0)  # idle slots have no limit
    count = jnp.minimum(verdict.num_emitted, room)
    degenerate = jnp.zeros(count.shape, bool)
    if verdict.num_valid is not None:
        degenerate = verdict.num_valid < count
        count = jnp.minimum(count, verdict.num_valid)
    stops = (emitted[:, :, None] == request.stop_tokens[:, None, :]).any(-1)
    stops &= index < count[:, None]
    stopped = stops.any(-1)
    count = jnp.where(stopped, jnp.argmax(stops, -1) + 1, count).astype(jnp.int32)

    write = jax.vmap(lambda row, new, start: lax.dynamic_update_slice(row, new, (start,)))
    state = history.state
    if state is not None:
        grammars = request.sampling.automaton
        state = token_fsm.advance(grammars, state, emitted, index < count[:, None])
    extended = History(
        write(history.tokens, emitted, history.length), history.length + count, state
    )
    finished = stopped | degenerate | (extended.length >= request.max_length)
    return extended, verdict.replace(num_emitted=count), finished


def is_ended(request: Request, history: History) -> Array:
    """Return bool [B]: rows at a stop token or their limit, which a cancellation lowers.

    Rows that finished because every token had probability 0 are not detected.
    """
    last = root_token(history)[:, None]
    return (history.length >= request.max_length) | (last == request.stop_tokens).any(-1)


def emitted_tokens(draft: Draft, verdict: Verdict) -> Array:
    """Return the emitted tokens [B, K+1]; the first ``num_emitted`` of each row are defined."""
    path = verdict.path[:, 1:]
    accepted = jnp.take_along_axis(draft.tokens, path, 1, mode="promise_in_bounds")
    accepted = jnp.pad(accepted, ((0, 0), (0, 1)))
    is_last = jnp.arange(accepted.shape[1]) == verdict.num_emitted[:, None] - 1
    return jnp.where(is_last, verdict.next_token[:, None], accepted)

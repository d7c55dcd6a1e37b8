"""The history of committed tokens: its root, and its growth by one verdict."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jspec.core import token_fsm
from jspec.core.types import Array, Draft, History, Request, Tree, Verdict


def root_token(history: History) -> Array:
    """The last committed token of every row, [B]: node 0 of the next draft."""
    return jnp.take_along_axis(history.tokens, history.length[:, None] - 1, 1)[:, 0]


def with_root(draft: Draft, history: History) -> Draft:
    """The draft under the last committed token, whatever its drafter took for the root."""
    is_root = jnp.arange(draft.tokens.shape[1]) == 0
    return draft.replace(tokens=jnp.where(is_root, root_token(history)[:, None], draft.tokens))


def trim_draft(request: Request, history: History, draft: Draft, tree: Tree, done: Array) -> Draft:
    """Drops nodes that could never be emitted: past a row's limit, or in a row that is done.

    So are those of a traced tree, which cannot be refused, that are deeper than ``max_depth`` or do
    not hang under the root. A test of shape alone, blind to the values drawn: no rule loses its
    exactness by it.
    """
    room = request.max_length - history.length  # tokens still wanted; the last is never drafted
    useful = (tree.depth < room[:, None]) & ~done[:, None]
    if not isinstance(tree.depth, np.ndarray):
        useful &= (tree.depth <= tree.max_depth) & (tree.ancestors[..., 0] & 1 > 0)
    return draft.replace(valid=draft.valid & useful)


def extend_history(
    request: Request, history: History, draft: Draft, verdict: Verdict
) -> tuple[History, Verdict, Array]:
    """Appends what a verdict emits, clipped at stop tokens and limits.

    Returns:
      The history, the clipped verdict, and which rows [B] ended in this round: those that said a
      stop token, reached their limit, or came to where no token has any weight. A clipped row ends
      with a drafted token, so the last token of its verdict is on the path and is its new root.
    """
    emitted = emitted_tokens(draft, verdict)
    index = jnp.arange(emitted.shape[1])
    count = jnp.minimum(verdict.num_emitted, request.max_length - history.length)
    lost = jnp.zeros(count.shape, bool)
    if verdict.num_valid is not None:
        lost = verdict.num_valid < count
        count = jnp.minimum(count, verdict.num_valid)
    stops = (emitted[:, :, None] == request.stop_tokens[:, None, :]).any(-1)
    stops &= index < count[:, None]
    stopped = stops.any(-1)
    count = jnp.where(stopped, jnp.argmax(stops, -1) + 1, count).astype(jnp.int32)

    write = jax.vmap(lambda row, new, start: lax.dynamic_update_slice(row, new, (start,)))
    state = history.state
    if state is not None:
        grammars = request.sampling.processors.automaton
        state = token_fsm.advance(grammars, state, emitted, index < count[:, None])
    grown = History(write(history.tokens, emitted, history.length), history.length + count, state)
    ended = stopped | lost | (grown.length >= request.max_length)
    return grown, verdict.replace(num_emitted=count), ended


def is_ended(request: Request, history: History) -> Array:
    """Rows [B] that have said their last token, or were cancelled, which moves their limit.

    Those that came to where no token has any weight do not show.
    """
    last = root_token(history)[:, None]
    return (history.length >= request.max_length) | (last == request.stop_tokens).any(-1)


def emitted_tokens(draft: Draft, verdict: Verdict) -> Array:
    """The tokens a verdict emits, [B, K+1], defined for the first ``num_emitted`` of each row."""
    accepted = jnp.take_along_axis(draft.tokens, verdict.path, 1)[:, 1:]
    accepted = jnp.pad(accepted, ((0, 0), (0, 1)))
    is_last = jnp.arange(accepted.shape[1]) == verdict.num_emitted[:, None] - 1
    return jnp.where(is_last, verdict.next_token[:, None], accepted)

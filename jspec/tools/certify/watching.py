"""One round of the shipped loop, and how each of its drawn tokens lies in the law recorded for it.

Whatever the law, the place of a draw in it is uniform on [0, 1): the mass of the tokens before it,
and a random share of its own (the probability integral transform). Tokens are ordered in two ways,
in which errors of unlike contexts add up: the likeliest first, as a token that is drawn too cool
comes too early in all of them; and by id, as one coin that serves twice falls to the same place.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax

from jspec.core import sampling, trees
from jspec.core.history import root_token
from jspec.core.types import (
    Array,
    Draft,
    Drafter,
    History,
    MultiMode,
    Params,
    Request,
    Shared,
    Tree,
)
from jspec.engine.loop import DecodeState, step
from jspec.engine.plan import Plan

# What a draft must fulfil whatever its law, in words for whoever broke it.
CONDITIONS = (
    "node 0 is the last committed token and valid",
    "tokens are ids of the vocabulary",
    "parents precede their children",
    "the parent of a valid node is valid",
    "no node lies deeper than max_depth",
    "valid siblings hold different tokens",
    "a chain has no siblings",
    "the law recorded for a drawn node can be normalised",
    "the law recorded for a drawn node gives its token some probability",
)


@struct.dataclass
class Watched:
    """What a round showed. Nodes that were not drawn, or not valid, have the place NaN."""

    broken: Array  # [B, len(CONDITIONS)] bool
    valid: Array  # [B, N] bool
    places: Array  # [B, N, 2] float32 in [0, 1): the likeliest tokens first, and by id
    uniforms: (
        Array  # [B, N+1] float32, what the verifier draws from: a coin a node, then the residual
    )
    probability: Array  # [B, N] float32, of the drawn token by the recorded law
    # [B, N, 2] float32: how far the drawn token is from the one that the recorded law and the noise
    # of jspec.sampling give, by inverse CDF (``round_noise_at``, in mass) and by Gumbel-max
    # (``node_noise``, in log-weights). 0: it is that token.
    misses: Array


@dataclasses.dataclass(frozen=True)
class Observer:
    """A drafter in place of ``inner`` that keeps the round's draft in its memory."""

    inner: Drafter
    noise: str = "own"  # what ``inner`` has was decided before

    max_depth = property(lambda self: self.inner.max_depth)
    tree_size = property(lambda self: self.inner.tree_size)
    capture_layers = property(lambda self: self.inner.capture_layers)
    proposal = property(lambda self: self.inner.proposal)
    init = property(lambda self: self.inner.init)
    prefill = property(lambda self: self.inner.prefill)

    def propose(
        self, params: Params, request: Request, shared: Shared, memory: Any, history: History
    ) -> tuple[Draft, Any]:
        """The inner drafter's draft, kept besides."""
        draft, memory = self.inner.propose(params, request, shared, memory, history)
        return draft, (memory, draft)

    def update(self, params, request, shared, memory, history, draft, verdict, out):
        """The inner drafter's."""
        inner, kept = memory
        inner, shared = self.inner.update(
            params, request, shared, inner, history, draft, verdict, out
        )
        return (inner, kept), shared


def observed(plan: Plan) -> Plan:
    """The plan whose steps ``watch`` can look into; of several gears those of the last."""
    if isinstance(plan.drafter, MultiMode):
        plan = plan.in_mode(plan.drafter.modes[-1])
    size = plan.drafter.tree_size
    return dataclasses.replace(
        plan, drafter=Observer(plan.drafter), node_buckets=(size,), record_rounds=0
    )


@functools.partial(jax.jit, static_argnames="plan")
def watch(
    plan: Plan, params: Params, request: Request, shared: Shared, state: DecodeState, uniform: Array
) -> tuple[Shared, DecodeState, Watched]:
    """One ``step`` of an ``observed`` plan; nothing is consumed.

    ``uniform`` [B, N] are the shares of the drawn tokens' own mass, of any noise but the loop's.
    """
    history, root = state.history, state.history.length - 1
    shared, state = step(plan, params, request, shared, state)
    memory, draft = state.memory
    count = plan.drafter.tree_size
    uniforms = sampling.round_noise(request.keys, root, sampling.ACCEPT, count)
    residual = sampling.round_noise(request.keys, root, sampling.RESIDUAL, 1)
    uniforms = jnp.concatenate([uniforms, residual], 1)[..., 0]
    tree = trees.broadcast(trees.from_parents(draft.parents, draft.max_depth), len(state.done))
    broken, places, probability, misses = _judged(
        plan, request.keys, root, root_token(history), draft, tree, uniform
    )
    seen = Watched(broken, draft.valid, places, uniforms, probability, misses)
    return shared, state.replace(memory=memory), seen


def _judged(plan: Plan, keys, root, root_token, draft: Draft, tree: Tree, uniform: Array):
    """The conditions that are broken, and each node's place, probability and misses."""
    drafter, index = plan.drafter, jnp.arange(plan.drafter.tree_size)
    drawn = _drawn(drafter, draft) & draft.valid & (index > 0)
    parents = jnp.broadcast_to(draft.parents, draft.tokens.shape)  # as given, the root's included
    up = jnp.clip(parents, 0)
    take = lambda x: jnp.take_along_axis(x, jnp.clip(up, 0, x.shape[1] - 1), 1)
    inner = index > 0
    siblings = (up[:, :, None] == up[:, None, :]) & draft.valid[:, :, None] & draft.valid[:, None]
    siblings &= (index[:, None] < index) & inner[:, None]  # [B, N, N], the earlier one first
    same = siblings & (draft.tokens[:, :, None] == draft.tokens[:, None, :])
    any_of = lambda x: x.reshape(len(x), -1).any(-1)
    size = plan.target.vocab_size
    broken = [
        (draft.tokens[:, 0] != root_token) | ~draft.valid[:, 0],
        any_of((draft.tokens < 0) | (draft.tokens >= size)),
        any_of(inner & ((parents < 0) | (parents >= index))),
        any_of(inner & draft.valid & ~take(draft.valid)),
        any_of(draft.valid & (tree.depth > drafter.max_depth)),
        any_of(same) & (drafter.proposal != "iid"),
        any_of(siblings) & (drafter.proposal == "chain"),
    ]
    shape = draft.tokens.shape
    if draft.logits is None:
        none = jnp.full(shape, jnp.nan)
        broken += [any_of(drawn), jnp.zeros(len(root), bool)]
        return jnp.stack(broken, 1), jnp.stack([none] * 2, -1), none, jnp.stack([none] * 2, -1)
    removed = _removed(drafter.proposal, draft, drawn, siblings)
    one = lambda node: _placed(keys, root, draft, up, removed, uniform, node)
    found = lax.map(one, index)  # node by node: [N, B], with a law of one node a row in memory
    normal, places, probability, misses = jax.tree.map(lambda x: jnp.moveaxis(x, 0, 1), found)
    broken += [any_of(drawn & ~normal), any_of(drawn & normal & ~(probability > 0))]
    fair = drawn & normal & (probability > 0)
    shown = lambda x: jnp.where(fair.reshape(*shape, *[1] * (x.ndim - 2)), x, jnp.nan)
    return jnp.stack(broken, 1), shown(places), shown(probability), shown(misses)


def _drawn(drafter: Drafter, draft: Draft) -> Array:
    """Which nodes are said to be draws from a recorded law: bool [B, N]."""
    if drafter.proposal in ("point", "pruned"):  # whatever is recorded, no rule reads it
        return jnp.zeros(draft.tokens.shape, bool)
    return draft.drawn


def _removed(proposal: str, draft: Draft, drawn: Array, siblings: Array) -> Array:
    """Whose tokens are not in the law of node j any more: bool [B, N, N], entry [i, j] of node i.

    Point masses are none of what is drawn beside them, unless they came last; what was drawn before
    was not drawn again, unless it was put back.
    """
    before = siblings & drawn[:, :, None]
    if proposal == "iid":
        before = jnp.zeros_like(before)
    beside = (siblings | jnp.swapaxes(siblings, 1, 2)) & ~drawn[:, :, None]
    if draft.sampled is None or proposal == "points_last":
        beside = jnp.zeros_like(beside)
    return before | beside


def _placed(keys, root, draft: Draft, up: Array, removed: Array, uniform: Array, node: Array):
    """Of one node, the same for all rows: whether there is a law; places, probability, misses."""
    above = up[:, node]
    row = jnp.take_along_axis(draft.logits, above[:, None, None], 1, mode="clip")[:, 0]
    row = row.astype(jnp.promote_types(row.dtype, jnp.float32))
    size = row.shape[-1]
    ids, known = _own_ids(draft, size)
    gone = jnp.where(removed[:, :, node] & known, ids, size)
    row = row.at[jnp.arange(len(row))[:, None], gone].set(-jnp.inf, mode="drop")
    peak = row.max(-1)
    normal = (peak > -jnp.inf) & (peak < jnp.inf) & ~jnp.isnan(row).any(-1)
    normal &= above < draft.logits.shape[1]
    distribution = jax.nn.softmax(row, -1)
    token = ids[:, node, None]
    at_token = lambda x: jnp.take_along_axis(x, token, 1)
    own = jnp.where(known[:, node, None], at_token(distribution), 0)
    ids_before = jnp.arange(size) < token
    likelier = (distribution > own) | ((distribution == own) & ids_before)
    mass = lambda which: jnp.where(which, distribution, 0).sum(-1)
    low, share = mass(ids_before), uniform[:, node] * own[:, 0]
    places = jnp.stack([mass(likelier) + share, low + share], -1)
    places = jnp.clip(places, 0, 1 - 2**-24)

    drafted = sampling.round_noise_at(keys, root, sampling.DRAFT, above[:, None])[:, 0, 0]
    by_uniform = jnp.maximum(jnp.maximum(low - drafted, drafted - low - own[:, 0]), 0)
    scores = row + sampling.node_noise(keys, root, above[:, None], size)[:, 0].astype(row.dtype)
    by_gumbel = scores.max(-1) - at_token(scores)[:, 0]
    return normal, places, own[:, 0], jnp.stack([by_uniform, by_gumbel], -1)


def _own_ids(draft: Draft, size: int) -> tuple[Array, Array]:
    """The tokens in the draft's own vocabulary [B, N], and which of them are in it."""
    if draft.draft_to_target is None:
        known = (draft.tokens >= 0) & (draft.tokens < size)
        return jnp.clip(draft.tokens, 0, size - 1), known
    ids = jnp.searchsorted(draft.draft_to_target, draft.tokens)
    ids = jnp.clip(ids, 0, size - 1).astype(jnp.int32)
    return ids, draft.draft_to_target[ids] == draft.tokens

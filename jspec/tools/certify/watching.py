"""One round of the shipped loop, and the quantile of each drawn token in its distribution.

The quantile of a draw is the mass of the tokens before it, plus a random share of its own. It is
uniform on [0, 1), whatever the distribution (the probability integral transform). Tokens are
ordered in two ways, so that errors of different contexts add up. Likeliest first: a token drawn too
cool comes too early in every context. By id: a uniform that is used twice gives the same quantile.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax

from jspec.core import sampling, trees
from jspec.core.history import root_token
from jspec.core.types import Array, Draft, Drafter, Params, Request, Shared, Tree
from jspec.engine.plan import Plan
from jspec.engine.round import DecodeState, step
from jspec.util.promotion import standard_promotion

# Conditions that every draft must meet, in words for its author.
CONDITIONS = (
    "node 0 is the last committed token and valid",
    "tokens are ids of the vocabulary",
    "parents precede their children",
    "the parent of a valid node is valid",
    "no node lies deeper than max_depth",
    "valid siblings hold different tokens",
    "a chain has no siblings",
    "the distribution recorded for a drawn node can be normalised",
    "the distribution recorded for a drawn node gives its token some probability",
)


@struct.dataclass
class Observation:
    """Measurements of a round. Nodes that were not drawn, or are not valid, have NaN."""

    broken: Array  # [B, len(CONDITIONS)] bool
    valid: Array  # [B, N] bool
    quantiles: Array  # [B, N, 2] float32 in [0, 1): likeliest tokens first, and by id
    uniforms: Array  # [B, N] float32, the verifier's, one per node
    # [B, N] float32 in [0, 1): quantile by id of the token that the noise of the residual would
    # draw from the distribution of each node.
    residual: Array
    probability: Array  # [B, N] float32, of the drawn token in the recorded distribution
    # [B, N, 2] float32: by how much log-weights must change until the recorded distribution gives
    # the drawn token by the noise of jspec.core.sampling: of ``draw``, and of ``node_noise``.
    misses: Array


@dataclasses.dataclass(frozen=True)
class Observer(Drafter):
    """A drafter in place of ``inner`` that keeps the round's draft in its memory."""

    inner: Drafter
    noise: str = "own"  # the plan has set the noise of ``inner`` already

    max_depth = property(lambda self: self.inner.max_depth)
    tree_size = property(lambda self: self.inner.tree_size)
    capture_layers = property(lambda self: self.inner.capture_layers)
    proposal = property(lambda self: self.inner.proposal)
    init = property(lambda self: self.inner.init)
    prefill = property(lambda self: self.inner.prefill)

    def propose(self, params, request, shared, memory, history):
        """Propose the inner drafter's draft, and keep it."""
        draft, memory = self.inner.propose(params, request, shared, memory, history)
        return draft, (memory, jax.tree.map(jnp.asarray, draft))  # as parts of a state are

    def update(self, round):
        """Update the inner drafter."""
        inner, last_draft = round.memory
        inner, shared = self.inner.update(round.replace(memory=inner))
        return (inner, last_draft), shared


def observed(plan: Plan) -> Plan:
    """Return the plan whose steps ``watch`` can look into."""
    size = plan.drafter.tree_size
    return Plan(plan.target, Observer(plan.drafter), plan.rule, (size,), packed=plan.packed)


@functools.partial(jax.jit, static_argnames="plan")
@standard_promotion
def watch(
    plan: Plan, params: Params, request: Request, shared: Shared, state: DecodeState, share: Array
) -> tuple[Shared, DecodeState, Observation]:
    """Run one ``step`` of an ``observed`` plan; no argument is donated.

    ``share`` [B, N, 2] is the random share of the own mass of two tokens: the drawn one, and the
    one that the noise of the residual would draw. It is independent of the loop.
    """
    history, root = state.history, state.history.length - 1
    shared, state = step(plan, params, request, shared, state)
    memory, draft = state.memory
    count = plan.drafter.tree_size
    uniforms = sampling.round_noise(request.keys, root, sampling.ACCEPT, count)[..., 0]
    tree = trees.broadcast(trees.from_parents(draft.parents, draft.max_depth), len(state.done))
    drawn = draft.drawn & draft.valid & (jnp.arange(count) > 0)
    structure = _structure(plan, root_token(history), draft, tree)
    broken, (quantiles, residual, probability, misses) = _measure(
        request.keys, root, draft, drawn, plan.drafter.proposal, share
    )
    broken = jnp.concatenate([structure, broken], 1)
    seen = Observation(broken, draft.valid, quantiles, uniforms, residual, probability, misses)
    return shared, state.replace(memory=memory), seen


def _structure(plan: Plan, root_token: Array, draft: Draft, tree: Tree) -> Array:
    """The broken conditions of ``CONDITIONS`` but for the last two: [B, 7]."""
    drafter, index = plan.drafter, jnp.arange(plan.drafter.tree_size)
    parents = jnp.broadcast_to(draft.parents, draft.tokens.shape)  # as drafted, before corrections
    inner = index > 0
    siblings = _siblings(draft)
    same = siblings & (draft.tokens[:, :, None] == draft.tokens[:, None, :])
    parent_valid = jnp.take_along_axis(draft.valid, jnp.clip(parents, 0, len(index) - 1), 1)
    any_of = lambda x: x.reshape(len(x), -1).any(-1)
    conditions = [
        (draft.tokens[:, 0] != root_token) | ~draft.valid[:, 0],
        any_of((draft.tokens < 0) | (draft.tokens >= plan.target.vocab_size)),
        any_of(inner & ((parents < 0) | (parents >= index))),
        any_of(inner & draft.valid & ~parent_valid),
        any_of(draft.valid & (tree.depth > drafter.max_depth)),
        any_of(same),
        any_of(siblings) & (drafter.proposal == "chain"),
    ]
    return jnp.stack(conditions, 1)


def _siblings(draft: Draft) -> Array:
    """Valid node i is an earlier sibling of valid node j: bool [B, N, N]."""
    parents = jnp.clip(jnp.broadcast_to(draft.parents, draft.tokens.shape), 0)
    index = jnp.arange(parents.shape[1])
    siblings = parents[:, :, None] == parents[:, None, :]
    siblings &= draft.valid[:, :, None] & draft.valid[:, None]
    return siblings & (index[:, None] < index) & (index > 0)[:, None]


def _measure(keys, root, draft: Draft, drawn: Array, proposal: str, share: Array):
    """The last two conditions [B, 2], and the last four measurements of the drawn nodes."""
    shape = draft.tokens.shape
    if draft.logits is None or proposal == "deterministic":  # no rule reads what is recorded
        none = jnp.full((*shape, 2), jnp.nan)
        return jnp.zeros((len(root), 2), bool), (none, none[..., 0], none[..., 0], none)
    parents = jnp.clip(jnp.broadcast_to(draft.parents, shape), 0)
    removed = _removed(proposal, draft, drawn)
    # Node by node, so that one distribution per row is in memory: [N, B] to [B, N].
    nodes = lax.map(
        lambda node: _quantile(keys, root, draft, parents, removed, share, node),
        jnp.arange(shape[1]),
    )
    normal, *values = jax.tree.map(lambda x: jnp.moveaxis(x, 0, 1), nodes)
    possible = values[2] > 0
    broken = jnp.stack([(drawn & ~normal).any(1), (drawn & normal & ~possible).any(1)], 1)
    usable = drawn & normal & possible
    return broken, tuple(
        jnp.where(usable.reshape(*shape, *[1] * (x.ndim - 2)), x, jnp.nan) for x in values
    )


def _removed(proposal: str, draft: Draft, drawn: Array) -> Array:
    """The token of node i is removed from the distribution of node j: bool [B, N, N].

    Tokens drawn before are not drawn again. Deterministic siblings are not drawn either, unless
    they come last.
    """
    siblings = _siblings(draft)
    before = siblings & drawn[:, :, None]
    if draft.sampled is None or proposal == "deterministic_last":
        return before
    return before | (siblings | jnp.swapaxes(siblings, 1, 2)) & ~drawn[:, :, None]


def _quantile(keys, root, draft: Draft, parents: Array, removed: Array, share: Array, node: Array):
    """One node of all rows: has a distribution [B], then the last four of an ``Observation``."""
    parent = parents[:, node]
    row = jnp.take_along_axis(draft.logits, parent[:, None, None], 1, mode="clip")[:, 0]
    row = row.astype(jnp.promote_types(row.dtype, jnp.float32))
    size = row.shape[-1]
    ids, known = _draft_ids(draft, size)
    excluded = jnp.where(removed[:, :, node] & known, ids, size)
    row = row.at[jnp.arange(len(row))[:, None], excluded].set(-jnp.inf, mode="drop")
    peak = row.max(-1)
    normal = (peak > -jnp.inf) & (peak < jnp.inf) & ~jnp.isnan(row).any(-1)
    normal &= parent < draft.logits.shape[1]
    probs = jax.nn.softmax(row, -1)
    token = ids[:, node, None]
    at_token = lambda x: jnp.take_along_axis(x, token, 1)
    p = jnp.where(known[:, node, None], at_token(probs), 0)
    smaller_id = jnp.arange(size) < token
    likelier = (probs > p) | ((probs == p) & smaller_id)
    mass = lambda tokens: jnp.where(tokens, probs, 0).sum(-1)
    own_share = share[:, node, 0] * p[:, 0]
    quantiles = jnp.stack([mass(likelier) + own_share, mass(smaller_id) + own_share], -1)

    key = sampling.round_noise(keys, root, sampling.RESIDUAL, 1)[:, 0]
    other = sampling.draw(row, key)[:, None]
    own_share = share[:, node, 1] * jnp.take_along_axis(probs, other, 1)[:, 0]
    residual = mass(jnp.arange(size) < other) + own_share

    key = sampling.round_noise_at(keys, root, sampling.DRAFT, parent[:, None])[:, 0]
    by_key = sampling.draw_gap(row, key, token[:, 0])
    scores = row + sampling.node_noise(keys, root, parent[:, None], size)[:, 0].astype(row.dtype)
    by_node = scores.max(-1) - at_token(scores)[:, 0]
    inside = lambda x: jnp.clip(x, 0, 1 - 2**-24)
    misses = jnp.stack([by_key, by_node], -1)
    return normal, inside(quantiles), inside(residual), p[:, 0], misses


def _draft_ids(draft: Draft, size: int) -> tuple[Array, Array]:
    """Draft vocabulary ids of the tokens [B, N], and whether the vocabulary holds them."""
    if draft.draft_to_target is None:
        known = (draft.tokens >= 0) & (draft.tokens < size)
        return jnp.clip(draft.tokens, 0, size - 1), known
    ids = jnp.searchsorted(draft.draft_to_target, draft.tokens)
    ids = jnp.clip(ids, 0, size - 1).astype(jnp.int32)
    return ids, draft.draft_to_target[ids] == draft.tokens

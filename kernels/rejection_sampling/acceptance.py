"""Acceptance on scalars, and the draw of the next token: shared by the kernels of all devices.

1. One pass over all rows measures thresholds and log-totals (kernel ``distributions``).
2. Acceptance works on scalars: peaks and log-totals give p and q of the drafted tokens. Refusals
   change the distribution of one node per row, and kernel ``masses`` sums its new mass. No
   distribution is ever stored.
3. The draw is that of ``jspec.core.sampling.draw``: a segment of the final distribution by its
   mass, then a token of the segment.
"""

import jax
import jax.numpy as jnp
from jax import lax

from jspec.core import sampling
from jspec.kernels.rejection_sampling.distributions import (
    DraftDistribution,
    Filters,
    Form,
    Proposal,
    Refusal,
    weights,
)
from jspec.kernels.rejection_sampling.rows import (
    Children,
    End,
    Kernels,
    Rows,
    children_of,
    no_refusal,
    where,
)
from jspec.kernels.rejection_sampling.traversal import traverse

Array = jax.Array


def rejection_sampling(
    kernels: Kernels,
    logits: Array,
    filters: Filters,
    proposal: Proposal,
    uniforms: Array,
    uniform: Array | None,
    form: Form,
) -> tuple[Array, Array, Array]:
    """Judge and draw as the reference does, in float32, without storing a distribution.

    Without ``uniform`` the distribution at the end is stored, and returned in place of a token.
    """
    batch, nodes, vocab = logits.shape
    flat = logits.reshape(batch * nodes, vocab)
    per_node = Filters(*(jnp.repeat(x, nodes) for x in filters[:4]), filters.names)
    draft_logits = draft = None
    if proposal.logits is not None:
        draft_logits = proposal.logits.reshape(batch * nodes, vocab)
        measured = kernels.distributions(draft_logits, None)
        draft = DraftDistribution(measured.peak, measured.log_total)
    target = kernels.distributions(flat, per_node)
    rows = Rows(flat, draft_logits, target, draft, nodes, kernels)
    judge = {"rejection": _walk, "block": traverse}[form.rule]
    end = judge(rows, proposal, uniforms.astype(jnp.float32), form)
    return end.path, end.num_accepted, _draw(rows, end, uniform)


# ------------------------------------------------------------------- child by child, down a tree


def _walk(rows: Rows, proposal: Proposal, uniforms: Array, form: Form) -> End:
    """Recursive rejection sampling from the root down, while some row descends."""
    batch = proposal.tokens.shape[0]

    def descend(carry):
        depth, active, end = carry
        children = children_of(rows, proposal, uniforms, end.node, form.max_children)
        children = children._replace(exists=children.exists & active[:, None])
        accepted, child, absent, refusals = _judge(rows, children, end.node, form)
        path = end.path.at[:, depth + 1].set(jnp.where(accepted, child, 0), mode="drop")
        node = jnp.where(accepted, child, end.node)
        changes = jax.tree.map(
            lambda new, old: jnp.where(active, new, old),
            (absent, refusals),
            (end.absent, end.refusals),
        )
        return depth + 1, accepted, End(node, path, end.num_accepted + accepted, *changes)

    zero = jnp.zeros((batch,), jnp.int32)
    path = jnp.zeros((batch, form.max_depth + 1), jnp.int32)
    absent = (zero,) * (form.max_children - 1 if form.mixed else 0)
    root = End(zero, path, zero, absent, (no_refusal(batch),) * form.max_children)
    carry = jnp.int32(0), jnp.ones((batch,), bool), root
    return lax.while_loop(lambda carry: carry[1].any(), descend, carry)[2]


def _judge(rows: Rows, children: Children, node: Array, form: Form):
    """Judge the children of ``node`` [B] in turn: (accepted, child, absent tokens, refusals)."""
    absent = children.deterministic_tokens() if form.mixed else ()
    index = rows.at(node)
    target, draft = rows.distributions_at(index, absent)
    p_mass = q_mass = jnp.ones(node.shape, jnp.float32)
    if form.mixed:
        q_mass = rows.masses(index, target, draft, ()).draft.sum(-1)
    accepted, accepted_child, refusals = jnp.zeros(node.shape, bool), node, ()
    for rank in range(form.max_children):
        child = children.rank(rank)
        _, p, q = weights(child.x, child.y, child.token, target, draft, refusals)
        q = jnp.where(child.drawn, q / jnp.where(q_mass > 0, q_mass, 1), 1.0)
        # Strict, so that p(x) = 0 is never accepted, not even by u = 0. A token that its own
        # recorded distribution excludes was not drawn from it: refuse it.
        passes = (child.uniform * q < p / p_mass) & (q > 0)
        pending = child.exists & ~accepted
        refused = pending & ~passes
        accepted_child = jnp.where(pending & passes, child.node, accepted_child)
        accepted |= pending & passes
        dropped = refused & (q > 0)
        refusal = Refusal(
            jnp.where(refused, 1 / p_mass, 1.0),
            jnp.where(refused & child.drawn, 1 / jnp.where(q_mass > 0, q_mass, 1), 0.0),
            jnp.where(dropped, child.token, -1),
        )
        if rank + 1 < form.max_children:
            masses = rows.masses(index, target, draft, (*refusals, refusal))
            mass = masses.after.sum(-1)
            # The mass is 0 only where p = q up to rounding; then p stays as it is.
            refusal = where(mass > 0, refusal, no_refusal(node.shape[0]))
            p_mass = jnp.where(refused & (mass > 0), mass, p_mass)
            q_mass = jnp.where(dropped & child.drawn, masses.draft.sum(-1), q_mass)
        refusals = (*refusals, refusal)
    return accepted, accepted_child, absent, refusals


# ------------------------------------------------------------------------------------- one token


def _draw(rows: Rows, end: End, uniform: Array | None) -> Array:
    """Draw by Gumbel-max in two steps: a segment by its mass, then a token of it. int32 [B].

    ``uniform`` [B, 2] is the key of the noise of segments and tokens. None returns the weights of
    all tokens instead, float32 [B, V].
    """
    index = rows.at(end.node)
    target, draft = rows.distributions_at(index, end.absent)
    masses = rows.masses(index, target, draft, end.refusals)
    # The mass after a refusal is 0 only where p = q up to rounding.
    refused = masses.after.sum(-1) > 0
    columns = jax.tree.map(lambda x: x[:, None], (target, draft, end.refusals))
    stored = rows.logits, rows.draft_logits

    def weights_of(streams: list[Array | None], token: Array) -> Array:
        before, after, _ = weights(*streams, token, *columns)
        return jnp.where(refused[:, None], after, before)

    if uniform is None:
        streams = [None if x is None else x[index] for x in stored]
        return weights_of(streams, lax.broadcasted_iota(jnp.int32, streams[0].shape, 1))
    segments = jnp.where(refused[:, None], masses.after, masses.before)
    uniform = uniform.astype(jnp.float32)
    noise = sampling.block_noise(uniform, segments.shape[1])
    segment = sampling.argmax(jnp.log(segments) + noise)
    vocab = rows.logits.shape[1]
    width = min(rows.kernels.segment, vocab)
    first = segment * width
    start = jnp.minimum(first, vocab - width)  # the last segment is pulled back inside
    cut = jax.vmap(lambda x, row, at: lax.dynamic_slice(x, (row, at), (1, width))[0], (None, 0, 0))
    streams = [None if x is None else cut(x, index, start) for x in stored]
    token = start[:, None] + jnp.arange(width, dtype=jnp.int32)
    inside = jnp.where(token >= first[:, None], weights_of(streams, token), 0.0)
    return start + sampling.argmax(jnp.log(inside) + sampling.token_noise(uniform, token))

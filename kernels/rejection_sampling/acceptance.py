"""Acceptance on scalars, and the draw of one token: the same for the kernels of all devices.

laws      one pass over all rows: thresholds and log-totals
judge     on scalars: peaks and log-totals give p and q of the drafted tokens. Refusals change the
          law of one node a row, whose new mass ``masses`` sums up; so no law is ever stored
draw      masses of the segments of the final law, then one segment in full
"""

import jax
import jax.numpy as jnp
from jax import lax

from jspec.kernels.rejection_sampling.distributions import (
    DraftDistribution,
    Filters,
    Form,
    Proposal,
    Refusal,
    first_above,
    weights,
)
from jspec.kernels.rejection_sampling.rows import (
    Children,
    Ending,
    Kernels,
    Rows,
    children_of,
    choose,
    no_refusal,
    passing_of,
)
from jspec.kernels.rejection_sampling.traversal import traverse

Array = jax.Array


def rejection_sampling(
    kernels: Kernels,
    logits: Array,
    filters: Filters,
    proposal: Proposal,
    uniforms: Array,
    uniform: Array,
    form: Form,
) -> tuple[Array, Array, Array]:
    """As the reference, in float32, without storing a law."""
    batch, nodes, vocab = logits.shape
    flat = logits.reshape(batch * nodes, vocab)
    per_node = Filters(*(jnp.repeat(x, nodes) for x in filters[:4]), filters.names)
    draft = draft_probs = None
    if proposal.logits is not None:
        draft = proposal.logits.reshape(batch * nodes, vocab)
        found = kernels.distributions(draft, None)
        draft_probs = DraftDistribution(found.peak, found.log_total)
    rows = Rows(flat, draft, kernels.distributions(flat, per_node), draft_probs, nodes, kernels)
    uniforms = uniforms.astype(jnp.float32)
    judge = {"rejection": _walk, "block": _chain_as_a_whole, "traversal": traverse}[form.rule]
    ending = judge(rows, proposal, uniforms, form)
    return ending.path, ending.num_accepted, _draw(rows, ending, uniform.astype(jnp.float32))


# ------------------------------------------------------------------- child by child, down a tree


def _walk(rows: Rows, proposal: Proposal, uniforms: Array, form: Form) -> Ending:
    """Recursive rejection sampling, from the root down, while some row descends."""
    batch = proposal.tokens.shape[0]

    def descend(carry):
        depth, going, ending = carry
        children = children_of(rows, proposal, uniforms, ending.node, form.max_children)
        children = children._replace(exists=children.exists & going[:, None])
        accepted, child, absent, steps = _judge(rows, children, ending.node, form)
        path = ending.path.at[:, depth + 1].set(jnp.where(accepted, child, 0), mode="drop")
        keep = lambda new, old: jnp.where(going, new, old)
        return (
            depth + 1,
            accepted,
            Ending(
                jnp.where(accepted, child, ending.node),
                path,
                ending.num_accepted + accepted,
                *jax.tree.map(keep, (absent, steps), (ending.absent, ending.steps)),
            ),
        )

    none = jnp.zeros((batch,), jnp.int32)
    start = Ending(
        none,
        jnp.zeros((batch, form.max_depth + 1), jnp.int32),
        none,
        (none,) * (form.max_children - 1 if form.mixed else 0),
        (no_refusal(batch),) * form.max_children,
    )
    carry = jnp.int32(0), jnp.ones((batch,), bool), start
    return lax.while_loop(lambda carry: carry[1].any(), descend, carry)[2]


def _judge(rows: Rows, children: Children, node: Array, form: Form):
    """Judges the children of ``node`` [B] in turn: (accepted, child, absent tokens, refusals)."""
    absent = ()
    if form.mixed:  # siblings are distinct: the law of those drawn excludes the point masses
        absent = children.points()
    place = rows.at(node)
    distribution, draft_probs = rows.distributions_at(place, absent)
    mass = remaining = jnp.ones(node.shape, jnp.float32)  # of the target's law, of the draft's
    if form.mixed:
        remaining = rows.masses(place, distribution, draft_probs, ()).draft.sum(-1)
    accepted, child, steps = jnp.zeros(node.shape, bool), node, ()
    for rank in range(form.max_children):
        each = children.rank(rank)
        _, p, q = weights(each.x, each.y, each.token, distribution, draft_probs, steps)
        q = jnp.where(each.drawn, q / jnp.where(remaining > 0, remaining, 1), 1.0)
        # Strict, so that p(x) = 0 is never accepted, not even by u = 0. A token that its own
        # recorded law excludes was not drawn from it and is refused.
        passes = (each.uniform * q < p / mass) & (q > 0)
        waits = each.exists & ~accepted
        refused = waits & ~passes
        child = jnp.where(waits & passes, each.node, child)
        accepted |= waits & passes
        gone = refused & (q > 0) & ~(each.drawn & form.replaced)
        step = Refusal(
            jnp.where(refused, 1 / mass, 1.0),
            jnp.where(refused & each.drawn, 1 / jnp.where(remaining > 0, remaining, 1), 0.0),
            jnp.where(gone, each.token, -1),
        )
        if rank + 1 < form.max_children:
            found = rows.masses(place, distribution, draft_probs, (*steps, step))
            left, draft_left = found.after.sum(-1), found.draft.sum(-1)
            # Nothing is left only where p = q up to rounding; then the law stays as it was.
            step = choose(left > 0, step, no_refusal(node.shape[0]))
            mass = jnp.where(refused & (left > 0), left, mass)
            remaining = jnp.where(gone & each.drawn, draft_left, remaining)
        steps = (*steps, step)
    return accepted, child, absent, steps


# ------------------------------------------------------------------------------ a chain as a whole


def _chain_as_a_whole(rows: Rows, proposal: Proposal, uniforms: Array, form: Form) -> Ending:
    """Block verification; the notation is that of ``jspec.verify.block``."""
    del form  # a chain has no other
    batch, nodes = proposal.tokens.shape
    valid, drawn = proposal.valid[:, 1:], proposal.sampled[:, 1:]
    log_joint = _log_joint(rows, proposal)  # of P_0 to P_K
    joint = jnp.exp(log_joint)
    end = jnp.zeros((batch, 1), bool)  # the last node has no child
    has_child = jnp.concatenate([valid, end], 1)
    child_drawn = jnp.concatenate([drawn, end], 1)
    refusal = Refusal(
        jnp.where(has_child, joint, 1.0),
        jnp.where(has_child & child_drawn, 1.0, 0.0),
        jnp.where(has_child & ~child_drawn, jnp.roll(proposal.tokens, -1, 1), -1),
    )
    every = jnp.arange(batch * nodes, dtype=jnp.int32)
    step = Refusal(*(x.reshape(-1) for x in refusal))
    rest = (
        rows.masses(None, *rows.distributions_at(every), (step,))
        .after.sum(-1)
        .reshape(batch, nodes)
    )
    passing = jnp.where(has_child, passing_of(rest, joint), joint)[:, 1:]
    passed = valid & (uniforms[:, 1:] < passing)
    num_accepted = jnp.where(passed, jnp.arange(1, nodes, dtype=jnp.int32), 0).max(1, initial=0)
    path = jnp.broadcast_to(jnp.arange(nodes, dtype=jnp.int32), (batch, nodes))
    last = Refusal(*(jnp.take_along_axis(x, num_accepted[:, None], 1)[:, 0] for x in refusal))
    return Ending(num_accepted, path, num_accepted, (), (last,))


def _log_joint(rows: Rows, proposal: Proposal) -> Array:
    """log P_0 to log P_K of a chain, [B, K + 1]: P_i = min(1, P_{i-1} p_i / q_i)."""
    batch, nodes = proposal.tokens.shape
    parents = rows.at(jnp.tile(jnp.arange(nodes - 1, dtype=jnp.int32), (batch, 1)))
    tokens = proposal.tokens[:, 1:]
    p, _, q = weights(*rows.entries(parents, tokens), tokens, *rows.distributions_at(parents))
    q = jnp.where(proposal.sampled[:, 1:], q, 1.0)
    drawable = proposal.valid[:, 1:] & (q > 0)
    log_ratio = jnp.where(drawable, jnp.log(p) - jnp.log(jnp.where(drawable, q, 1)), -jnp.inf)
    log_joint = [jnp.zeros((batch,), jnp.float32)]
    for index in range(nodes - 1):
        log_joint.append(jnp.minimum(0, log_joint[-1] + log_ratio[:, index]))
    return jnp.stack(log_joint, 1)


# ------------------------------------------------------------------------------------- one token


def _draw(rows: Rows, ending: Ending, uniform: Array) -> Array:
    """Inverse CDF in two levels: a segment by its mass, then a token of it. int32 [B].

    ``uniform`` [B, 2] is a coarse and a fine part, which comes in where their sum has room.
    """
    place = rows.at(ending.node)
    distribution, draft_probs = rows.distributions_at(place, ending.absent)
    found = rows.masses(place, distribution, draft_probs, ending.steps)
    # Nothing is left of a refusal only where p = q up to rounding.
    refused = found.after.sum(-1) > 0
    masses = jnp.where(refused[:, None], found.after, found.before)
    total = masses.sum(-1, keepdims=True)
    coarse, fine = uniform.T
    segment, below = first_above(masses / total, coarse)
    vocab = rows.logits.shape[1]
    width = min(rows.kernels.segment, vocab)
    first = segment * width
    start = jnp.minimum(first, vocab - width)  # the last segment is pulled back inside
    cut = jax.vmap(lambda x, row, at: lax.dynamic_slice(x, (row, at), (1, width))[0], (None, 0, 0))
    streams = [None if x is None else cut(x, place, start) for x in (rows.logits, rows.draft)]
    token = start[:, None] + jnp.arange(width, dtype=jnp.int32)
    columns = jax.tree.map(lambda x: x[:, None], (distribution, draft_probs, ending.steps))
    before, after, _ = weights(*streams, token, *columns)
    inside = jnp.where(refused[:, None], after, before)
    inside = jnp.where(token >= first[:, None], inside, 0.0)
    index, _ = first_above(inside / total, coarse - below + fine)
    return start + index

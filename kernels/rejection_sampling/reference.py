"""Rejection sampling in plain jnp: what the kernels must do, with every law written out.

Fed with the coins of a round, it gives the path, its length and the token of ``jspec.verify``, from
raw logits and without any of its code.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jspec.kernels.rejection_sampling.distributions import Filters, Form, Proposal

Array = jax.Array


def rejection_sampling(
    logits: Array, filters: Filters, proposal: Proposal, uniforms: Array, uniform: Array, form: Form
) -> tuple[Array, Array, Array]:
    """Judges a draft and draws the token after what was accepted.

    Args:
      logits: raw, of the target [B, N, V].
      warps: of every row [B].
      proposal: a draft; its parents precede their children.
      coins: uniforms in [0, 1), [B, N]; coin i decides node i, coin 0 is not used.
      uniform: [B, 2], the token's by inverse CDF: a coarse and a fine part, to be added.
      form: static facts.

    Returns:
      path int32 [B, max_depth + 1], 0 below its end; num_accepted int32 [B]; token int32 [B].
    """
    path, num_accepted, distribution = judge(logits, filters, proposal, uniforms, form)
    running = jnp.cumsum(distribution, -1)
    coarse, fine = uniform[:, :1], uniform[:, 1:]
    above = (running / running[:, -1:] - coarse > fine) & (distribution > 0)
    return path, num_accepted, jnp.argmax(above, -1).astype(jnp.int32)


def judge(
    logits: Array, filters: Filters, proposal: Proposal, uniforms: Array, form: Form
) -> tuple[Array, Array, Array]:
    """Path and its length, as above, and the law of the next token: weights [B, V].

    Rule "rejection" walks down from the root: the children of a node are judged in turn, drawn
    ones before point masses and each in order, accepting x where u q(x) < p(x). A refusal turns p
    into max(p - q, 0), renormalised, and takes the token from q unless siblings were drawn with
    replacement. Rule "block" is block verification of a chain (arXiv 2403.10444), "traversal" that
    of a tree (arXiv 2505.12398).
    """
    p = target_probs(logits, filters)
    q = jnp.zeros_like(p)
    if proposal.logits is not None:
        q = jax.nn.softmax(proposal.logits.astype(p.dtype), -1)
    rule = {"rejection": _tree, "block": _chain, "traversal": _tree_as_a_whole}[form.rule]
    return jax.vmap(functools.partial(rule, form))(p, q, proposal, uniforms)


def target_probs(logits: Array, filters: Filters) -> Array:
    """Probabilities of the warped laws [B, N, V]; the order of warps is ``jspec.core.sampling``'s."""
    logits = logits.astype(jnp.promote_types(logits.dtype, jnp.float32))
    logits = jnp.where(jnp.isnan(logits), -jnp.inf, logits)
    temperature, min_p, top_k, top_p = (x[:, None, None] for x in filters[:4])
    vocab = logits.shape[-1]
    x = logits / jnp.where(temperature > 0, temperature, 1)
    if "min_p" in filters.names:
        x = jnp.where(x >= x.max(-1, keepdims=True) + jnp.log(min_p), x, -jnp.inf)
    if "top_k" in filters.names:
        wanted = jnp.broadcast_to(jnp.where(top_k > 0, top_k, vocab), (*x.shape[:2], 1))
        least = jnp.take_along_axis(jnp.sort(x), vocab - jnp.clip(wanted, 1, vocab), -1)
        x = jnp.where(x >= least, x, -jnp.inf)
    if "top_p" in filters.names:
        order = jnp.argsort(-x, -1)
        probs = jnp.take_along_axis(jax.nn.softmax(x, -1), order, -1)
        first = (jnp.cumsum(probs, -1) - probs < top_p) | (top_p >= 1)
        sorted_x = jnp.take_along_axis(x, order, -1)
        kept = first & (sorted_x > -jnp.inf)
        x = jnp.where(x >= jnp.where(kept, sorted_x, jnp.inf).min(-1, keepdims=True), x, -jnp.inf)
    greedy = jax.nn.one_hot(jnp.argmax(logits, -1), vocab, dtype=x.dtype)
    return jnp.where(temperature > 0, jax.nn.softmax(x, -1), greedy)


def _tree(form: Form, p: Array, q: Array, draft: Proposal, uniforms: Array):
    """The walk of one batch row: p, q [N, V]. As nodes follow their parents, one scan suffices."""
    nodes, vocab = p.shape
    index = jnp.arange(nodes)
    token_mass = jax.nn.one_hot(draft.tokens, vocab, dtype=p.dtype)
    points = draft.valid & ~draft.sampled & (index > 0)

    def enter(node: Array) -> tuple[Array, Array]:
        """The law at a node, and that of its first drawn child: q without the point masses."""
        siblings = points & (draft.parents == node)
        fixed = jnp.where(siblings[:, None], token_mass, 0).any(0)
        return p[node], _normalised(jnp.where(fixed, 0, q[node]))

    def meet(carry, node):
        here, distribution, distribution_q, path, depth = carry
        token = token_mass[node]
        against = jnp.where(draft.sampled[node], distribution_q, token)
        at_p, at_q = (distribution * token).sum(), (against * token).sum()
        judged = draft.valid[node] & (draft.parents[node] == here) & (node > 0)
        accepted = judged & (uniforms[node] * at_q < at_p) & (at_q > 0)
        refused = judged & ~accepted
        rest = jnp.maximum(distribution - against, 0)
        rest = jnp.where(rest.any(), _normalised(rest), distribution)
        rest_q = distribution_q if form.replaced else _normalised(distribution_q * (1 - token))
        distribution = jnp.where(refused, rest, distribution)
        distribution_q = jnp.where(refused & draft.sampled[node], rest_q, distribution_q)
        entered = enter(node)
        depth = depth + accepted
        path = path.at[jnp.where(accepted, depth, form.max_depth + 1)].set(node, mode="drop")
        here = jnp.where(accepted, node, here)
        distribution, distribution_q = (
            jnp.where(accepted, a, b)
            for a, b in zip(entered, (distribution, distribution_q), strict=True)
        )
        return (here, distribution, distribution_q, path, depth), None

    # Node by node of one parent after the other, drawn children before point masses.
    turns = jnp.lexsort((index, ~draft.sampled, draft.parents)).astype(jnp.int32)
    path = jnp.zeros((form.max_depth + 1,), jnp.int32)
    start = (jnp.int32(0), *enter(jnp.int32(0)), path, jnp.int32(0))
    (_, distribution, _, path, depth), _ = lax.scan(meet, start, turns)
    return path, depth, distribution


def _normalised(weights: Array) -> Array:
    total = weights.sum()
    return weights / jnp.where(total > 0, total, 1)


def _chain(form: Form, p: Array, q: Array, draft: Proposal, uniforms: Array):
    """Block verification of one batch row: p, q [K + 1, V]."""
    nodes, vocab = p.shape
    token_mass = jax.nn.one_hot(draft.tokens, vocab, dtype=p.dtype)
    drawn_from = lambda node: jnp.where(draft.sampled[node], q[node - 1], token_mass[node])
    joint, accepted, distribution = jnp.ones((), p.dtype), jnp.int32(0), p[0]
    for node in range(nodes):
        if node:  # P of the node
            at_p, at_q = ((row * token_mass[node]).sum() for row in (p[node - 1], drawn_from(node)))
            ratio = jnp.where(at_q > 0, at_p / jnp.where(at_q > 0, at_q, 1), 0)
            joint = jnp.minimum(1, joint * jnp.where(draft.valid[node], ratio, 0))
        passing, left = joint, p[node]
        if node + 1 < nodes:
            has_child = draft.valid[node + 1]
            rest = jnp.maximum(joint * p[node] - drawn_from(node + 1), 0)
            missing = rest.sum() + 1 - joint  # 0 only where all agrees, and passing is certain
            ratio = jnp.where(missing > 0, rest.sum() / jnp.where(missing > 0, missing, 1), 1)
            passing = jnp.where(has_child, ratio, joint)
            left = jnp.where(has_child & rest.any(), rest, p[node])
        passes = (node == 0) | (draft.valid[node] & (uniforms[node] < passing))
        accepted = jnp.where(passes, node, accepted)
        distribution = jnp.where(passes, left, distribution)
    return jnp.arange(form.max_depth + 1, dtype=jnp.int32), accepted.astype(jnp.int32), distribution


class _Tour(NamedTuple):
    """A tour of one batch row's tree in which every node is entered, and left when all below are.

    It goes on as if every node were refused; the first one that passes as it is left is the end.
    """

    here: Array
    entered: Array  # [N] bool
    joint: Array  # [N], P of each node so far
    distribution: Array  # [N, V], what refusals left of the target's laws, normalised
    distribution_q: Array  # [N, V], laws of the next drawn children, normalised
    ended: Array
    end: Array
    end_distribution: Array  # [V]


def _tree_as_a_whole(form: Form, p: Array, q: Array, draft: Proposal, uniforms: Array):
    """Traversal verification of one batch row: p, q [N, V]."""
    nodes, vocab = p.shape
    index = jnp.arange(nodes)
    token_mass = jax.nn.one_hot(draft.tokens, vocab, dtype=p.dtype)
    below = draft.valid & (index > 0) & (draft.parents == index[:, None])  # [parent, child]
    fixed = ((below & ~draft.sampled).astype(p.dtype) @ token_mass) > 0  # taken by point masses
    turn = index + nodes * ~draft.sampled  # drawn children come first

    def against(tour: _Tour, child: Array) -> Array:
        return jnp.where(
            draft.sampled[child], tour.distribution_q[draft.parents[child]], token_mass[child]
        )

    def enter(tour: _Tour, node: Array) -> _Tour:
        above = draft.parents[node]
        at_p, at_q = (
            (x * token_mass[node]).sum() for x in (tour.distribution[above], against(tour, node))
        )
        ratio = jnp.where(at_q > 0, tour.joint[above] * at_p / jnp.where(at_q > 0, at_q, 1), 0)
        return tour._replace(
            here=node,
            entered=tour.entered.at[node].set(True),
            joint=tour.joint.at[node].set(jnp.minimum(1, ratio)),
        )

    def leave(tour: _Tour) -> _Tour:
        node, above = tour.here, draft.parents[tour.here]
        ends = ~tour.ended & ((uniforms[node] < tour.joint[node]) | (node == 0))
        rest = jnp.maximum(tour.joint[above] * tour.distribution[above] - against(tour, node), 0)
        mass, missing = rest.sum(), rest.sum() + 1 - tour.joint[above]
        passing = jnp.where(missing > 0, mass / jnp.where(missing > 0, missing, 1), 1)
        rest_q = _normalised(tour.distribution_q[above] * (1 - token_mass[node]))
        drops = draft.sampled[node] & (not form.replaced)
        return tour._replace(
            here=above,
            joint=tour.joint.at[above].set(passing),
            distribution=tour.distribution.at[above].set(
                jnp.where(mass > 0, _normalised(rest), tour.distribution[above])
            ),
            distribution_q=tour.distribution_q.at[above].set(
                jnp.where(drops, rest_q, tour.distribution_q[above])
            ),
            ended=tour.ended | ends,
            end=jnp.where(ends, node, tour.end),
            end_distribution=jnp.where(ends, tour.distribution[node], tour.end_distribution),
        )

    def move(_, tour: _Tour) -> _Tour:
        waiting = below[tour.here] & ~tour.entered
        child = jnp.argmin(jnp.where(waiting, turn, 2 * nodes)).astype(jnp.int32)
        moved = enter(tour, child), leave(tour)
        return jax.tree.map(lambda a, b: jnp.where(waiting.any(), a, b), *moved)

    start = _Tour(
        jnp.int32(0),
        index == 0,
        jnp.ones((nodes,), p.dtype),
        p,
        jax.vmap(_normalised)(jnp.where(fixed, 0, q)),
        jnp.bool_(False),
        jnp.int32(0),
        p[0],
    )
    tour = lax.fori_loop(0, 2 * nodes, move, start)
    return *_path_to(form, draft.parents, tour.end), tour.end_distribution


def _path_to(form: Form, parents: Array, end: Array) -> tuple[Array, Array]:
    """Node ids from the root down to ``end``, 0 below it, and its depth."""
    nodes = parents.shape[0]
    line = [end]
    for _ in range(form.max_depth):
        line.append(parents[line[-1]])
    line = jnp.stack(line)  # upwards, the root repeated
    depth = (line != 0).sum().astype(jnp.int32)
    place = jnp.where(line != 0, depth - jnp.arange(line.shape[0]), nodes)
    path = jnp.zeros((form.max_depth + 1,), jnp.int32)
    return path.at[place].set(line, mode="drop"), depth

"""Rejection sampling in plain jnp: the specification of the kernels, distributions stored.

For the same uniforms it gives the path, its length and the token of ``jspec.verify``, from raw
logits and without any of its code.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jspec.core import sampling
from jspec.kernels.rejection_sampling.distributions import Filters, Form, Proposal

Array = jax.Array


def rejection_sampling(
    logits: Array, filters: Filters, proposal: Proposal, uniforms: Array, uniform: Array, form: Form
) -> tuple[Array, Array, Array]:
    """Judge a draft, and draw the token after the accepted path.

    Args:
      logits: raw, of the target [B, N, V].
      filters: of every row [B].
      proposal: a draft; its parents precede their children.
      uniforms: in [0, 1), [B, N]; entry i decides node i, entry 0 is not used.
      uniform: [B, 2], the key of the token's noise: see ``jspec.core.sampling.draw``.
      form: static properties.

    Returns:
      path int32 [B, max_depth + 1], 0 below its end; num_accepted int32 [B]; token int32 [B].
    """
    path, num_accepted, probs = judge(logits, filters, proposal, uniforms, form)
    return path, num_accepted, sampling.draw(jnp.log(probs), uniform)


def judge(
    logits: Array, filters: Filters, proposal: Proposal, uniforms: Array, form: Form
) -> tuple[Array, Array, Array]:
    """Return path and length, as above, and the distribution of the next token: weights [B, V].

    Rule "rejection" walks down from the root. It judges the children of a node in turn, drawn ones
    before deterministic ones, and accepts x where u q(x) < p(x). A refusal turns p into
    max(p - q, 0), renormalised, and takes the token from q. Rule "block" is block verification
    (arXiv 2403.10444), in its form for trees, traversal verification (arXiv 2505.12398).
    """
    p = target_probs(logits, filters)
    q = jnp.zeros_like(p)
    if proposal.logits is not None:
        q = jax.nn.softmax(proposal.logits.astype(p.dtype), -1)
    rule = {"rejection": _walk, "block": _traverse}[form.rule]
    return jax.vmap(functools.partial(rule, form))(p, q, proposal, uniforms)


def target_probs(logits: Array, filters: Filters) -> Array:
    """Return the processed probabilities [B, N, V], filters in ``jspec.core.sampling``'s order."""
    logits = logits.astype(jnp.promote_types(logits.dtype, jnp.float32))
    logits = jnp.where(jnp.isnan(logits), -jnp.inf, logits)
    temperature, min_p, top_k, top_p = (x[:, None, None] for x in filters[:4])
    x = logits / jnp.where(temperature > 0, temperature, 1)
    if "min_p" in filters.names:
        x = jnp.where(x >= x.max(-1, keepdims=True) + jnp.log(min_p), x, -jnp.inf)
    if "top_k" in filters.names:
        x = jnp.where(sampling.keep_top_k(x, top_k), x, -jnp.inf)
    if "top_p" in filters.names:
        x = jnp.where(sampling.keep_top_p(x, top_p), x, -jnp.inf)
    greedy = jax.nn.one_hot(jnp.argmax(logits, -1), logits.shape[-1], dtype=x.dtype)
    return jnp.where(temperature > 0, jax.nn.softmax(x, -1), greedy)


def _normalised(weights: Array) -> Array:
    total = weights.sum()
    return weights / jnp.where(total > 0, total, 1)


def _walk(form: Form, p: Array, q: Array, draft: Proposal, uniforms: Array):
    """The walk of one batch row: p, q [N, V]. Nodes follow their parents, so one scan suffices."""
    nodes, vocab = p.shape
    index = jnp.arange(nodes)
    one_hot = jax.nn.one_hot(draft.tokens, vocab, dtype=p.dtype)
    deterministic = draft.valid & ~draft.sampled & (index > 0)

    def enter(node: Array) -> tuple[Array, Array]:
        """p at a node, and q of its first drawn child: without deterministic siblings."""
        siblings = deterministic & (draft.parents == node)
        excluded = jnp.where(siblings[:, None], one_hot, 0).any(0)
        return p[node], _normalised(jnp.where(excluded, 0, q[node]))

    def judge_node(carry, node):
        current, p_here, q_here, path, depth = carry
        token = one_hot[node]
        q_node = jnp.where(draft.sampled[node], q_here, token)
        p_token, q_token = (p_here * token).sum(), (q_node * token).sum()
        judged = draft.valid[node] & (draft.parents[node] == current) & (node > 0)
        accepted = judged & (uniforms[node] * q_token < p_token) & (q_token > 0)
        refused = judged & ~accepted
        residual = jnp.maximum(p_here - q_node, 0)
        residual = jnp.where(residual.any(), _normalised(residual), p_here)
        p_here = jnp.where(refused, residual, p_here)
        q_rest = _normalised(q_here * (1 - token))
        q_here = jnp.where(refused & draft.sampled[node], q_rest, q_here)
        depth = depth + accepted
        path = path.at[jnp.where(accepted, depth, form.max_depth + 1)].set(node, mode="drop")
        p_child, q_child = enter(node)
        p_here = jnp.where(accepted, p_child, p_here)
        q_here = jnp.where(accepted, q_child, q_here)
        return (jnp.where(accepted, node, current), p_here, q_here, path, depth), None

    # Nodes grouped by parent, drawn children before deterministic ones.
    order = jnp.lexsort((index, ~draft.sampled, draft.parents)).astype(jnp.int32)
    path = jnp.zeros((form.max_depth + 1,), jnp.int32)
    start = (jnp.int32(0), *enter(jnp.int32(0)), path, jnp.int32(0))
    (_, probs, _, path, depth), _ = lax.scan(judge_node, start, order)
    return path, depth, probs


class _Tour(NamedTuple):
    """A tour of one batch row's tree that enters every node, and leaves it after its descendants.

    It continues as if every node were refused; the first node that passes when left is the end.
    """

    current: Array
    entered: Array  # [N] bool
    joint: Array  # [N], P of each node so far
    p: Array  # [N, V], residuals of the target's distributions, normalised
    q: Array  # [N, V], distributions of the next drawn children, normalised
    ended: Array
    end: Array
    end_probs: Array  # [V]


def _traverse(form: Form, p: Array, q: Array, draft: Proposal, uniforms: Array):
    """Block verification of one batch row: p, q [N, V]."""
    nodes, vocab = p.shape
    index = jnp.arange(nodes)
    one_hot = jax.nn.one_hot(draft.tokens, vocab, dtype=p.dtype)
    is_child = draft.valid & (index > 0) & (draft.parents == index[:, None])  # [parent, child]
    excluded = ((is_child & ~draft.sampled).astype(p.dtype) @ one_hot) > 0  # deterministic siblings
    order = index + nodes * ~draft.sampled  # drawn children come first

    def q_of(tour: _Tour, child: Array) -> Array:
        return jnp.where(draft.sampled[child], tour.q[draft.parents[child]], one_hot[child])

    def enter(tour: _Tour, node: Array) -> _Tour:
        parent = draft.parents[node]
        p_token, q_token = ((x * one_hot[node]).sum() for x in (tour.p[parent], q_of(tour, node)))
        ratio = tour.joint[parent] * p_token / jnp.where(q_token > 0, q_token, 1)
        joint = jnp.minimum(1, jnp.where(q_token > 0, ratio, 0))
        return tour._replace(
            current=node,
            entered=tour.entered.at[node].set(True),
            joint=tour.joint.at[node].set(joint),
        )

    def leave(tour: _Tour) -> _Tour:
        node, parent = tour.current, draft.parents[tour.current]
        ends = ~tour.ended & ((uniforms[node] < tour.joint[node]) | (node == 0))
        residual = jnp.maximum(tour.joint[parent] * tour.p[parent] - q_of(tour, node), 0)
        mass = residual.sum()
        missing = mass + 1 - tour.joint[parent]  # 0 only if p and q agree: the parent passes
        passing = jnp.where(missing > 0, mass / jnp.where(missing > 0, missing, 1), 1)
        residual = jnp.where(mass > 0, _normalised(residual), tour.p[parent])
        q_rest = _normalised(tour.q[parent] * (1 - one_hot[node]))
        q_rest = jnp.where(draft.sampled[node], q_rest, tour.q[parent])
        return tour._replace(
            current=parent,
            joint=tour.joint.at[parent].set(passing),
            p=tour.p.at[parent].set(residual),
            q=tour.q.at[parent].set(q_rest),
            ended=tour.ended | ends,
            end=jnp.where(ends, node, tour.end),
            end_probs=jnp.where(ends, tour.p[node], tour.end_probs),
        )

    def move(_, tour: _Tour) -> _Tour:
        pending = is_child[tour.current] & ~tour.entered
        child = jnp.argmin(jnp.where(pending, order, 2 * nodes)).astype(jnp.int32)
        moved = enter(tour, child), leave(tour)
        return jax.tree.map(lambda a, b: jnp.where(pending.any(), a, b), *moved)

    q = jax.vmap(_normalised)(jnp.where(excluded, 0, q))
    root, joint = jnp.int32(0), jnp.ones((nodes,), p.dtype)
    start = _Tour(root, index == 0, joint, p, q, jnp.bool_(False), root, p[0])
    tour = lax.fori_loop(0, 2 * nodes, move, start)
    return *_path_to(form, draft.parents, tour.end), tour.end_probs


def _path_to(form: Form, parents: Array, end: Array) -> tuple[Array, Array]:
    """Node ids from the root down to ``end``, 0 below it, and its depth."""
    nodes = parents.shape[0]
    upwards = [end]
    for _ in range(form.max_depth):
        upwards.append(parents[upwards[-1]])
    upwards = jnp.stack(upwards)  # the root is repeated
    depth = (upwards != 0).sum().astype(jnp.int32)
    position = jnp.where(upwards != 0, depth - jnp.arange(upwards.shape[0]), nodes)
    path = jnp.zeros((form.max_depth + 1,), jnp.int32)
    return path.at[position].set(upwards, mode="drop"), depth

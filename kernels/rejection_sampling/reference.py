"""The specification of rejection sampling: the rules as the papers state them, node by node.

It takes concrete arrays alone. For the same uniforms it gives the path, its length and the token of
``jspec.verify``, without any of its code.
"""

import jax
import jax.numpy as jnp
import numpy as np

from jspec.core import sampling
from jspec.core.types import Sampling
from jspec.kernels.rejection_sampling.distributions import Filters, Form, Proposal

Array = jax.Array


def rejection_sampling(
    logits: Array,
    filters: Filters,
    proposal: Proposal,
    uniforms: Array,
    uniform: Array | None,
    form: Form,
) -> tuple[Array, Array, Array]:
    """Judge a draft, and draw the token after the accepted path.

    Args:
      logits: raw, of the target [B, N, V].
      filters: of every row [B].
      proposal: a draft; its parents precede their children. Children of a node are judged in turn,
        drawn ones before deterministic ones.
      uniforms: in [0, 1), [B, N]; entry i decides node i, entry 0 is not used.
      uniform: [B, 2], the key of the token's noise: see ``jspec.core.sampling.draw``. None returns
        the weights of the next token instead, [B, V].
      form: static properties.

    Returns:
      path int32 [B, max_depth + 1], 0 below its end; num_accepted int32 [B]; token int32 [B].
    """
    values = dict(zip(Filters._fields, filters[:4], strict=False))
    names = ("temperature", *filters.names)
    p = jax.nn.softmax(sampling.process_logits(logits, Sampling(values, names=names)), -1)
    q = jnp.zeros_like(p)
    if proposal.logits is not None:
        q = jax.nn.softmax(proposal.logits.astype(p.dtype), -1)
    wide = [np.asarray(x, np.float64) for x in (p, q, uniforms)]
    paths, probs = np.zeros((len(p), form.max_depth + 1), np.int32), np.zeros(p[:, 0].shape)
    counts = np.zeros(len(p), np.int32)
    for row in range(len(p)):
        fields = (None if x is None else np.asarray(x[row]) for x in proposal)
        draft = _Draft(*(x[row] for x in wide), Proposal(*fields))
        path, probs[row] = draft.walk(0) if form.rule == "rejection" else draft.traverse(0, 1.0)
        counts[row] = len(path)
        paths[row, 1 : 1 + len(path)] = path
    weights = jnp.asarray(probs, p.dtype)
    token = weights if uniform is None else sampling.draw(jnp.log(weights), uniform)
    return jnp.asarray(paths), jnp.asarray(counts), token


class _Draft:
    """The draft of one row, with its distributions p and q after every node, [N, V] each."""

    def __init__(self, p: np.ndarray, q: np.ndarray, uniforms: np.ndarray, proposal: Proposal):
        self.p, self.q, self.uniforms, self.proposal = p, q, uniforms, proposal

    def walk(self, node: int) -> tuple[list[int], np.ndarray]:
        """Return the accepted path below ``node``, and the distribution of the token after it.

        Recursive rejection sampling (arXiv 2211.17192; of trees 2402.12374) accepts x where
        u q(x) < p(x). A refusal turns p into max(p - q, 0), renormalised.
        """
        p, q = self.p[node], self.first_q(node)
        for child in self.children(node):
            token, q_child = self.token_and_q(child, q)
            if self.uniforms[child] * q_child[token] < p[token] and q_child[token] > 0:
                path, probs = self.walk(child)
                return [child, *path], probs
            residual = np.maximum(p - q_child, 0)
            p = _normalised(residual) if residual.any() else p
            q = self.next_q(child, q)
        return [], p

    def traverse(self, node: int, joint: float) -> tuple[list[int], np.ndarray] | None:
        """Return path and distribution as ``walk`` does, or None if ``node`` is refused.

        Traversal verification (arXiv 2505.12398), which for a chain is block verification (arXiv
        2403.10444), judges nodes in post-order. ``joint`` is P of the node when it is entered. A
        refused child turns P p into max(P p - q, 0), with mass R, and P into R / (R + 1 - P).
        """
        p, q = self.p[node], self.first_q(node)
        for child in self.children(node):
            token, q_child = self.token_and_q(child, q)
            ratio = joint * p[token] / q_child[token] if q_child[token] > 0 else 0.0
            if accepted := self.traverse(child, min(1.0, ratio)):
                return [child, *accepted[0]], accepted[1]
            residual = np.maximum(joint * p - q_child, 0)
            mass = residual.sum()
            missing = mass + 1 - joint  # 0 only if p and q agree: then the node passes
            joint = mass / missing if missing > 0 else 1.0
            p = _normalised(residual) if mass > 0 else p
            q = self.next_q(child, q)
        return ([], p) if node == 0 or self.uniforms[node] < joint else None

    def children(self, node: int) -> list[int]:
        """Return the children of a node in the order of judgement."""
        proposal, nodes = self.proposal, range(1, len(self.p))
        children = [i for i in nodes if proposal.valid[i] and proposal.parents[i] == node]
        return sorted(children, key=lambda child: not proposal.sampled[child])

    def first_q(self, node: int) -> np.ndarray:
        """Return q of the first drawn child of a node: without its deterministic siblings."""
        q = self.q[node].copy()
        for child in self.children(node):
            if not self.proposal.sampled[child]:
                q[self.proposal.tokens[child]] = 0
        return _normalised(q)

    def token_and_q(self, child: int, q: np.ndarray) -> tuple[int, np.ndarray]:
        """Return the token of a child, and the distribution that it was drawn from."""
        token = self.proposal.tokens[child]
        return token, q if self.proposal.sampled[child] else np.eye(1, len(q), token)[0]

    def next_q(self, child: int, q: np.ndarray) -> np.ndarray:
        """Return q of the next drawn sibling of a refused child."""
        if not self.proposal.sampled[child]:
            return q
        rest = q.copy()
        rest[self.proposal.tokens[child]] = 0
        return _normalised(rest)


def _normalised(weights: np.ndarray) -> np.ndarray:
    total = weights.sum()
    return weights / (total if total > 0 else 1)

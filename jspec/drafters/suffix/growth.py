"""Growing the draft that the continuations of a row's last tokens vote for.

This is the count-ratio rule of suffix decoding (arXiv 2411.04975, as in ArcticInference), which is
defined on a trie: a node is a string, its count is the number of occurrences of that string, and
the probability of a child is count(child) / count(node). Here no trie is built. The occurrences of
the row's last l tokens are the node of that match, and those with the same next token are a child.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import lax

from jspec.core import sampling
from jspec.core.types import Array

END = -1  # in place of a token: the text ends here


@struct.dataclass
class Occurrences:
    """Occurrences of a row's last tokens in S texts, in G groups, the latest first.

    Group g holds positions that at least the last ``Rule.groups[g]`` tokens precede.
    """

    matched: Array  # [B, S, G, M] int32, number of last tokens that precede; 0: no occurrence
    follow: Array  # [B, S, G, M, F] int32, the tokens that follow; END past the end


@struct.dataclass
class Growth:
    """A draft for every text and match length, [B, S, L], nodes in the order of being added."""

    tokens: Array  # [B, S, L, n] int32
    parents: Array  # [B, S, L, n] int32, 0 is the root, and node i is at index i - 1
    size: Array  # [B, S, L] int32, nodes that exist
    score: Array  # [B, S, L] float32, sum of the nodes' probabilities: expected accepted tokens


@dataclasses.dataclass(frozen=True)
class Rule:
    """Limits of the drafts; hashable."""

    # (match length, most nodes, most depth) of every match length that allows a draft, ascending.
    limits: tuple[tuple[int, int, int], ...]
    min_token_prob: float  # least probability of a node
    branching: bool  # whether the draft is a tree, most probable nodes first, or a chain

    @property
    def depth(self) -> int:
        """The depth of the deepest possible draft."""
        return max((depth for _, _, depth in self.limits), default=0)

    @property
    def size(self) -> int:
        """The nodes of the largest possible draft."""
        sizes = (size if self.branching else depth for _, size, depth in self.limits)
        return max(sizes, default=0)

    @property
    def longest_match(self) -> int:
        """The longest match that allows a draft."""
        return max((matched for matched, _, _ in self.limits), default=0)

    @property
    def groups(self) -> tuple[int, ...]:
        """Match lengths at which occurrences are looked up; longer matches are among them."""
        return tuple(length for length in (1, 2, 4, 8) if length <= self.longest_match)


@struct.dataclass
class _State:
    """The drafts so far, and the position of every occurrence in them: [B, S, L, M] each."""

    growth: Growth
    node: Array  # int32, the deepest node on the occurrence's continuation
    depth: Array  # int32, of that node
    prob: Array  # float32, of that node
    count: Array  # int32, occurrences on whose continuation that node is
    token: Array  # int32, the continuation's token below that node, or END
    growing: Array  # [B, S, L] bool


def grow(rule: Rule, occurrences: Occurrences, length: Array) -> Growth:
    """Return drafts for every text and match length.

    Each step adds the most probable candidate: its probability is the product of the count ratios
    along its path. Ties go to the latest occurrence.

    Args:
      rule: the limits, which allow a draft.
      occurrences: of the rows' last tokens.
      length: int32 [B], of the rows; a match is shorter than its row.
    """
    matched, sizes, depths = np.array(rule.limits, np.int32).T
    group = np.searchsorted(np.array(rule.groups), matched, side="right") - 1
    # [depth, B, S, L, M], with one depth more, at which all end, and END at depths out of limits.
    follow = jnp.moveaxis(occurrences.follow[:, :, group], -1, 0)
    follow = jnp.pad(follow, ((0, 1), *[(0, 0)] * 4), constant_values=END)
    allowed = np.arange(len(follow))[:, None, None, None, None] < depths[:, None]
    follow = jnp.where(allowed, follow, END)
    matches = occurrences.matched[:, :, group] >= matched[:, None]
    matches &= (matched < length[:, None])[:, None, :, None]
    zeros = jnp.zeros(matches.shape, jnp.int32)
    nodes = jnp.zeros((*matches.shape[:-1], rule.size), jnp.int32)
    count = matches.sum(-1, keepdims=True, dtype=jnp.int32)
    state = _State(
        growth=Growth(nodes, nodes, zeros[..., 0], jnp.zeros(matches.shape[:-1])),
        node=zeros,
        depth=zeros,
        prob=jnp.ones(matches.shape),
        count=jnp.broadcast_to(count, matches.shape),
        token=jnp.where(matches, follow[0], END),
        growing=matches.any(-1),
    )
    add = functools.partial(_add, rule, follow, jnp.array(sizes))
    return lax.while_loop(lambda state: state.growing.any(), add, state).growth


def _add(rule: Rule, follow: Array, sizes: Array, state: _State) -> _State:
    """Add a node to every draft that still grows."""
    alike = state.token[..., :, None] == state.token[..., None, :]
    if rule.branching:
        alike &= state.node[..., :, None] == state.node[..., None, :]
    count = alike.sum(-2, dtype=jnp.int32)  # over the outer axis, as a CPU adds vectors
    prob = state.prob * (count.astype(jnp.float32) / state.count.astype(jnp.float32))
    prob = jnp.where(state.token == END, -1.0, prob)
    best = sampling.argmax(prob)[..., None]
    chosen = lambda x: jnp.take_along_axis(x, best, -1)
    top = chosen(prob)[..., 0]
    growing = state.growing & (top >= max(rule.min_token_prob, 0.0))

    # Occurrences on whose continuation the new node is.
    moved = (state.token == chosen(state.token)) & (state.node == chosen(state.node))
    moved &= growing[..., None]
    draft = state.growth
    put = lambda x, new: jnp.where(
        (jnp.arange(x.shape[-1]) == draft.size[..., None]) & growing[..., None], new, x
    )
    size, depth = draft.size + growing, state.depth + moved
    move = lambda new, old: jnp.where(moved, new, old)
    if rule.branching:
        below = jnp.take_along_axis(follow, depth[None], 0, mode="clip")[0]
    else:  # all chains that still grow have one length
        below = lax.dynamic_index_in_dim(follow, size.max(), keepdims=False)
    return _State(
        growth=Growth(
            tokens=put(draft.tokens, chosen(state.token)),
            parents=put(draft.parents, chosen(state.node)),
            size=size,
            score=draft.score + jnp.where(growing, top, 0.0),
        ),
        node=move(size[..., None], state.node),
        depth=depth,
        prob=move(top[..., None], state.prob),
        count=move(chosen(count), state.count),
        # A chain drops the occurrences with another continuation.
        token=move(below, state.token if rule.branching else END),
        growing=growing & (size < sizes),
    )


def best(growth: Growth) -> Growth:
    """Return the draft of the highest score in every row, without the axes S and L.

    Ties go to the first text, then to the longer match.
    """
    batch, _, _, count = growth.tokens.shape
    flat = lambda x, *rest: x[:, :, ::-1].reshape(batch, -1, *rest)
    choice = jnp.argmax(flat(growth.score), -1)
    pick = lambda x: jax.vmap(lambda rows, index: rows[index])(x, choice)
    return Growth(
        tokens=pick(flat(growth.tokens, count)),
        parents=pick(flat(growth.parents, count)),
        size=pick(flat(growth.size)),
        score=pick(flat(growth.score)),
    )

"""From occurrences of a row's last tokens to the draft that their continuations vote for.

This is the count-ratio rule of suffix decoding (arXiv 2411.04975, as in ArcticInference), said of a
trie: a node is a string, its count how often that string occurs, and a child is proposed with the
probability count(child) / count(node). Here nobody builds the trie: the occurrences of the row's
last l tokens are the node of that match, and those that go on alike are its children.
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

NOTHING = -1  # in place of a token: the text ends here


@struct.dataclass
class Occurrences:
    """Places in S texts before which a row's last tokens stand, in G groups, the latest first.

    Group g holds places before which at least ``Rule.groups[g]`` of these tokens stand.
    """

    matched: Array  # [B, S, G, M] int32, how many of the last tokens stand there; 0: no place
    follow: Array  # [B, S, G, M, F] int32, what follows; NOTHING past the end


@struct.dataclass
class Growth:
    """A draft for every text and match length, [B, S, L], in the order of being added."""

    tokens: Array  # [B, S, L, n] int32
    parents: Array  # [B, S, L, n] int32, 0 is the root and node i stands at i - 1
    size: Array  # [B, S, L] int32, nodes that exist
    score: Array  # [B, S, L] float32, sum of the nodes' probabilities: tokens expected to hold


@dataclasses.dataclass(frozen=True)
class Rule:
    """How far continuations are followed; hashable.

    Attributes:
      max_tokens: n, nodes of a draft at most.
      max_depth: edges from the root to the deepest leaf at most.
      max_tree_depth: tokens of a match and of a path behind it together at most.
      max_spec_factor: a draft has at most this many nodes for every token of its match.
      min_token_prob: nodes less probable than this are not drafted.
      branching: a tree, the most probable nodes first; else a chain.
    """

    max_tokens: int
    max_depth: int
    max_tree_depth: int
    max_spec_factor: float
    min_token_prob: float
    branching: bool

    @functools.cached_property
    def levels(self) -> tuple[tuple[int, int, int], ...]:
        """(match length, nodes at most, depth at most) where there is anything to draft."""
        found = []
        for matched in range(1, self.max_tree_depth):
            size = min(self.max_tokens, int(matched * self.max_spec_factor + 1e-6))
            depth = min(self.max_depth, self.max_tree_depth - matched, size)
            if depth > 0:
                found.append((matched, size, depth))
        return tuple(found)

    @property
    def depth(self) -> int:
        """The deepest node that can ever be drafted."""
        return max((depth for _, _, depth in self.levels), default=0)

    @property
    def size(self) -> int:
        """The most nodes that can ever be drafted; those of a chain are one below the other."""
        sizes = (size if self.branching else depth for _, size, depth in self.levels)
        return max(sizes, default=0)

    @property
    def longest_match(self) -> int:
        """The longest match that is ever asked for."""
        return max((matched for matched, _, _ in self.levels), default=0)

    @property
    def groups(self) -> tuple[int, ...]:
        """Match lengths at which occurrences are looked up; longer matches choose among these."""
        return tuple(length for length in (1, 2, 4, 8) if length <= self.longest_match)


@struct.dataclass
class _Growing:
    """The drafts so far, and where in them every occurrence stands: [B, S, L, M] each."""

    growth: Growth
    node: Array  # int32, the deepest node that the occurrence passes through
    depth: Array  # int32, of that node
    prob: Array  # float32, of that node
    count: Array  # int32, occurrences that pass through that node
    token: Array  # int32, what the occurrence says comes below that node; NOTHING for none
    going: Array  # [B, S, L] bool


def grow(rule: Rule, found: Occurrences, length: Array) -> Growth:
    """Drafts for every text and match length.

    In every step the most probable node that could be added is added: the product of count ratios
    along its path. Ties go to what was seen last.

    Args:
      rule: the limits; it has at least one level.
      found: the occurrences.
      length: int32 [B], of the rows; a match is shorter than its row.
    """
    matched, sizes, depths = np.array(rule.levels, np.int32).T
    group = np.searchsorted(np.array(rule.groups), matched, side="right") - 1
    # By depth first, and one slice more, in which all have ended. What lies too deep is not there.
    follow = jnp.moveaxis(found.follow[:, :, group], -1, 0)
    follow = jnp.pad(follow, ((0, 1), *[(0, 0)] * 4), constant_values=NOTHING)
    reach = np.arange(len(follow))[:, None, None, None, None] < depths[:, None]
    follow = jnp.where(reach, follow, NOTHING)
    alive = found.matched[:, :, group] >= matched[:, None]
    alive &= (matched < length[:, None])[:, None, :, None]
    zeros = jnp.zeros(alive.shape, jnp.int32)
    nodes = jnp.zeros((*alive.shape[:-1], rule.size), jnp.int32)
    growing = _Growing(
        growth=Growth(nodes, nodes, zeros[..., 0], jnp.zeros(alive.shape[:-1])),
        node=zeros,
        depth=zeros,
        prob=jnp.ones(alive.shape),
        count=jnp.broadcast_to(alive.sum(-1, keepdims=True, dtype=jnp.int32), alive.shape),
        token=jnp.where(alive, follow[0], NOTHING),
        going=alive.any(-1),
    )
    add = functools.partial(_add, rule, follow, jnp.array(sizes))
    return lax.while_loop(lambda growing: growing.going.any(), add, growing).growth


def _add(rule: Rule, follow: Array, sizes: Array, now: _Growing) -> _Growing:
    """Adds a node to every draft that is not complete."""
    alike = now.token[..., :, None] == now.token[..., None, :]
    if rule.branching:
        alike &= now.node[..., :, None] == now.node[..., None, :]
    count = alike.sum(-2, dtype=jnp.int32)  # over the outer axis: a CPU adds up whole vectors
    prob = now.prob * (count.astype(jnp.float32) / now.count.astype(jnp.float32))
    prob = jnp.where(now.token == NOTHING, -1.0, prob)
    best = sampling.argmax(prob)[..., None]
    chosen = lambda x: jnp.take_along_axis(x, best, -1)
    top = chosen(prob)[..., 0]
    going = now.going & (top >= max(rule.min_token_prob, 0.0))

    moved = (now.token == chosen(now.token)) & (now.node == chosen(now.node)) & going[..., None]
    grown = now.growth
    put = lambda x, new: jnp.where(
        (jnp.arange(x.shape[-1]) == grown.size[..., None]) & going[..., None], new, x
    )
    size, depth = grown.size + going, now.depth + moved
    move = lambda new, old: jnp.where(moved, new, old)
    if rule.branching:
        below = jnp.take_along_axis(follow, depth[None], 0, mode="clip")[0]
    else:  # all chains that still grow are equally long
        below = lax.dynamic_index_in_dim(follow, size.max(), keepdims=False)
    return _Growing(
        growth=Growth(
            tokens=put(grown.tokens, chosen(now.token)),
            parents=put(grown.parents, chosen(now.node)),
            size=size,
            score=grown.score + jnp.where(going, top, 0.0),
        ),
        node=move(size[..., None], now.node),
        depth=depth,
        prob=move(top[..., None], now.prob),
        count=move(chosen(count), now.count),
        # Of a chain, occurrences that go on otherwise are left behind.
        token=move(below, now.token if rule.branching else NOTHING),
        going=going & (size < sizes),
    )


def best(growth: Growth) -> Growth:
    """The draft of the highest score in every row.

    Ties go to the text that comes first, then to the longer match.

    Returns:
      The same without the axes S and L.
    """
    batch, _, _, count = growth.tokens.shape
    flat = lambda x, *rest: x[:, :, ::-1].reshape(batch, -1, *rest)
    choice = jnp.argmax(flat(growth.score), -1)
    pick = lambda x: jax.vmap(lambda rows, index: rows[index])(x, choice)
    nodes = pick(flat(growth.tokens, count)), pick(flat(growth.parents, count))
    return Growth(*nodes, pick(flat(growth.size)), pick(flat(growth.score)))

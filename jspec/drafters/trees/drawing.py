"""Drafting chains, and choosing the children of any draft nodes, from a head's logits.

The nodes whose children are drafted next are a *frontier* of F nodes. A head is a function that
takes a frontier and returns a row of logits for each of its nodes. ``Drawing`` chooses children
from these logits. ``chain`` repeats that K times; ``jspec.drafters.trees.expand`` grows trees.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jspec.core import logits_processors, sampling, trees
from jspec.core.branches import Branches
from jspec.core.history import root_token
from jspec.core.types import Array, Draft, History, Request

Frontier = Any
# Maps (frontier, tokens [B, F'], parents [F'] or [B, F'], depth, slot) to (frontier', logits).
#
# The nodes of ``tokens`` become the frontier. ``parents`` index the frontier before. ``depth`` is
# the depth of the tokens; the root has 0. ``slot`` counts the nodes fed before in this round. Only
# frontier and tokens are always traced. Logits are [B, F', Vd], or [B, 1, Vd] for all nodes.
Feed = Callable[..., tuple[Frontier, Array]]


class Children(NamedTuple):
    """Up to k children of each node of a frontier; F is 1 if all nodes have the same."""

    ids: Array  # [B, F, k] int32, in the draft's vocabulary
    valid: Array | None = None  # [B, F, k]; None: all
    sampled: Array | None = None  # [B, F, k]; None: none
    distribution: Array | None = None  # [B, F, Vd] log-weights of the draws; None: no draws


@dataclasses.dataclass(frozen=True)
class Drawing:
    """The way in which the children of a round are chosen.

    ``method`` "probabilistic" draws, without replacement among siblings. "greedy" takes the
    likeliest tokens. "top_plus_one" takes the likeliest k - 1 tokens, and one draw from the rest
    (arXiv 2502.18779). Rows at temperature 0 always take the likeliest tokens.
    """

    request: Request
    history: History  # tokens up to the root
    method: Literal["probabilistic", "greedy", "top_plus_one"]
    noise: Literal["own", "target"]  # "target" draws with the noise that the target will draw with
    vocab_size: int  # V, of the target
    draft_to_target: Array | None = None  # int32 [Vd], target ids of the draft's; None for the same

    def target_ids(self, ids: Array) -> Array:
        """Map ids of the draft's vocabulary to the target's."""
        return ids if self.draft_to_target is None else self.draft_to_target[ids]

    @property
    def has_processors(self) -> bool:
        """True if the request has logits processors, which may read the tokens of a branch."""
        return self.request.sampling.processors is not None

    def apply_processors(
        self, logits: Array, drafted: Array | None = None, any_branch: bool = False
    ) -> Array:
        """Apply the request's logits processors to logits [B, F, Vd].

        ``drafted`` are the target ids from below the root down to each node, int32 [B, F, M], -1
        past their end; None for no tokens. ``any_branch`` applies only what all branches share.
        """
        processors = self.request.sampling.processors
        if processors is None:
            return logits
        branches = Branches.at_root(self.history)
        if drafted is not None:
            branches = branches.replace(drafted=drafted)
        if any_branch:
            processors = processors.of_any_branch
        return logits_processors.apply_to_draft(
            logits, processors, branches, self.vocab_size, self.draft_to_target
        )

    def children(
        self,
        logits: Array,
        widths: np.ndarray,
        nodes: Array,
        depth: int | Array,
        drafted: Array | None = None,
    ) -> Children:
        """Choose k = max(widths) children of each frontier node; a node may need fewer.

        Args:
          logits: [B, F, Vd], or [B, 1, Vd] for all nodes.
          widths: children that each node needs, static int [F].
          nodes: int32 [F], the nodes: addresses of the noise.
          depth: of the nodes, one for all or int32 [F].
          drafted: as for ``apply_processors``.
        """
        logits, width = self.apply_processors(logits, drafted), int(widths.max())
        if self.method == "greedy" or self.request.sampling.greedy:
            return Children(largest(logits, width)[1])
        distribution = sampling.process_logits(logits, self.request.sampling)
        if self.noise == "target":
            return self._draw_as_target(logits, distribution, width, depth)
        if width == 1:
            return self._draw_one(distribution, nodes)
        if self.method == "top_plus_one":
            return self._top_plus_one(logits, distribution, widths, nodes)
        return self._draw_distinct(logits, distribution, width, nodes)

    @property
    def _random_rows(self) -> Array:
        return (self.request.sampling.temperature > 0)[:, None, None]

    @property
    def _root(self) -> Array:
        return self.history.length - 1

    def _draw_one(self, distribution, nodes) -> Children:
        """Draw one child of each node; greedy rows hold one token of weight."""
        uniform = sampling.round_noise_at(self.request.keys, self._root, sampling.DRAFT, nodes)
        per_node = jnp.broadcast_to(distribution, (*uniform.shape[:2], distribution.shape[-1]))
        ids = sampling.draw(per_node.reshape(-1, distribution.shape[-1]), uniform.reshape(-1, 2))
        ids = ids.reshape(*uniform.shape[:2], 1)
        sampled = jnp.broadcast_to(self._random_rows, ids.shape)
        return Children(ids, sampled=sampled, distribution=distribution)

    def _draw_distinct(self, logits, distribution, width, nodes) -> Children:
        """Draw without replacement: the largest log-weights plus Gumbel noise, in order."""
        noise = sampling.node_noise(self.request.keys, self._root, nodes, distribution.shape[-1])
        random, noisy = self._random_rows, distribution + noise.astype(distribution.dtype)
        scores, ids = largest(jnp.where(random, noisy, logits), width)
        return Children(ids, scores > -jnp.inf, jnp.broadcast_to(random, ids.shape), distribution)

    def _top_plus_one(self, logits, distribution, widths, nodes) -> Children:
        """Take the likeliest ``widths`` - 1 children of each node, and draw one from the rest."""
        width, vocab_size = int(widths.max()), distribution.shape[-1]
        scores, top = largest(distribution, width)
        rest = jnp.broadcast_to(distribution, (len(distribution), len(nodes), vocab_size))
        for rank in range(width - 1):
            taken = jnp.arange(vocab_size) == top[..., rank, None]
            rest = jnp.where(taken & (rank < widths - 1)[:, None], -jnp.inf, rest)
        drawn = self._draw_one(rest, nodes).ids
        is_drawn = np.arange(width) == widths[:, None] - 1
        has_rest = (rest > -jnp.inf).any(-1, keepdims=True)
        random = self._random_rows
        return Children(
            jnp.where(random, jnp.where(is_drawn, drawn, top), largest(logits, width)[1]),
            ~random | jnp.where(is_drawn, has_rest, scores > -jnp.inf),
            random & is_drawn,
            distribution,
        )

    def _draw_as_target(self, logits, distribution, width, depth) -> Children:
        """Take the likeliest draws of the target, which shares this noise, by the head's logits."""
        position = self.history.length[:, None] + jnp.atleast_1d(depth)
        noise = sampling.target_noise(self.request.keys, position, self.vocab_size)
        ids = self.draft_to_target
        noise = noise[..., : distribution.shape[-1]] if ids is None else noise[..., ids]
        noisy = distribution + noise.astype(distribution.dtype)
        scores, ids = largest(jnp.where(self._random_rows, noisy, logits), width)
        return Children(ids, scores > -jnp.inf)


def largest(logits: Array, width: int) -> tuple[Array, Array]:
    """Return the ``width`` largest logits and their indices, [..., width]; ties go to the first."""
    if width > 1:
        return sampling.top_k(logits, width)
    index = sampling.argmax(logits)[..., None]
    return jnp.take_along_axis(logits, index, -1), index


def chain(
    drawing: Drawing, depth: int, logits: Array, feed: Feed, frontier: Any, unrolled: bool = False
) -> tuple[Draft, Frontier]:
    """Return a chain of ``depth`` nodes, and the frontier after its last node but one.

    Args:
      drawing: how children are chosen.
      depth: K.
      logits: after the root, [B, 1, Vd].
      feed: reads drafted tokens; depth and slot are traced unless ``unrolled``.
      frontier: the root.
      unrolled: whether ``feed`` needs static depth and slot, as its weights depend on the depth.
    """
    one = np.ones(1, int)

    def draw(logits: Array, node: int | Array, drafted: Array | None) -> tuple:
        children = drawing.children(logits, one, jnp.int32(node)[None], node, drafted)
        return drawing.target_ids(children.ids[:, :, 0]), children.distribution

    def step(carry: tuple, node: int | Array) -> tuple[tuple, Array]:
        frontier, drafted, tokens, distributions = carry
        frontier, logits = feed(frontier, tokens, one - 1, node, node - 1)
        if drafted is not None:
            drafted = drafted.at[:, :, node - 1].set(tokens)
        tokens, distribution = draw(logits, node, drafted)
        if distribution is not None:
            write = lax.dynamic_update_slice_in_dim
            distributions = write(distributions, distribution, node, 1)
        return (frontier, drafted, tokens, distributions), tokens

    drafted = None
    if drawing.has_processors:
        drafted = jnp.full((logits.shape[0], 1, depth), -1, jnp.int32)
    first, distributions = draw(logits, 0, drafted)
    if distributions is not None:
        distributions = jnp.repeat(distributions, depth, 1)  # later rows are written over
    carry = frontier, drafted, first, distributions
    (frontier, *_, distributions), tokens = all_depths(step, carry, first, depth, unrolled)
    return chain_draft(drawing, tokens, distributions), frontier


def chain_draft(drawing: Drawing, drafted: Array, distributions: Array | None) -> Draft:
    """Return the chain of target ids [B, K], drawn from ``distributions`` [B, K, Vd] if any."""
    if distributions is not None:  # and a row for the leaf, which has no children
        distributions = jnp.concatenate([distributions, jnp.zeros_like(distributions[:, :1])], 1)
    drafted = jnp.concatenate([root_token(drawing.history)[:, None], drafted], 1)
    depth = drafted.shape[1] - 1
    return Draft(
        tokens=drafted,
        parents=trees.chain(depth),
        valid=jnp.ones_like(drafted, dtype=bool),
        logits=distributions,
        draft_to_target=None if distributions is None else drawing.draft_to_target,
        max_depth=depth,
    )


def all_depths(
    step: Callable, carry: Any, first: Any, max_depth: int, unrolled: bool
) -> tuple[Any, Any]:
    """Return the last carry, and ``first`` and the outputs of ``step`` joined along axis 1.

    One program serves all depths 1, 2, ... < ``max_depth``. If ``unrolled``, each depth has its
    own, and the carry may grow.
    """
    if unrolled:
        outputs = [first]
        for depth in range(1, max_depth):
            carry, output = step(carry, depth)
            outputs.append(output)
        return carry, jax.tree.map(lambda *parts: jnp.concatenate(parts, 1), *outputs)
    carry, later = lax.scan(step, carry, jnp.arange(1, max_depth, dtype=jnp.int32))

    def joined(first: Array, later: Array) -> Array:
        later = jnp.moveaxis(later, 0, 1).reshape(later.shape[1], -1, *later.shape[3:])
        return jnp.concatenate([first, later], 1)

    return carry, jax.tree.map(joined, first, later)

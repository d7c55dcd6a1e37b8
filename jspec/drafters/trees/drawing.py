"""Drawing: how the children of draft nodes are chosen from what a head says may come next.

One ``Drawing`` serves a round of any head and any shape of draft; ``jspec.drafters.trees.expand`` says
which nodes are asked for. What is drawn here is recorded for the acceptance rule as it was drawn.
"""

import dataclasses
from typing import Any, Literal, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax

from jspec.core import logits_processors, sampling
from jspec.core.types import Array, History, Request


class Children(NamedTuple):
    """Up to k children of each node of a frontier, F being 1 where all nodes have the same."""

    ids: Array  # [B, F, k] int32, in the draft's vocabulary
    valid: Array | None = None  # [B, F, k]; None: all
    sampled: Array | None = None  # [B, F, k]; None: none
    distribution: Array | None = (
        None  # [B, F, Vd], what they were drawn from; None: they were not drawn
    )


@dataclasses.dataclass(frozen=True)
class Drawing:
    """How the children of a round are chosen.

    Attributes:
      request: what the rows ask for.
      history: tokens up to the root.
      method: "probabilistic": drawn, without replacement where a node has several; "greedy": the
        likeliest; "top_plus_one": the likeliest k - 1, and one drawn from the rest (arXiv
        2502.18779). Rows at temperature 0 take the likeliest in any case.
      noise: "target" draws with the noise that the target will draw with.
      vocab_size: V, of the target.
      draft_to_target: target ids of the draft's vocabulary, int32 [Vd]; None for the same ids.
      confidence_threshold: a chain ends behind the first token down to which the product of
        probabilities is less than this, each as ``sampling.chance`` says; None: it never does.
    """

    request: Request
    history: History
    method: Literal["probabilistic", "greedy", "top_plus_one"]
    noise: Literal["own", "target"]
    vocab_size: int
    draft_to_target: Array | None = None
    confidence_threshold: float | None = None

    @property
    def deterministic(self) -> bool:
        """Whether no child is drawn."""
        return self.method == "greedy" or self.request.sampling.greedy

    def target_ids(self, ids: Array) -> Array:
        """Ids of the draft's vocabulary to the target's."""
        return ids if self.draft_to_target is None else self.draft_to_target[ids]

    @property
    def shapes(self) -> bool:
        """Whether the request changes logits, by what was drafted on a branch among others."""
        return self.request.sampling.processors is not None

    def shaped(self, logits: Array, drafted: Array | None = None) -> Array:
        """Logits [B, F, Vd] as the request wants them after tokens ``drafted`` [B, F, M]."""
        branches = logits_processors.at_root(self.history)
        if drafted is not None:
            branches = branches.replace(drafted=drafted)
        return self._shaped(logits, self.request.sampling.processors, branches)

    def shaped_below(self, logits: Array) -> Array:
        """Logits [B, F, Vd] of nodes below the root, as far as all their branches are alike."""
        wanted = self.request.sampling.processors
        wanted = None if wanted is None else wanted.of_any_branch
        return self._shaped(logits, wanted, logits_processors.at_root(self.history))

    def _shaped(self, logits: Array, wanted: Any, branches: logits_processors.Branches) -> Array:
        return logits_processors.shape_draft(
            logits, wanted, branches, self.vocab_size, self.draft_to_target
        )

    def children(
        self,
        logits: Array,
        widths: np.ndarray,
        nodes: Array,
        depth: int | Array,
        drafted: Array | None = None,
    ) -> Children:
        """Chooses the children of a frontier, k = max(widths) for each; those beyond are no use.

        Args:
          logits: [B, F, Vd], or [B, 1, Vd] for all nodes.
          widths: how many children each node needs, static int [F].
          nodes: int32 [F], the nodes: addresses of the noise.
          depth: of the nodes, one for all or int32 [F].
          drafted: target ids from below the root down to each node, -1 behind it: int32 [B, F, M];
            None: as if there were none. Only read where the request ``shapes`` logits.
        """
        return self.children_of(self.shaped(logits, drafted), widths, nodes, depth)

    def children_of(
        self, logits: Array, widths: np.ndarray, nodes: Array, depth: int | Array
    ) -> Children:
        """``children`` by logits that are ``shaped`` already."""
        width = int(widths.max())
        if self.deterministic:
            return Children(largest(logits, width)[1])
        distribution = sampling.process_logits(logits, self.request.sampling)
        if self.noise == "target":
            return self._shared_noise(logits, distribution, width, depth)
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

    def _draw_one(self, distribution: Array, nodes: Array) -> Children:
        """One child each, by the inverse CDF: a greedy row's law is a point mass already."""
        uniform = sampling.round_noise_at(self.request.keys, self._root, sampling.DRAFT, nodes)
        each = jnp.broadcast_to(distribution, (*uniform.shape[:2], distribution.shape[-1]))
        ids = sampling.draw(each.reshape(-1, distribution.shape[-1]), uniform.reshape(-1, 2))
        ids = ids.reshape(*uniform.shape[:2], 1)
        return Children(
            ids, sampled=jnp.broadcast_to(self._random_rows, ids.shape), distribution=distribution
        )

    def _draw_distinct(
        self, logits: Array, distribution: Array, width: int, nodes: Array
    ) -> Children:
        """Successive draws without replacement: the largest of law plus Gumbel noise, in order."""
        noise = sampling.node_noise(self.request.keys, self._root, nodes, distribution.shape[-1])
        random = self._random_rows
        heights, ids = largest(
            jnp.where(random, distribution + noise.astype(distribution.dtype), logits), width
        )
        return Children(ids, heights > -jnp.inf, jnp.broadcast_to(random, ids.shape), distribution)

    def _top_plus_one(
        self, logits: Array, distribution: Array, widths: np.ndarray, nodes: Array
    ) -> Children:
        """The likeliest ``widths`` - 1 children of each node, and one draw from what is left."""
        width = int(widths.max())
        heights, top = largest(distribution, width)
        rest = jnp.broadcast_to(
            distribution, (distribution.shape[0], nodes.shape[0], distribution.shape[-1])
        )
        for rank in range(width - 1):
            taken = jnp.arange(distribution.shape[-1]) == top[..., rank, None]
            rest = jnp.where(taken & (rank < widths - 1)[:, None], -jnp.inf, rest)
        drawn = self._draw_one(rest, nodes).ids
        is_drawn = np.arange(width) == widths[:, None] - 1
        left = (rest > -jnp.inf).any(-1, keepdims=True)
        random = self._random_rows
        return Children(
            jnp.where(random, jnp.where(is_drawn, drawn, top), largest(logits, width)[1]),
            ~random | jnp.where(is_drawn, left, heights > -jnp.inf),
            random & is_drawn,
            distribution,
        )

    def _shared_noise(
        self, logits: Array, distribution: Array, width: int, depth: Array
    ) -> Children:
        """The target's likeliest draws after these nodes, by the head's lights."""
        position = self.history.length[:, None] + jnp.atleast_1d(depth)
        noise = sampling.target_noise(self.request.keys, position, self.vocab_size)
        noise = (
            noise[..., : distribution.shape[-1]]
            if self.draft_to_target is None
            else (noise[..., self.draft_to_target])
        )
        noisy = distribution + noise.astype(distribution.dtype)
        heights, ids = largest(jnp.where(self._random_rows, noisy, logits), width)
        return Children(ids, heights > -jnp.inf)


def largest(logits: Array, width: int) -> tuple[Array, Array]:
    """The ``width`` largest and their places, ties toward the lower one: both [..., width]."""
    if width > 1:
        return lax.top_k(logits, width)
    place = sampling.argmax(logits)[..., None]
    return jnp.take_along_axis(logits, place, -1), place

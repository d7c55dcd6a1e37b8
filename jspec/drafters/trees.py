"""What drafters that grow trees with a head have in common: their settings."""

import dataclasses
import functools
from typing import Any, ClassVar, Literal

import jax.numpy as jnp
import numpy as np

from jspec import growth, shapes, topology
from jspec.shapes import Dynamic
from jspec.topology import Shape
from jspec.types import Array, Draft, History, Params, Request, Target


@dataclasses.dataclass(frozen=True)
class TreeDrafter:
    """Settings of a drafter with a head; ``params.drafter`` are its weights.

    Attributes:
      config: of the head.
      target: whose embedding and output matrix the head shares where it has none of its own.
      num_speculative_tokens: K, edges from the root to the deepest leaf.
      tree: "chain", "eagle2", "sampled", a name in ``shapes.PUBLISHED``, or rank paths.
      tree_size: N, nodes a row with the root; None for the tree's own, see ``shapes.requested``.
      tree_depth: another name of ``num_speculative_tokens``.
      tree_top_k: children of a node at most.
      draft_sample_method: "probabilistic", "greedy" or "top_plus_one", see ``growth.Drawing``; None
        for "probabilistic", but for trees that admit no draws.
      max_length: history length past which nothing is drafted.
      noise: "target" draws with the target's noise (rule ``coupled``).

    Raises:
      ValueError: a setting is out of range, or does not go with the tree or the head.
    """

    # Whether the head says how deep it drafts where the settings do not.
    knows_depth: ClassVar[bool] = False

    config: Any
    target: Target
    num_speculative_tokens: int | None = None
    tree: shapes.Tree = "chain"
    tree_size: int | None = None
    tree_depth: int | None = None
    tree_top_k: int | None = None
    draft_sample_method: str | None = None
    max_length: int | None = None
    noise: Literal["own", "target"] = "own"

    def __post_init__(self):
        shapes.drawn_by(self.tree, self.shape, self.draft_sample_method)
        dynamic = isinstance(self.shape, Dynamic)
        width = self.shape.top_k if dynamic else max(self.shape.widths)
        if width > self.config.vocab_size:
            raise ValueError(
                f"the tree has nodes with {width} children, but the head knows only "
                f"{self.config.vocab_size} tokens."
            )
        object.__setattr__(self, "tree_size", self.shape.size)

    @functools.cached_property
    def shape(self) -> Shape | Dynamic:
        """The tree."""
        return shapes.requested(
            self.tree, self.num_speculative_tokens, self.tree_size, self.tree_depth, self.tree_top_k
        )

    @functools.cached_property
    def method(self) -> str:
        """How children are chosen."""
        return shapes.drawn_by(self.tree, self.shape, self.draft_sample_method)

    @property
    def max_depth(self) -> int:
        """K."""
        return self.shape.max_depth

    @property
    def capture_layers(self) -> tuple[int, ...]:
        """What the head reads."""
        return self.config.capture_layers

    @property
    def proposal(self) -> str:
        """The law of a node's children."""
        return shapes.proposal(self.shape, self.method)

    def drawing(self, request: Request, history: History, params: Params) -> growth.Drawing:
        """How the children of this round are chosen."""
        return growth.Drawing(
            request, history, self.method, self.noise, self.target.vocab_size,
            getattr(params.drafter, "draft_to_target", None),
        )  # fmt: skip

    def limit(self, draft: Draft, history: History, ready: Array) -> Draft:
        """Drops nodes past ``max_length``, and all but the root of rows not ``ready`` [B]."""
        wanted = ready[:, None]
        if self.max_length is not None:
            depth = topology.from_parents(draft.parents, draft.max_depth).depth
            wanted &= history.length[:, None] - 1 + depth < self.max_length
        return draft.replace(valid=draft.valid & (wanted | (jnp.arange(self.tree_size) == 0)))


def rows(x: Array, index: Array | np.ndarray) -> Array:
    """Rows ``index`` [F] or [B, F] of x [B, F', ...]."""
    if index.ndim == 1:
        return x[:, index]
    return jnp.take_along_axis(x, index.reshape(*index.shape, *[1] * (x.ndim - 2)), 1)

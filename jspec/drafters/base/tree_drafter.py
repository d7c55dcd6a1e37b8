"""What drafters that grow trees with a head have in common: their settings."""

import dataclasses
import functools
from typing import Any, ClassVar, Literal

import jax.numpy as jnp
import numpy as np

from jspec.core import trees, validation
from jspec.core.types import Array, Draft, History, Params, Request, Target
from jspec.drafters.trees import tree_settings
from jspec.drafters.trees.drawing import Drawing
from jspec.drafters.trees.tree_settings import BestFirst, Dynamic, Grown
from jspec.models.layers import rows_at


@dataclasses.dataclass(frozen=True)
class TreeDrafter:
    """Settings of a drafter with a head; ``params.drafter`` are its weights.

    Attributes:
      config: of the head.
      target: whose embedding and output matrix the head shares where it has none of its own.
      num_speculative_tokens: K, edges from the root to the deepest leaf.
      tree: "chain", ``follows``, "sampled", a name in ``tree_settings.PUBLISHED``, or rank paths.
      tree_size: N, nodes a row with the root; None for the tree's own, see ``tree_settings.requested``.
      tree_depth: another name of ``num_speculative_tokens``.
      tree_top_k: children of a node at most.
      draft_sample_method: "probabilistic", "greedy" or "top_plus_one", see
        ``jspec.drafters.trees.drawing``; None for "probabilistic", but for trees that admit no draws.
      max_length: history length past which nothing is drafted.
      noise: "target" draws with the target's noise (rule ``coupled``).
      confidence_threshold: a chain ends behind the first token down to which the product of the
        head's probabilities is less than this, 0 to 1; None: it never does.

    Raises:
      ValueError: a setting is out of range, or does not go with the tree or the head.
    """

    # Whether the head says how deep it drafts where the settings do not.
    knows_depth: ClassVar[bool] = False
    # Whether the head itself guesses how likely it is right.
    knows_chances: ClassVar[bool] = False
    # The tree that follows the head's confidence: "best_first" where all nodes of a depth have one
    # law, so that the likeliest paths are known at once; "eagle2" where each node has its own.
    follows: ClassVar[str] = "eagle2"
    # The type of the head's weights, or several.
    weights: ClassVar[tuple[type, ...]]

    config: Any
    target: Target
    num_speculative_tokens: int | None = None
    tree: tree_settings.Tree = "chain"
    tree_size: int | None = None
    tree_depth: int | None = None
    tree_top_k: int | None = None
    draft_sample_method: str | None = None
    max_length: int | None = None
    noise: Literal["own", "target"] = "own"
    confidence_threshold: float | None = None

    def __post_init__(self):
        validation.check_config(self.config)
        if self.tree in ("eagle2", "best_first") and self.tree != self.follows:
            sees, does = (
                ("does not see", "does") if self.follows == "eagle2" else ("sees", "does not")
            )
            raise ValueError(
                f"tree={self.tree!r} follows the confidence of a head that {sees} what it drafted, "
                f"and this one {does}: use {self.follows!r}, 'chain', 'sampled', a published tree "
                "or paths."
            )
        tree_settings.drawn_by(self.tree, self.draft_tree, self.draft_sample_method)
        self._check_vocabulary(self.config.vocab_size)
        object.__setattr__(self, "tree_size", self.draft_tree.size)
        self._check_threshold()

    @functools.cached_property
    def draft_tree(self) -> Grown:
        """The tree."""
        return tree_settings.requested(
            self.tree, self.num_speculative_tokens, self.tree_size, self.tree_depth, self.tree_top_k
        )

    @functools.cached_property
    def method(self) -> str:
        """How children are chosen."""
        return tree_settings.drawn_by(self.tree, self.draft_tree, self.draft_sample_method)

    def _check_vocabulary(self, size: int) -> None:
        if isinstance(self.draft_tree, BestFirst):
            most = tree_settings.full(self.draft_tree.max_depth, size)
            if self.draft_tree.size > most:
                raise ValueError(
                    f"tree_size={self.shape.size} must be at most {most}: there are no more paths "
                    f"of up to {self.max_depth} of the {size} tokens that the head knows."
                )
            return
        dynamic = isinstance(self.draft_tree, Dynamic)
        width = self.draft_tree.top_k if dynamic else max(self.draft_tree.widths)
        if width > size:
            raise ValueError(
                f"the tree has nodes with {width} children, but the head knows only {size} tokens."
            )

    def _check_threshold(self) -> None:
        threshold = self.confidence_threshold
        if threshold is None:
            return
        tree_settings.check_threshold(threshold)
        if self.knows_chances:
            return
        if self.follows == "best_first":
            raise ValueError(
                f"confidence_threshold={threshold} ends what is drafted token by token, but this "
                "method drafts all at once; leave it out."
            )
        if isinstance(self.draft_tree, Dynamic) or max(self.draft_tree.widths) > 1:
            raise ValueError(
                f"confidence_threshold={threshold} ends chains, but tree={self.tree!r}; leave it "
                "out, or take tree='chain'."
            )

    @property
    def node_buckets(self) -> tuple[int, ...]:
        """Node counts worth a program of their own."""
        return tree_settings.node_buckets(
            self.draft_tree.size, self.confidence_threshold is not None
        )

    @property
    def max_depth(self) -> int:
        """K."""
        return self.draft_tree.max_depth

    @property
    def capture_layers(self) -> tuple[int, ...]:
        """What the head reads."""
        return self.config.capture_layers

    @property
    def proposal(self) -> str:
        """The law of a node's children."""
        return tree_settings.proposal(self.draft_tree, self.method)

    def check_params(self, params):
        """Refuses what are no weights of such a head."""
        validation.check_kind(params, *self.weights)

    def drawing(self, request: Request, history: History, params: Params) -> Drawing:
        """How the children of this round are chosen."""
        return Drawing(
            request,
            history,
            self.method,
            self.noise,
            self.target.vocab_size,
            getattr(params.drafter, "draft_to_target", None),
            None if self.knows_chances else self.confidence_threshold,
        )

    def limit(self, draft: Draft, history: History, ready: Array) -> Draft:
        """Drops nodes past ``max_length``, and all but the root of rows not ``ready`` [B]."""
        wanted = ready[:, None]
        if self.max_length is not None:
            depth = trees.from_parents(draft.parents, draft.max_depth).depth
            wanted &= history.length[:, None] - 1 + depth < self.max_length
        return draft.replace(valid=draft.valid & (wanted | (jnp.arange(self.tree_size) == 0)))


def rows(x: Array, index: Array | np.ndarray) -> Array:
    """Rows ``index`` [F] or [B, F] of x [B, F', ...]."""
    return x[:, index] if index.ndim == 1 else rows_at(x, index)


def last_of(count: Array) -> Array:
    """The last of the first ``count`` [B] rows, int32 [B, 1]; the first where there are none."""
    return jnp.maximum(count - 1, 0)[:, None]

"""The settings and checks that all drafters with a head share."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, ClassVar, Literal

import jax.numpy as jnp
import numpy as np

from jspec.core import trees, validation
from jspec.core.types import Array, Draft, Drafter, History, Params, Request, Target
from jspec.drafters.trees import expand, tree_settings
from jspec.drafters.trees.drawing import Drawing, Feed, chain
from jspec.drafters.trees.tree_settings import BestFirst, DraftTree, Dynamic
from jspec.models.blocks.arithmetic import rows_at


@dataclasses.dataclass(frozen=True)
class TreeDrafter(Drafter):
    """Settings of a drafter with a head; ``params.drafter`` are its weights.

    A method defines three steps. ``_start`` returns the frontier of the root, and its logits
    [B, 1, Vd]. ``_feed`` is a ``drawing.Feed``. ``_ready`` returns a mask of the rows [B] that can
    draft. A method that drafts in one pass replaces ``propose`` instead.

    Attributes:
      config: of the head.
      target: supplies the embedding and output matrix that the head does not have itself.
      num_speculative_tokens: K, edges from the root to the deepest leaf.
      tree: "chain", ``follows``, "sampled" (``tree_settings.best``), a name in
        ``tree_settings.PUBLISHED``, or rank paths.
      tree_size: N, nodes of the tree, root included. None for 60 ("eagle2") or 16 ("best_first",
        "sampled"), or for all nodes that such a tree can have, if fewer.
      tree_depth: another name of ``num_speculative_tokens``.
      tree_top_k: most children of a node; None for 10 ("eagle2") or 4 ("sampled").
      draft_sample_method: "probabilistic", "greedy" or "top_plus_one", as in
        ``jspec.drafters.trees.drawing``; None for "probabilistic", or "greedy" for trees without
        exact draws.
      max_length: history length past which nothing is drafted.
      noise: "target" draws with the target's noise (rule ``coupled``).

    Raises:
      ValueError: a setting is out of range, or contradicts the tree or the head.
    """

    knows_depth: ClassVar[bool] = False  # whether the depth defaults to the config's ``n_predict``
    # The tree that follows the head's confidence: "best_first" if all nodes of a depth share a
    # distribution, which gives the likeliest paths at once; "eagle2" if each has its own.
    follows: ClassVar[str] = "eagle2"
    maps_vocabulary: ClassVar[bool] = True  # whether the weights may have ``draft_to_target``
    weights: ClassVar[tuple[type, ...]]  # the type of the head's weights, or several
    unrolled: ClassVar[bool] = False  # whether ``_feed`` needs static depths and slots
    reads_pages: ClassVar[bool] = True

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

    max_depth = property(lambda self: self.draft_tree.max_depth)
    capture_layers = property(lambda self: self.config.capture_layers)

    def __post_init__(self):
        validation.check_config(self.config)
        if self.tree in ("eagle2", "best_first") and self.tree != self.follows:
            sees, does = "does not see", "does"
            if self.follows == "best_first":
                sees, does = "sees", "does not"
            raise ValueError(
                f"tree={self.tree!r} follows the confidence of a head that {sees} what it drafted, "
                f"and this one {does}: use {self.follows!r}, 'chain', 'sampled', a published tree "
                "or paths."
            )
        unset = self.num_speculative_tokens is None and self.tree_depth is None
        if self.knows_depth and unset and self.tree in tree_settings.OF_ANY_DEPTH:
            object.__setattr__(self, "num_speculative_tokens", self.config.n_predict)
        tree_settings.drawn_by(self.tree, self.draft_tree, self.draft_sample_method)
        self._check_vocabulary(self.config.vocab_size)
        object.__setattr__(self, "tree_size", self.draft_tree.size)
        self._check_depth()

    @functools.cached_property
    def draft_tree(self) -> DraftTree:
        """The static tree, or the budget of a dynamic one."""
        return tree_settings.requested(
            self.tree, self.num_speculative_tokens, self.tree_size, self.tree_depth, self.tree_top_k
        )

    @functools.cached_property
    def method(self) -> str:
        """The way in which children are chosen, as of ``Drawing``."""
        return tree_settings.drawn_by(self.tree, self.draft_tree, self.draft_sample_method)

    def _check_vocabulary(self, size: int) -> None:
        tree = self.draft_tree
        if isinstance(tree, BestFirst):
            most = tree_settings.full(tree.max_depth, size)
            if tree.size > most:
                raise ValueError(
                    f"tree_size={tree.size} must be at most {most}, the number of paths of up to "
                    f"{tree.max_depth} of the head's {size} tokens; draft fewer nodes."
                )
            return
        width = tree.top_k if isinstance(tree, Dynamic) else max(tree.widths)
        if width > size:
            raise ValueError(
                f"the tree has nodes with {width} children, but the head knows only {size} tokens."
            )

    def _check_depth(self) -> None:
        """Refuse a tree that is deeper than the head can draft."""
        if not self.knows_depth:
            return
        count = self.config.n_predict
        if self.max_depth > count and self.max_depth % count:
            raise ValueError(
                f"num_speculative_tokens:{self.max_depth} must be divisible by n_predict={count} "
                "where it is more: use a multiple, or fewer tokens."
            )

    @functools.cached_property
    def proposal(self) -> str:
        """The way in which the children of a node are chosen."""
        return tree_settings.proposal(self.draft_tree, self.method)

    def check_params(self, params):
        """Refuse weights of another type of head."""
        validation.check_kind(params, *self.weights)

    def drawing(self, request: Request, history: History, params: Params) -> Drawing:
        """Return the way in which the children of this round are chosen."""
        draft_to_target = params.drafter.draft_to_target if self.maps_vocabulary else None
        vocab_size = self.target.vocab_size
        return Drawing(request, history, self.method, self.noise, vocab_size, draft_to_target)

    def propose(self, params, request, shared, memory, history):
        """Draft depth by depth."""
        drawing = self.drawing(request, history, params)
        frontier, logits = self._start(params, memory, history)
        feed = functools.partial(self._feed, params, memory, history)
        draft = self.grow(drawing, logits, feed, frontier)
        return self.limit(draft, history, self._ready(memory)), memory

    def grow(self, drawing: Drawing, logits: Array, feed: Feed, frontier: Any) -> Draft:
        """Draft the tree; arguments as for ``chain``."""
        tree = self.draft_tree
        if isinstance(tree, Dynamic):
            return expand.dynamic(drawing, tree, logits, feed, frontier, self.unrolled)
        if max(tree.widths) == 1:
            return chain(drawing, tree.max_depth, logits, feed, frontier, self.unrolled)[0]
        return expand.ranked(drawing, tree, logits, feed, frontier)

    def limit(self, draft: Draft, history: History, ready: Array) -> Draft:
        """Drop nodes past ``max_length``, and all but the root of rows not ``ready`` [B]."""
        valid = ready[:, None]
        if self.max_length is not None:
            depth = trees.from_parents(draft.parents, draft.max_depth).depth
            valid &= history.length[:, None] - 1 + depth < self.max_length
        return draft.replace(valid=draft.valid & (valid | (jnp.arange(self.tree_size) == 0)))


def rows(x: Array, index: Array | np.ndarray) -> Array:
    """Return rows ``index`` [F] or [B, F] of x [B, F', ...]."""
    return x[:, index] if index.ndim == 1 else rows_at(x, index)


def along_path(features: tuple[Array, ...], path: Array) -> tuple[Array, ...]:
    """Return the rows of features [B, N, D] at the nodes of an accepted ``path`` [B, K+1]."""
    return tuple(rows_at(feature, path) for feature in features)


def check_window(windows: Sequence[int | None], max_depth: int, slots: int) -> None:
    """Refuse a draft whose ``slots`` of a round do not fit into the smallest sliding window."""
    window = min((window for window in windows if window), default=None)
    if window is not None and window < slots:
        raise ValueError(
            f"num_speculative_tokens={max_depth} must be at most {max_depth - slots + window}: the "
            f"{slots} rows of a round must fit into the sliding window of {window}."
        )


def last_of(count: Array) -> Array:
    """Return the index of the last of ``count`` [B] rows, int32 [B, 1]; 0 if there are none."""
    return jnp.maximum(count - 1, 0)[:, None]

"""One of several ways to draft, chosen on the device: only the chosen one runs.

What a branch of a program returns is copied, so no cache and no weights may leave one. A way to
draft takes a drafter's memory and returns a ``Draft`` and the memory that the round leaves: of
this only the leaves that it has replaced are taken out of the branch.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jspec.core import trees
from jspec.core.history import root_token
from jspec.core.types import Array, Draft, History, Memory, Params

BACKLOG = 16  # tokens a round that a network which sat out takes in; hardly dearer than two

Propose = Callable[[Memory], tuple[Draft, Memory]]


def root_alone(history: History) -> Propose:
    """Drafting nothing."""

    def propose(memory: Memory) -> tuple[Draft, Memory]:
        root = root_token(history)[:, None]
        return Draft(root, trees.chain(0), jnp.ones_like(root, dtype=bool)), memory

    return propose


def switch(
    index: Array, ways: Sequence[Propose], memory: Memory, params: Params
) -> tuple[Draft, Memory]:
    """Drafts as ``ways[index]`` does; smaller drafts are filled up to the size of the largest.

    Args:
      index: int32 [].
      ways: their drafts are alike: all chains or none, of one law. A draft of the root alone goes
        with any.
      memory: what each is given.
      params: of the drafter, which may turn up in a draft.
    """
    if len(ways) == 1:
        return ways[0](memory)
    runs = [_Branch(way, memory, params) for way in ways]
    drafts = [run.draft for run in runs]
    like = max(drafts, key=lambda draft: draft.tokens.shape[1])
    like = like.replace(max_depth=max(draft.max_depth for draft in drafts))
    if not all(isinstance(draft.parents, np.ndarray) for draft in drafts):
        shape = jax.ShapeDtypeStruct(like.tokens.shape, jnp.int32)
        like = like.replace(parents=shape)
    changed = sorted(set().union(*(run.changed for run in runs)))
    branches = [lambda run=run: run(like, changed) for run in runs]
    draft, fresh = lax.switch(index, branches)
    leaves, structure = jax.tree.flatten(memory)
    for place, leaf in zip(changed, fresh, strict=True):
        leaves[place] = leaf
    if isinstance(like.parents, np.ndarray):
        draft = draft.replace(parents=like.parents)
    draft = draft.replace(
        draft_to_target=next((run.vocabulary for run in runs if run.vocabulary is not None), None)
    )
    return draft, jax.tree.unflatten(structure, leaves)


def widen(x: Array, axis: int, size: int) -> Array:
    """``x`` with zeros up to ``size`` along ``axis``: branches give out equal shapes."""
    missing = [(0, 0)] * x.ndim
    missing[axis] = (0, size - x.shape[axis])
    return jnp.pad(x, missing)


class _Branch:
    """A way to draft: what comes out of it, and how to run it."""

    def __init__(self, way: Propose, memory: Memory, params: Params):
        self._way, self._memory = way, memory
        self._known = {id(leaf): leaf for leaf in jax.tree.leaves((memory, params))}
        self.changed: list[int] = []  # leaves of the memory
        self.vocabulary: Array | None = None
        self._parents: np.ndarray | None = None
        shapes, _ = jax.eval_shape(self._run)
        self.draft = shapes if self._parents is None else shapes.replace(parents=self._parents)

    def _run(self) -> tuple[Draft, list[Array]]:
        draft, memory = self._way(self._memory)
        before, after = jax.tree.leaves(self._memory), jax.tree.leaves(memory)
        pairs = enumerate(zip(before, after, strict=True))
        self.changed = [place for place, (old, new) in pairs if old is not new]
        if isinstance(draft.parents, np.ndarray):
            self._parents = draft.parents
            draft = draft.replace(parents=None)
        # An argument of the program: to return it would be to copy it.
        self.vocabulary = self._known.get(id(draft.draft_to_target))
        if draft.draft_to_target is not None and self.vocabulary is None:
            raise ValueError("draft_to_target must be an array of the drafter's params as it lies.")
        return draft.replace(draft_to_target=None), after

    def __call__(self, like: Draft, changed: list[int]) -> tuple[Draft, list[Array]]:
        """The draft, shaped ``like`` this one, and the leaves ``changed`` by any branch."""
        draft, after = self._run()
        static = isinstance(like.parents, np.ndarray)
        if not static and draft.parents is None:
            draft = draft.replace(
                parents=jnp.broadcast_to(self._parents, draft.tokens.shape).astype(jnp.int32)
            )
        draft = Draft(
            tokens=filled(draft.tokens, like.tokens),
            parents=None if static else filled(draft.parents, like.parents),
            valid=filled(draft.valid, like.valid),
            logits=filled(draft.logits, like.logits),
            sampled=filled(draft.sampled, like.sampled),
            score=filled(draft.score, like.score),
            max_depth=like.max_depth,
        )
        return draft, [after[place] for place in changed]


def filled(part: Array | None, like: Any) -> Array | None:
    """A part of a draft with zeros for the nodes that it lacks beside ``like``, or altogether."""
    if like is None:
        return None
    if part is None:
        return jnp.zeros(like.shape, like.dtype)
    missing = [(0, wanted - have) for wanted, have in zip(like.shape, part.shape, strict=True)]
    return jnp.pad(part, missing).astype(like.dtype)

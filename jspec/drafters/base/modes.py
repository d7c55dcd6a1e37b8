"""A switch between several propose functions, on the device: only the selected one runs.

XLA copies the outputs of a branch, so neither caches nor weights may leave one. A propose function
takes a drafter's memory and returns a ``Draft`` and the new memory. Only the leaves that it
replaced leave the branch.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jspec.core.types import Array, Draft, Memory, Params

BACKLOG = 16  # missed tokens that a paused network prefills per round; costs hardly more than two

Propose = Callable[[Memory], tuple[Draft, Memory]]


def switch(
    index: Array, proposers: Sequence[Propose], memory: Memory, params: Params
) -> tuple[Draft, Memory]:
    """Draft by ``proposers[index]``; smaller drafts are padded to the size of the largest.

    All draft chains, or none does, with one kind of proposal; a draft of the root alone goes with
    any. ``draft_to_target`` of a draft must be an array of ``params``.
    """
    if len(proposers) == 1:
        return proposers[0](memory)
    runs = [_Branch(propose, memory, params) for propose in proposers]
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
    for position, leaf in zip(changed, fresh, strict=True):
        leaves[position] = leaf
    if isinstance(like.parents, np.ndarray):
        draft = draft.replace(parents=like.parents)
    vocabulary = next((run.vocabulary for run in runs if run.vocabulary is not None), None)
    return draft.replace(draft_to_target=vocabulary), jax.tree.unflatten(structure, leaves)


class _Branch:
    """One propose function: the shapes of its draft, and the call inside a branch."""

    def __init__(self, propose: Propose, memory: Memory, params: Params):
        self._propose, self._memory = propose, memory
        self._inputs = {id(leaf): leaf for leaf in jax.tree.leaves((memory, params))}
        self.changed: list[int] = []  # indices of the memory's leaves that it replaces
        self.vocabulary: Array | None = None
        self._parents: np.ndarray | None = None
        shapes, _ = jax.eval_shape(self._run)
        self.draft = shapes if self._parents is None else shapes.replace(parents=self._parents)

    def _run(self) -> tuple[Draft, list[Array]]:
        draft, memory = self._propose(self._memory)
        before, after = jax.tree.leaves(self._memory), jax.tree.leaves(memory)
        pairs = enumerate(zip(before, after, strict=True))
        self.changed = [position for position, (old, new) in pairs if old is not new]
        if isinstance(draft.parents, np.ndarray):
            self._parents = draft.parents
            draft = draft.replace(parents=None)
        # The branch must not return this input of the program: that would copy it.
        self.vocabulary = self._inputs.get(id(draft.draft_to_target))
        if draft.draft_to_target is not None and self.vocabulary is None:
            raise ValueError("draft_to_target must be an array of the drafter's params, unchanged.")
        return draft.replace(draft_to_target=None), after

    def __call__(self, like: Draft, changed: list[int]) -> tuple[Draft, list[Array]]:
        """Return the draft padded to the shapes of ``like``, and the memory leaves ``changed``."""
        draft, after = self._run()
        static = isinstance(like.parents, np.ndarray)
        if not static and draft.parents is None:
            parents = jnp.broadcast_to(self._parents, draft.tokens.shape).astype(jnp.int32)
            draft = draft.replace(parents=parents)
        like = like.replace(parents=None) if static else like
        fields = ("tokens", "parents", "valid", "logits", "sampled", "score")
        values = {name: padded(vars(draft)[name], vars(like)[name]) for name in fields}
        draft = draft.replace(max_depth=like.max_depth, **values)
        return draft, [after[position] for position in changed]


def padded(field: Array | None, like: Any) -> Array | None:
    """Pad a field of a draft with zeros to the shape of ``like``; None stays or becomes zeros."""
    if like is None:
        return None
    if field is None:
        return jnp.zeros(like.shape, like.dtype)
    missing = [(0, size - have) for size, have in zip(like.shape, field.shape, strict=True)]
    return jnp.pad(field, missing).astype(like.dtype)

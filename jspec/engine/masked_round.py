"""One round in two programs, between which the host makes masks for the draft.

A grammar without an automaton (``jspec.grammar.followed``) is followed on the host. It must see the
drafted tokens before the target's logits are judged.
"""

import functools

import jax
import numpy as np
from flax import struct

from jspec import sharding
from jspec.core import logits_processors, trees
from jspec.core.branches import Branches, NodeMasks
from jspec.core.types import Array, Draft, Params, Request, Shared
from jspec.engine import launches
from jspec.engine.launches import Launch
from jspec.engine.loop import empty_launch
from jspec.engine.plan import Plan
from jspec.engine.profile import Profile
from jspec.engine.round import DecodeState, first_half, second_half
from jspec.util.promotion import standard_promotion


@struct.dataclass
class Halfway:
    """A draft between the programs of a round. Static parents stay static."""

    draft: Draft
    parents: tuple[int, ...] | None = struct.field(pytree_node=False, default=None)

    @classmethod
    def of(cls, draft: Draft) -> "Halfway":
        """Return what a program may return of a draft."""
        if isinstance(draft.parents, np.ndarray) and draft.parents.ndim == 1:
            return cls(draft.replace(parents=None), tuple(draft.parents.tolist()))
        return cls(draft)

    @property
    def whole(self) -> Draft:
        """The draft."""
        if self.parents is None:
            return self.draft
        return self.draft.replace(parents=np.array(self.parents, np.int32))


@functools.partial(jax.jit, static_argnames="plan", donate_argnames="state")
@standard_promotion
def draft_alone(
    plan: Plan,
    params: Params,
    request: Request,
    shared: Shared,
    state: DecodeState,
    tables: tuple[Array, ...] | None = None,
) -> tuple[DecodeState, Halfway]:
    """Run the first half of a round, for ``verify_alone``; consumes ``state``.

    Arguments are those of ``launch``.
    """
    state = state.attached(tables)
    draft, _, memory = first_half(plan, params, request, shared, state)
    state = state.replace(memory=memory)
    return state.settled(tables), sharding.whole(Halfway.of(draft))


@functools.partial(
    jax.jit, static_argnames=("plan", "profile"), donate_argnames=("shared", "state")
)
@standard_promotion
def verify_alone(
    plan: Plan,
    profile: Profile,
    params: Params,
    request: Request,
    shared: Shared,
    state: DecodeState,
    halfway: Halfway,
    bits: Array,
    used: Array,
    tables: tuple[Array, ...] | None = None,
) -> tuple[Shared, DecodeState, Launch]:
    """Run the second half of a round, under masks that the host made for the draft.

    Arguments are those of ``launch``, and:

    Args:
      halfway: from ``draft_alone``.
      bits: uint32 [B, N, W], tokens that may follow each node; see ``NodeMasks``.
      used: bool [B], rows that have such masks.
    """
    state, draft = state.attached(tables), halfway.whole
    tree = trees.broadcast(trees.from_parents(draft.parents, draft.max_depth), len(used))
    masks = NodeMasks.of_draft(bits, used, Branches.of_draft(state.history, draft, tree))
    empty = empty_launch(plan, profile, params, state)
    settings = logits_processors.masked(request.sampling.processors, masks)
    request = request.replace(sampling=request.sampling.replace(processors=settings))
    shared, state, ran = second_half(
        plan, params, request, None, (shared, state, empty), draft, tree
    )
    state = state.settled(tables)
    ran = launches.ended(ran, plan.max_depth, state.history, state.done, state.num_cached)
    shared, ran = sharding.whole((shared, ran))
    return shared, state, ran

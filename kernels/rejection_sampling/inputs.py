"""The inputs of the kernels, from a draft, its tree and the filters of a batch."""

import jax
import jax.numpy as jnp
import numpy as np

from jspec.core.types import Draft, Sampling, Tree
from jspec.kernels.rejection_sampling.distributions import Filters, Form, Proposal

Array = jax.Array


def form_of(draft: Draft, tree: Tree, rule: str, max_children: int | None) -> Form:
    """Return the static properties of a draft under a rule.

    Raises:
      ValueError: the draft has too few rows, or ``max_children`` is unknown.
    """
    if draft.logits is not None and draft.logits.shape[1] != draft.tokens.shape[1]:
        raise ValueError(
            f"draft.logits has {draft.logits.shape[1]} rows for {draft.tokens.shape[1]} nodes; "
            "give every node a row."
        )
    if max_children is None and not isinstance(draft.parents, np.ndarray):
        raise ValueError(
            "max_children=None needs static draft.parents; give the most children of a node, or "
            "leave sampling_backend out."
        )
    if max_children is None:
        max_children = int(np.bincount(draft.parents[1:], minlength=1).max(initial=1))
    mixed = draft.sampled is not None and draft.logits is not None and max_children > 1
    return Form(rule, tree.max_depth, max_children, mixed)


def proposal_of(draft: Draft, tree: Tree, vocab: int) -> Proposal:
    """Return a draft over the V target ids."""
    logits = draft.logits
    if logits is not None and draft.draft_to_target is not None:
        expanded = jnp.full((*logits.shape[:2], vocab), -jnp.inf, logits.dtype)
        logits = expanded.at[:, :, draft.draft_to_target].set(logits, unique_indices=True)
    parents = jnp.broadcast_to(jnp.asarray(tree.parents), draft.tokens.shape)
    return Proposal(draft.tokens, parents, draft.valid, draft.drawn, logits)


def filters_of(sampling: Sampling) -> Filters:
    """Return the filters of every row.

    Raises:
      ValueError: a filter is none of the kernels'.
    """
    unknown = set(sampling.names) - set(Filters._fields)
    if unknown:
        raise ValueError(
            f"rejection_sampling lacks the filters {sorted(unknown)}; leave sampling_backend out."
        )
    temperature = sampling.temperature * (not sampling.greedy)
    values = {name: sampling.values[name] for name in ("min_p", "top_k", "top_p")}
    return Filters(temperature, **values, names=sampling.names)

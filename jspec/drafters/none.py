"""No drafter: the loop with K = 0 is plain autoregressive decoding, the baseline."""

import dataclasses

import jax.numpy as jnp

from jspec.core import trees
from jspec.core.history import root_token
from jspec.core.types import Draft


@dataclasses.dataclass(frozen=True)
class NoDrafter:
    """A drafter that proposes nothing, so every round is one step of the target."""

    max_depth = 0
    tree_size = 1
    capture_layers = ()
    proposal = "deterministic"
    noise = "own"

    def init(self, params, request, capacity):
        """Return no memory."""
        return ()

    def prefill(self, params, memory, tokens, features, start, valid):
        """Do nothing."""
        return memory

    def propose(self, params, request, shared, memory, history):
        """Return the root alone."""
        root = root_token(history)[:, None]
        valid = jnp.ones_like(root, dtype=bool)
        return Draft(root, trees.chain(0), valid, max_depth=0), memory

    def update(self, params, request, shared, memory, history, draft, verdict, out):
        """Do nothing."""
        return memory, shared

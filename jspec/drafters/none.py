"""No drafter: the loop with K = 0 is plain autoregressive decoding, the baseline."""

import dataclasses

from jspec.core import modes


@dataclasses.dataclass(frozen=True)
class NoDrafter:
    """A drafter that proposes nothing, so every round is one step of the target."""

    max_depth = 0
    tree_size = 1
    capture_layers = ()
    lookahead = 0
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
        return modes.root_alone(history)(memory)

    def update(self, params, request, shared, memory, history, draft, verdict, out):
        """Do nothing."""
        return memory, shared

"""No drafter: the loop with K = 0 is plain autoregressive decoding, the baseline."""

import dataclasses

from jspec.core.history import root_alone
from jspec.core.types import Drafter


@dataclasses.dataclass(frozen=True)
class NoDrafter(Drafter):
    """A drafter that proposes nothing, so every round is one step of the target."""

    max_depth = 0
    tree_size = 1
    proposal = "deterministic"
    reads_pages = True
    lookahead = 0

    def propose(self, params, request, shared, memory, history):
        """Return the root alone."""
        return root_alone(history), memory

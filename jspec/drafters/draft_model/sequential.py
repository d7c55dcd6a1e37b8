"""A small language model drafts a chain, token by token (arXiv 2211.17192)."""

import dataclasses

from jspec.drafters.draft_model.chained import ChainedDrafter


@dataclasses.dataclass(frozen=True)
class DraftModel(ChainedDrafter):
    """Drafting by a decoder; see ``ChainedDrafter`` for its settings, weights and errors."""

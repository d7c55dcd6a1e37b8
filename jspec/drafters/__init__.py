"""Drafting methods, by the names that ``speculative_config`` gives them."""

from jspec.drafters.draft_model import DraftModel
from jspec.drafters.ngram import NGram
from jspec.drafters.none import NoDrafter

METHODS = {"none": NoDrafter, "ngram": NGram, "draft_model": DraftModel}

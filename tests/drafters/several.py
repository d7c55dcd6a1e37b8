"""Drafters of every kind of tree on the tiny target, with their weights."""

from tests import tiny
from tests.drafters import heads

_TREE = dict(num_speculative_tokens=3, tree_size=8, tree_top_k=3)
DRAFTERS = {
    "ngram": (tiny.NGRAM, None),
    "draft_model": (tiny.DRAFT, tiny.params().drafter),
    "eagle": (heads.drafter("eagle", 4), heads.random_params("eagle")),
    "sampled tree": (heads.drafter("eagle", tree="sampled", **_TREE), heads.random_params("eagle")),
    "eagle2": (heads.drafter("eagle", tree="eagle2", **_TREE), heads.random_params("eagle")),
}

"""Vocabularies and drafts of real models, for tests, ahead-of-time compilation and benchmarks."""

from typing import NamedTuple

import numpy as np

VOCABULARIES = {
    "Llama-2-7B": 32000,
    "Phi-3-mini": 32064,  # not a multiple of 128
    "Llama-3.1-8B": 128256,
    "Qwen2.5-7B": 151936,
}


class Case(NamedTuple):
    """A draft and a rule."""

    model: str
    parents: tuple[int, ...]  # the root is its own parent
    rule: str = "rejection"
    proposal: str = "chain"
    filters: tuple[str, ...] = ("temperature",)
    logits: str = "float32"  # dtype
    draft: str = "float32"  # dtype of the recorded logits

    @property
    def vocab(self) -> int:
        """Vocabulary size of the target."""
        return VOCABULARIES[self.model]

    @property
    def depth(self) -> int:
        """Depth of the deepest node."""
        depths = [0]
        for parent in self.parents[1:]:
            depths.append(depths[parent] + 1)
        return max(depths)

    @property
    def children(self) -> int:
        """Largest number of children of a node."""
        return int(np.bincount(self.parents[1:], minlength=1).max(initial=0))

    @property
    def drawn(self) -> tuple[bool, ...] | None:
        """Drawn nodes, or None if all are drawn."""
        nodes = range(len(self.parents))
        if self.proposal == "mixed":
            return tuple(node % 2 == 1 for node in nodes)
        if self.proposal == "top_plus_one":  # the last child of its parent
            return tuple(self.parents[node] not in self.parents[node + 1 :] for node in nodes)
        return None


def chain(depth: int) -> tuple[int, ...]:
    """Return the parents of a chain."""
    return (0, *range(depth))


def tree(children: int, nodes: int) -> tuple[int, ...]:
    """Return the parents of a complete tree, in breadth-first order."""
    return (0, *((node - 1) // children for node in range(1, nodes)))


ALL_FILTERS = ("temperature", "min_p", "top_k", "top_p")

BFLOAT16 = {"logits": "bfloat16", "draft": "bfloat16"}
LLAMA, PHI = "Llama-2-7B", "Phi-3-mini"
DRAWN = "without_replacement"

CASES = {
    "a chain of 1": Case(LLAMA, chain(1), filters=ALL_FILTERS),
    "a chain of 4 over an odd vocabulary": Case(
        PHI, chain(4), filters=("temperature", "top_p"), logits="bfloat16"
    ),
    "a chain of 8": Case("Llama-3.1-8B", chain(8), **BFLOAT16),
    "a chain of 5 under block": Case("Qwen2.5-7B", chain(5), "block", logits="bfloat16"),
    "a chain of 3 under block, all filters": Case(PHI, chain(3), "block", filters=ALL_FILTERS),
    "a chain of drawn and deterministic nodes": Case(LLAMA, chain(6), "block", "mixed"),
    "a tree of 8": Case(LLAMA, tree(2, 8), proposal=DRAWN),
    "a tree of 21, top_plus_one": Case(
        LLAMA, tree(4, 21), proposal="top_plus_one", filters=("temperature", "top_k")
    ),
    "a tree of 64": Case("Llama-3.1-8B", tree(4, 64), proposal=DRAWN, **BFLOAT16),
    "a tree of 8 under block": Case(LLAMA, tree(2, 8), "block", DRAWN),
    "a tree of 9 under block, top_plus_one": Case(PHI, tree(3, 9), "block", "top_plus_one"),
    "a tree of 64 under block": Case("Llama-3.1-8B", tree(4, 64), "block", DRAWN, **BFLOAT16),
}

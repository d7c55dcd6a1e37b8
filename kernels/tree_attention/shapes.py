"""Shapes of real models, for tests, ahead-of-time compilation and benchmarks."""

from typing import NamedTuple


class Heads(NamedTuple):
    """Attention heads of a layer."""

    queries: int
    keys: int
    features: int


MODELS = {
    "Llama-3.1-8B": Heads(32, 8, 128),
    "Llama-3.1-70B": Heads(64, 8, 128),
    "Llama-2-7B": Heads(32, 32, 128),
    "Qwen2.5-0.5B": Heads(14, 2, 64),
    "Phi-2": Heads(32, 32, 80),
    "Falcon-7B": Heads(71, 1, 64),
    "gpt-oss-20b": Heads(64, 8, 64),
}


class Case(NamedTuple):
    """A tree and a cache; ``tree_keys`` 0 stands for one per node."""

    model: str
    nodes: int
    tree_keys: int = 0
    window: int | None = None
    soft_cap: float | None = None
    splits: int | None = None  # programs that share a prefix; None for the kernel's choice
    has_sinks: bool = False

    @property
    def heads(self) -> Heads:
        """Attention heads of the model."""
        return MODELS[self.model]

    @property
    def keys(self) -> int:
        """Keys of the tree block."""
        return self.tree_keys or self.nodes


CASES = {
    "one node": Case("Llama-3.1-8B", 1),
    "a chain of 4": Case("Llama-3.1-8B", 5),
    "a tree of 61": Case("Llama-3.1-8B", 61),
    "a tree of 64 at 70B": Case("Llama-3.1-70B", 64),
    "a tree of 100": Case("Llama-2-7B", 100),
    "a step over a side buffer": Case("Qwen2.5-0.5B", 8, tree_keys=40),
    "80 features": Case("Phi-2", 5, splits=2),
    "one key head": Case("Falcon-7B", 5, splits=3),
    "a window and a soft cap": Case("Llama-3.1-8B", 5, window=21, soft_cap=2.0),
    "a window over splits": Case("Llama-3.1-8B", 8, window=50, splits=3),
    "sinks": Case("gpt-oss-20b", 5, window=21, has_sinks=True),
    "sinks over splits": Case("gpt-oss-20b", 8, splits=3, has_sinks=True),
}

"""The settings of ``jspec tune``."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from jspec.api.sampling_params import SamplingParams
from jspec.core import trees
from jspec.tools.bench.contenders import Case
from jspec.tools.bench.settings import check_batch_sizes, check_seed, check_whole

# Nodes of the smallest static tree that is searched, and the step from one size to the next.
# Devices pad the rows of a product to at least as many.
TREE_STEP = 4


@dataclasses.dataclass(frozen=True)
class Settings:
    """The space that ``tune`` searches, and how often it measures.

    Attributes:
      configs: ``speculative_config`` values. If a config sets neither K nor a tree, both are
        searched; any other config is a candidate as it is. Plain decoding is always a candidate.
      batch_sizes: requests that run together; each size has its own winner.
      temperature: 0 is greedy.
      max_speculative_tokens: largest K.
      max_tree_size: most nodes of a tree with the root, at least 4; 0 searches chains only.
      max_tokens: most tokens of an answer.
      prompt_tokens: first turns are cut to this length, and longer later turns are left out (0: no
        limit).
      per_category: questions of each category (0: all).
      repeats: undisturbed samples of every measurement.
      patience: further turns to wait for such samples while other processes use the machine.
      max_programs: most candidates whose rounds are measured at a batch size.
      dtype: of weights, as in ``LLM``.
      seed: of all noise.

    Raises:
      ValueError: a value is out of range.
    """

    configs: tuple[Mapping[str, Any], ...]
    batch_sizes: tuple[int, ...] = (1,)
    temperature: float = 0.0
    max_speculative_tokens: int = 8
    max_tree_size: int = 32
    max_tokens: int = 128
    prompt_tokens: int = 0
    per_category: int = 0
    repeats: int = 5
    patience: int = 5
    max_programs: int = 12
    dtype: str | None = None
    seed: int = 0

    def __post_init__(self):
        check_whole(
            self,
            max_speculative_tokens=1,
            max_tree_size=0,
            max_tokens=8,
            prompt_tokens=0,
            per_category=0,
            repeats=1,
            patience=0,
            max_programs=1,
        )
        check_batch_sizes(self.batch_sizes)
        check_seed(self.seed)
        for name in ("max_speculative_tokens", "max_tree_size"):
            value = getattr(self, name)
            if value > trees.MOST_NODES:
                raise ValueError(f"{name}={value} must be at most {trees.MOST_NODES}.")
        if 0 < self.max_tree_size < TREE_STEP:
            raise ValueError(
                f"max_tree_size={self.max_tree_size} must be 0, for chains alone, or at least "
                f"{TREE_STEP}."
            )
        SamplingParams(temperature=self.temperature, seed=self.seed)
        if not self.configs:
            raise ValueError("there is no method to tune; name one with --config.")

    def case(self, batch_size: int) -> Case:
        """Return the work of every candidate at a batch size."""
        return Case(batch_size, self.temperature, self.max_tokens, self.seed)

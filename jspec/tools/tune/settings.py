"""What ``jspec tune`` is asked to search."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from jspec.api.sampling_params import SamplingParams
from jspec.core import trees
from jspec.tools.bench.contenders import Case
from jspec.tools.bench.settings import check_batch_sizes, check_seed, check_whole

# Nodes of the smallest tree that is searched, and from one to the next: devices pad the rows of a
# product to as many, or more.
TREE_STEP = 4


@dataclasses.dataclass(frozen=True)
class Settings:
    """What is searched, and how often things are measured.

    Attributes:
      configs: each a ``speculative_config``. Of one that says neither K nor a tree both are
        searched; any other is a candidate as it is. Plain decoding always is one.
      batch_sizes: requests that run together; each has a winner of its own.
      temperature: 0 is greedy.
      max_speculative_tokens: largest K.
      max_tree_size: most nodes of a tree, root included, at least 4; 0 searches chains alone.
      max_tokens: most tokens of an answer.
      prompt_tokens: first turns are cut to so many tokens, and longer later ones left out (0: no
        limit).
      per_category: questions of each category (0: all).
      repeats: undisturbed samples of whatever is timed.
      patience: further turns to wait for such samples while others use the machine.
      max_programs: shapes of drafts whose rounds are measured for a batch size, at most.
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
            if getattr(self, name) > trees.MOST_NODES:
                given = getattr(self, name)
                raise ValueError(f"{name}={given} must be at most {trees.MOST_NODES}.")
        if 0 < self.max_tree_size < TREE_STEP:
            raise ValueError(
                f"max_tree_size={self.max_tree_size} must be 0, for chains alone, or at least "
                f"{TREE_STEP}."
            )
        SamplingParams(temperature=self.temperature, seed=self.seed)
        if not self.configs:
            raise ValueError("there is no method to tune; name one with --config.")

    def case(self, batch_size: int) -> Case:
        """What everybody does at a batch size."""
        return Case(batch_size, self.temperature, self.max_tokens, self.seed)

"""The settings of ``jspec tune``."""

import dataclasses

from jspec.api.sampling_params import SamplingParams
from jspec.core import trees
from jspec.tools.bench.contenders import Case
from jspec.tools.bench.settings import CommonSettings, check_whole

# Nodes of the smallest static tree that is searched, and the step from one size to the next.
# Devices pad the rows of a product to at least as many.
TREE_STEP = 4
SAMPLED_ANSWERS = 16  # at least, above temperature 0


@dataclasses.dataclass(frozen=True)
class Settings(CommonSettings):
    """The space that ``tune`` searches; see ``CommonSettings`` for the other settings.

    If a config sets neither K nor a tree, both are searched; any other config is a candidate as it
    is. Plain decoding is always a candidate.

    Attributes:
      temperature: 0 is greedy.
      max_speculative_tokens: largest K.
      max_tree_size: most nodes of a tree with the root, at least 4; 0 searches chains only.
      max_programs: most candidates that are measured at a batch size, besides plain decoding.
      quantization: of the target's weights, as in ``LLM``.
    """

    temperature: float = 0.0
    max_speculative_tokens: int = 8
    max_tree_size: int = 32
    max_programs: int = 16
    patience: int = dataclasses.field(default=5, kw_only=True)
    quantization: str | None = dataclasses.field(default=None, kw_only=True)

    def __post_init__(self):
        super().__post_init__()
        check_whole(self, max_tokens=8, max_speculative_tokens=1, max_tree_size=0, max_programs=1)
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

    def case(self, batch_size: int) -> Case:
        """Return the work of every candidate at a batch size."""
        return Case(batch_size, self.temperature, self.max_tokens, self.seed)

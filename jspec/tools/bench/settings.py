"""What ``jspec bench`` is asked to measure."""

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jspec.api import config
from jspec.api.sampling_params import SamplingParams
from jspec.tools.bench.contenders import Case
from jspec.util.messages import shown
from jspec.util.values import is_whole

_LARGEST_SEED = 2**63 - 1


def check_whole(settings: Any, **least: int) -> None:
    """Raises ValueError where an attribute is no whole number of at least its ``least``."""
    for name, limit in least.items():
        if not is_whole(getattr(settings, name), limit):
            given = shown(getattr(settings, name))
            raise ValueError(f"{name}={given} must be a whole number of at least {limit}.")


def check_batch_sizes(sizes: Sequence[int]) -> None:
    """Raises ValueError where there is none, or one is no whole number of at least 1, or twice."""
    if not sizes or not all(is_whole(size, 1) for size in sizes):
        raise ValueError(f"batch_sizes={shown(sizes)} must be at least 1 each.")
    check_once("batch_sizes", sizes)


def check_once(name: str, values: Sequence[float]) -> None:
    """Raises ValueError where a value stands twice: it would be measured twice, as one table."""
    for place, value in enumerate(values):
        if value in values[:place]:
            raise ValueError(f"{name}={shown(values)} has {shown(value)} twice; leave one out.")


def check_seed(seed: int) -> None:
    """Raises ValueError where requests, which take it and those after it, would not all be seeded.

    To ``SamplingParams`` -1 is no seed.
    """
    if not is_whole(seed, 0, _LARGEST_SEED):
        raise ValueError(f"seed={shown(seed)} must be a whole number from 0 to 2**63 - 1.")


@dataclasses.dataclass(frozen=True)
class Settings:
    """What is measured, and how often.

    Attributes:
      configs: each a ``speculative_config``, one a method.
      batch_sizes: requests that run together; every one is a table.
      temperatures: likewise.
      max_tokens: most tokens of an answer.
      prompt_tokens: first turns are cut to so many tokens, and longer later ones left out (0: no
        limit).
      per_category: questions of each category (0: all).
      repeats: undisturbed samples of every contender.
      patience: further turns to wait for such samples while others use the machine.
      dtype: of weights, as in ``LLM``.
      peers: whether transformers is measured, too, where it is installed.
      seed: of all noise.

    Raises:
      ValueError: a value is out of range.
    """

    configs: tuple[Mapping[str, Any], ...]
    batch_sizes: tuple[int, ...] = (1,)
    temperatures: tuple[float, ...] = (0.0,)
    max_tokens: int = 128
    prompt_tokens: int = 0
    per_category: int = 0
    repeats: int = 5
    patience: int = 2
    dtype: str | None = None
    peers: bool = True
    seed: int = 0

    def __post_init__(self):
        if not self.configs:
            raise ValueError("there is no method to measure; name one with --config.")
        for given in self.configs:
            config.read(given)
        check_whole(self, max_tokens=2, prompt_tokens=0, per_category=0, repeats=1, patience=0)
        check_batch_sizes(self.batch_sizes)
        check_seed(self.seed)
        for temperature in self.temperatures:
            SamplingParams(temperature=temperature, seed=self.seed)
        check_once("temperatures", self.temperatures)
        if not self.temperatures:
            raise ValueError("temperatures=() must hold at least one.")

    @property
    def cases(self) -> list[Case]:
        """Every batch at every temperature."""
        pairs = itertools.product(self.temperatures, self.batch_sizes)
        return [Case(size, degree, self.max_tokens, self.seed) for degree, size in pairs]

    @property
    def draft_folder(self) -> str | None:
        """A draft model that transformers can load, too, if there is one."""
        for each in self.configs:
            model = each.get("model")
            if each.get("method") == "draft_model" and model and Path(str(model)).is_dir():
                return str(model)
        return None

"""The settings of ``jspec bench``."""

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
    """Raise ValueError unless the attributes are whole numbers of at least their ``least``."""
    for name, limit in least.items():
        value = getattr(settings, name)
        if not is_whole(value, limit):
            raise ValueError(f"{name}={shown(value)} must be a whole number of at least {limit}.")


def check_once(name: str, values: Sequence[float]) -> None:
    """Raise ValueError for a repeated value, which would be measured twice in one table."""
    for index, value in enumerate(values):
        if value in values[:index]:
            raise ValueError(f"{name}={shown(values)} has {shown(value)} twice; leave one out.")


@dataclasses.dataclass(frozen=True, kw_only=True)
class CommonSettings:
    """The settings that ``bench`` and ``tune`` share.

    Attributes:
      configs: ``speculative_config`` values.
      batch_sizes: requests that run together; each size has its own results.
      max_tokens: most tokens of an answer.
      prompt_tokens: first turns are cut to this length, and longer later turns are left out (0: no
        limit).
      per_category: questions of each category (0: all).
      repeats: undisturbed samples of every measurement.
      patience: further turns to wait for such samples while other processes use the machine.
      dtype: of weights, as in ``LLM``.
      tensor_parallel_size: devices of an engine, as in ``LLM``.
      enable_expert_parallel: as in ``LLM``.
      seed: of all noise.

    Raises:
      ValueError: a value is out of range.
    """

    configs: tuple[Mapping[str, Any], ...] = dataclasses.field(kw_only=False)
    batch_sizes: tuple[int, ...] = dataclasses.field(default=(1,), kw_only=False)
    max_tokens: int = 128
    prompt_tokens: int = 0
    per_category: int = 0
    repeats: int = 5
    patience: int = 2
    dtype: str | None = None
    tensor_parallel_size: int = 1
    enable_expert_parallel: bool = False
    seed: int = 0

    def __post_init__(self):
        if not self.configs:
            raise ValueError("there is no method to run; name one with --config.")
        check_whole(self, max_tokens=2, prompt_tokens=0, per_category=0, repeats=1, patience=0)
        check_whole(self, tensor_parallel_size=1)
        if not self.batch_sizes or not all(is_whole(size, 1) for size in self.batch_sizes):
            raise ValueError(f"batch_sizes={shown(self.batch_sizes)} must be at least 1 each.")
        check_once("batch_sizes", self.batch_sizes)
        if not is_whole(self.seed, 0, _LARGEST_SEED):  # -1 would mean no seed
            raise ValueError(f"seed={shown(self.seed)} must be a whole number from 0 to 2**63 - 1.")

    @property
    def split(self) -> dict[str, Any]:
        """The arguments of ``LLM`` by which devices share the target."""
        names = "tensor_parallel_size", "enable_expert_parallel"
        return {name: getattr(self, name) for name in names}


@dataclasses.dataclass(frozen=True)
class Settings(CommonSettings):
    """The methods and cases that ``bench`` measures; see ``CommonSettings`` for the others."""

    temperatures: tuple[float, ...] = (0.0,)  # each temperature is a table, 0 is greedy
    peers: bool = True  # whether transformers is measured too, if it is installed
    attention_backend: str | None = None  # As in ``LLM``, for all contenders.
    sampling_backend: str | None = None  # As in ``LLM``, for ``configs``.
    # As in ``LLM``; each engine has a batch.
    data_parallel_size: int = dataclasses.field(default=1, kw_only=True)
    # As in ``LLM``; with each, the target runs once more under all methods.
    quantizations: tuple[str, ...] = dataclasses.field(default=(), kw_only=True)

    def __post_init__(self):
        super().__post_init__()
        check_whole(self, data_parallel_size=1)
        for given in self.configs:
            config.read(given)
        for temperature in self.temperatures:
            SamplingParams(temperature=temperature, seed=self.seed)
        check_once("temperatures", self.temperatures)
        check_once("quantizations", self.quantizations)
        if self.quantizations and self.tensor_parallel_size > 1:
            raise ValueError(
                f"quantizations={shown(self.quantizations)} are measured on one device; leave out "
                f"tensor_parallel_size={self.tensor_parallel_size}."
            )
        if not self.temperatures:
            raise ValueError("temperatures=() must hold at least one.")

    @property
    def cases(self) -> list[Case]:
        """Every batch size at every temperature."""
        pairs = itertools.product(self.temperatures, self.batch_sizes)
        return [Case(size, value, self.max_tokens, self.seed) for value, size in pairs]

    @property
    def draft_folder(self) -> str | None:
        """The folder of a draft model, which transformers can load too; None without one."""
        for each in self.configs:
            model = each.get("model")
            if each.get("method") == "draft_model" and model and Path(str(model)).is_dir():
                return str(model)
        return None

"""Settings that every training script shares, and which of them a resumed run may change."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, Literal

# What a resumed run may change: it stays the same run. All else is its identity.
_FREE = frozenset(
    (
        "accumulate",
        "remat",
        "log_every",
        "eval_every",
        "save_every",
        "save_minutes",
        "keep",
        "data_parallel",
        "fsdp",
        "tensor",
        "coordinator",
        "process_id",
    )
)
_COUNTS = ("batch", "accumulate", "steps", "log_every", "eval_every", "keep", "fsdp", "tensor")
_AMOUNTS = ("warmup", "decay", "data_parallel", "save_every", "seed", "weight_decay")


@dataclasses.dataclass(frozen=True)
class TrainerSettings:
    """How a run is trained. Every field is an option of the command line: ``--batch 16``.

    Attributes:
      batch: windows of one step, over all devices
      accumulate: parts in which a step's windows are computed, to save memory
      steps: optimiser steps in all
      optimizer: muon: for the blocks' matrices, adamw for the rest
      schedule: course of the learning rate after the warm-up
      learning_rate: peak learning rate
      learning_rate_floor: share of the peak at which cosine and linear end
      warmup: steps of rising learning rate
      decay: steps of falling learning rate at the end (wsd)
      beta1: decay of AdamW's mean of gradients
      beta2: decay of AdamW's mean of squared gradients
      weight_decay: decay of the matrices inside the blocks
      clip: what is cut of gradients: their global norm, or each value
      clip_at: largest norm or value that is left
      compute: factors of every matmul; sums and master weights stay float32
      remat: compute a block's activations again in the backward pass, to save memory
      seed: of the first weights, the order of the data and all noise
      log_every: steps between lines of the log
      eval_every: steps between held-out losses
      save_minutes: most minutes between checkpoints
      save_every: steps between checkpoints (0: by the clock, and where the run is best)
      keep: newest checkpoints that are kept, beside the best
      data_parallel: devices that split a batch and copy the weights (0: as many as are left)
      fsdp: devices that split a batch, the weights and the optimiser's state
      tensor: devices that split the weights again, and share a batch
      coordinator: host:port of the first of several processes; auto where the cluster knows
      num_processes: processes that train together, with --coordinator host:port
      process_id: this process, from 0 on

    Raises:
      ValueError: a value is out of range; the message names option, value and remedy.
    """

    batch: int = 16
    accumulate: int = 4
    steps: int = 2000
    optimizer: Literal["adamw", "muon"] = "adamw"
    schedule: Literal["cosine", "linear", "wsd", "constant"] = "cosine"
    learning_rate: float = 3e-3
    learning_rate_floor: float = 0.1
    warmup: int = 50
    decay: int = 200
    beta1: float = 0.9
    beta2: float = 0.98
    weight_decay: float = 0.1
    clip: Literal["norm", "value", "none"] = "norm"
    clip_at: float = 1.0
    compute: Literal["bfloat16", "float32"] = "bfloat16"
    remat: bool = False
    seed: int = 0
    log_every: int = 10
    eval_every: int = 100
    save_minutes: float = 5.0
    save_every: int = 0
    keep: int = 2
    data_parallel: int = 0
    fsdp: int = 1
    tensor: int = 1
    coordinator: str = ""
    num_processes: int = 1
    process_id: int = 0

    def __post_init__(self):
        for least, names in ((1, _COUNTS), (0, _AMOUNTS)):
            for name in names:
                value = getattr(self, name)
                if not least <= value < math.inf:
                    raise bad_option(name, value, f"it must be at least {least}")
        for name in ("learning_rate", "clip_at", "save_minutes"):
            if not getattr(self, name) > 0:
                raise bad_option(name, getattr(self, name), "it must be above 0")
        if self.learning_rate == math.inf:
            raise bad_option("learning_rate", self.learning_rate, "take a finite one")
        if not 0 <= self.learning_rate_floor <= 1:
            raise bad_option("learning_rate_floor", self.learning_rate_floor, "take 0 to 1")
        for name in ("beta1", "beta2"):
            if not 0 <= getattr(self, name) < 1:
                raise bad_option(name, getattr(self, name), "it must be at least 0 and below 1")
        if self.batch % self.accumulate:
            raise bad_option("accumulate", self.accumulate, f"it must divide --batch {self.batch}")
        if self.warmup + (self.decay if self.schedule == "wsd" else 0) > self.steps:
            raise bad_option("steps", self.steps, "warm-up and decay do not fit; take more steps")
        self._check_processes()

    def _check_processes(self):
        if self.coordinator in ("", "auto"):
            for name, alone in (("num_processes", 1), ("process_id", 0)):
                if getattr(self, name) != alone:
                    raise bad_option(name, getattr(self, name), "give --coordinator host:port too")
        elif not 0 <= self.process_id < self.num_processes:
            remedy = f"count from 0 to --num-processes {self.num_processes} less one"
            raise bad_option("process_id", self.process_id, remedy)

    def idle(self) -> dict[str, str]:
        """Options that change nothing beside the others, with the remedy; see ``refuse_idle``."""
        found = {}
        if self.schedule in ("wsd", "constant"):
            found["learning_rate_floor"] = f"--schedule {self.schedule} has none; leave it out"
        if self.schedule != "wsd":
            found["decay"] = "only --schedule wsd has it; leave it out"
        if self.clip == "none":
            found["clip_at"] = "--clip none cuts nothing; leave it out"
        return found

    def identity(self) -> dict[str, Any]:
        """The options that must stay as they are for a resumed run to be the same run."""
        given = dataclasses.asdict(self)
        free = {*_FREE, "num_processes"}  # those are counted where they run
        if self.schedule in ("wsd", "constant"):
            free |= {"steps", "decay"}  # they change only what has not happened yet
        if self.schedule != "wsd":
            free.add("decay")
        return {name: value for name, value in given.items() if name not in free}

    def free(self) -> dict[str, Any]:
        """The other options but those that name machines: a record of what a run's parts had."""
        given = dataclasses.asdict(self)
        machines = {"coordinator", "num_processes", "process_id"}
        return {k: v for k, v in given.items() if k not in self.identity().keys() | machines}


def refuse_idle(given: Any, usual: Any, idle: Mapping[str, str]) -> None:
    """Refuses options that were given and would change nothing.

    Args:
      given: options, a dataclass.
      usual: the same where nobody said otherwise.
      idle: names of such options, with the remedy.

    Raises:
      OptionError: one of them is not as usual.
    """
    for name, remedy in idle.items():
        if getattr(given, name) != getattr(usual, name):
            raise bad_option(name, getattr(given, name), remedy)


class OptionError(ValueError):
    """An option that cannot work."""


def bad_option(name: str, value: Any, remedy: str) -> OptionError:
    """The error of an option that cannot work, under its name on the command line."""
    return OptionError(f"--{name.replace('_', '-')} {value!r} does not work; {remedy}")

"""Options of the trainer, and which of them a resumed run may change."""

import dataclasses
from typing import Any, Literal

from training.util.errors import bad_option, check_each, check_least, check_positive

# A resumed run may change these; all others identify it.
_FREE = {
    *("accumulate", "remat", "log_every", "eval_every", "save_every", "save_minutes", "keep"),
    *("data_parallel", "fsdp", "tensor", "coordinator", "num_processes", "process_id"),
}

# What runs of earlier versions, which do not record it, were trained with.
EARLIER = {"adamw_share": 1.0}


@dataclasses.dataclass(frozen=True)
class TrainerSettings:
    """Optimiser, schedule, checkpoints and devices. Every field is an option: ``--batch 16``."""

    batch: int = 16  # windows of one step, over all devices
    accumulate: int = 4  # micro-batches in which a step's windows are computed, to save memory
    steps: int = 2000  # optimiser steps in all
    # muon for the matrices of the blocks and adamw for the rest, or adamw for all
    optimizer: Literal["adamw", "muon"] = "adamw"
    # learning rate after the warm-up
    schedule: Literal["cosine", "linear", "wsd", "constant"] = "cosine"
    learning_rate: float = 3e-3  # peak learning rate
    # muon only: learning rate of AdamW's weights (vectors, embeddings, output matrices), as a share
    adamw_share: float = 1.0
    learning_rate_floor: float = 0.1  # share of the peak at which cosine and linear end
    warmup: int = 50  # steps of rising learning rate
    decay: int = 200  # steps of falling learning rate at the end (wsd)
    beta1: float = 0.9  # decay of AdamW's mean of gradients
    beta2: float = 0.98  # decay of AdamW's mean of squared gradients
    weight_decay: float = 0.1  # decay of the matrices inside the blocks
    # clip the global norm of the gradients, each value, or nothing
    clip: Literal["norm", "value", "none"] = "norm"
    clip_at: float = 1.0  # largest norm or value after clipping
    # dtype of the factors of every matmul; sums and master weights stay float32
    compute: Literal["bfloat16", "float32"] = "bfloat16"
    remat: bool = False  # compute a block's activations again in the backward pass, to save memory
    seed: int = 0  # seed of the initial weights, the order of the data and all noise
    log_every: int = 10  # steps between lines of the log
    eval_every: int = 100  # steps between evaluations on held-out data
    save_minutes: float = 5.0  # maximum minutes between checkpoints
    save_every: int = 0  # steps between checkpoints (0: by the clock, and after best evaluations)
    keep: int = 2  # newest checkpoints that are kept, beside the best
    data_parallel: int = 0  # devices that split a batch and copy the weights (0: all that are left)
    fsdp: int = 1  # devices that split a batch, the weights and the optimiser's state
    tensor: int = 1  # devices that split the weights again, and share a batch
    coordinator: str = ""  # host:port of the first of several processes; auto if the cluster has it
    num_processes: int = 1  # processes that train together, with --coordinator host:port
    process_id: int = 0  # number of this process, from 0 on

    def __post_init__(self):
        check_least(self, 1, "batch", "accumulate", "steps", "log_every", "eval_every", "keep")
        check_least(self, 1, "fsdp", "tensor")
        check_least(self, 0, "warmup", "decay", "data_parallel", "save_every", "seed")
        check_least(self, 0, "weight_decay")
        check_positive(self, "learning_rate", "adamw_share")
        check_each(self, ["clip_at", "save_minutes"], lambda x: x > 0, "it must be above 0")
        check_each(self, ["learning_rate_floor"], lambda x: 0 <= x <= 1, "take 0 to 1")
        remedy = "it must be at least 0 and below 1"
        check_each(self, ["beta1", "beta2"], lambda x: 0 <= x < 1, remedy)
        if self.batch % self.accumulate:
            raise bad_option("accumulate", self.accumulate, f"it must divide --batch {self.batch}")
        if self.warmup + (self.decay if self.schedule == "wsd" else 0) > self.steps:
            raise bad_option("steps", self.steps, "warm-up and decay do not fit; take more steps")
        if self.coordinator in ("", "auto"):
            for name, alone in (("num_processes", 1), ("process_id", 0)):
                if vars(self)[name] != alone:
                    remedy = "give --coordinator host:port too"
                    raise bad_option(name, vars(self)[name], remedy)
        elif not 0 <= self.process_id < self.num_processes:
            remedy = f"count from 0 to --num-processes {self.num_processes} less one"
            raise bad_option("process_id", self.process_id, remedy)

    def idle(self) -> dict[str, str]:
        """Return options without effect, each with the remedy; see ``refuse_idle``."""
        idle = {}
        if self.schedule in ("wsd", "constant"):
            idle["learning_rate_floor"] = f"--schedule {self.schedule} has none; leave it out"
        if self.schedule != "wsd":
            idle["decay"] = "only --schedule wsd has it; leave it out"
        if self.optimizer != "muon":
            idle["adamw_share"] = "only --optimizer muon has it; leave it out"
        if self.clip == "none":
            idle["clip_at"] = "--clip none cuts nothing; leave it out"
        return idle

    def identity(self) -> dict[str, Any]:
        """Return the options that a resumed run must share."""
        free = _FREE | {"decay"}
        if self.schedule in ("wsd", "constant"):
            free |= {"steps"}  # it only changes steps that have not happened yet
        return {k: v for k, v in dataclasses.asdict(self).items() if k not in free}

    def free(self) -> dict[str, Any]:
        """Return the other options, without those that name machines, for the record."""
        fixed = self.identity().keys() | {"coordinator", "num_processes", "process_id"}
        return {k: v for k, v in dataclasses.asdict(self).items() if k not in fixed}

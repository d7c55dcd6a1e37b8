"""The trainer that all scripts share: leave it alone, kill it, run it again.

``settings`` are the options, ``loop`` is ``train``, ``programs`` what is compiled, ``mesh`` where
that runs, ``checkpointing`` what survives, ``command`` the script around it.
"""

from training.trainer.command import run_command
from training.trainer.errors import TrainingError
from training.trainer.loop import Result, train
from training.trainer.mesh import first_process_first, gather, start_processes
from training.trainer.progress import progress
from training.trainer.provenance import provenance, without_folders, write_provenance
from training.trainer.settings import TrainerSettings, bad_option, refuse_idle

__all__ = [
    "Result",
    "TrainerSettings",
    "TrainingError",
    "bad_option",
    "first_process_first",
    "gather",
    "progress",
    "provenance",
    "refuse_idle",
    "run_command",
    "start_processes",
    "train",
    "without_folders",
    "write_provenance",
]

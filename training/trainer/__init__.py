"""The trainer of all scripts: a run may be killed at any moment and resumes exactly.

``settings`` are the options, ``task`` is what a script provides, ``loop`` has ``train``,
``programs`` is compiled, ``mesh`` places arrays on devices, ``checkpointing`` saves.
"""

from training.trainer.loop import Result, check_stopped, train
from training.trainer.mesh import check_agreed, first_process_first, gather, start, together
from training.trainer.settings import TrainerSettings
from training.util.progress import run_progress as progress

__all__ = [
    "Result",
    "TrainerSettings",
    "check_agreed",
    "check_stopped",
    "first_process_first",
    "gather",
    "progress",
    "start",
    "together",
    "train",
]

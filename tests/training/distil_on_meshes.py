"""Distil heads on meshes of virtual devices; print a line of JSON for each run.

Arguments: a folder of text, one with the target, and one for the runs. With the options of a
process as well, that process runs its part of the first steps of the run "pair".
"""

import json
import shutil
import sys
from pathlib import Path

import jax

from jspec.checkpoints import checkpoint
from jspec.models import decoder
from tests import networks
from training import distill
from training.trainer.metrics import read_log
from training.util.command import run_command

# Key heads repeat with four devices.
SIZES = networks.build(
    vocab_size=300,
    hidden_size=32,
    intermediate_size=64,
    num_layers=3,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    max_positions=128,
)
OPTIONS = """--length 24 --batch 8 --accumulate 2 --steps 6 --warmup 1 --log-every 1 --eval-every 3
--eval-windows 4 --acceptance-prompts 2 --prompt-tokens 8 --max-new-tokens 8 --temperatures 0
--num-speculative-tokens 2 --compute float32 --learning-rate 1e-2 --held-out-modules secret
--export-dtype float32"""
METHODS = {
    "eagle": "--unroll 2 --draft-vocab-size 80 --capture-layers 0 1 2 --remat",
    "draft": "--draft-layers 0 2 --acceptance-prompts 0",
}
# (data, fsdp, tensor) and the number of steps there; a run that moves resumes.
ONE = [((1, 1, 1), 6)]
RUNS = {
    ("eagle", "one"): ONE,
    ("eagle", "moves"): [((2, 2, 2), 2), ((1, 2, 2), 2), ((1, 1, 1), 2)],
    ("eagle", "pair"): [((1, 1, 1), 3)],  # two processes ran three steps
    ("draft", "one"): ONE,
    ("draft", "wide"): [((2, 1, 4), 6)],
}


def write_target(tokenizer: Path, folder: Path) -> None:
    params = networks.loud(decoder.init_params(jax.random.key(0), SIZES), 4)
    checkpoint.save_pretrained(folder, SIZES, params)
    shutil.copytree(tokenizer, folder, dirs_exist_ok=True)


def words(text: Path, target: Path, method: str, out: Path, mesh: tuple[int, int, int]) -> list:
    """Return the options of a run."""
    files = ["--target", str(target), "--data", str(text), "--output", str(out)]
    data, fsdp, tensor = mesh
    axes = f"--data-parallel {data} --fsdp {fsdp} --tensor {tensor}"
    return [*files, *f"{OPTIONS} {METHODS[method]} {axes}".split()]


def run(argv: list, method: str, steps: int) -> int:
    """Run some steps in this process; return the exit code."""
    row = distill.METHODS[method]
    return run_command(
        row.options(argv),
        lambda settings, argv: distill.run(row, settings, argv, stop_after=steps),
        argv,
        module="training.distill",
        description="",
    )


def main(text: Path, target: Path, folder: Path) -> None:
    for (method, name), parts in RUNS.items():
        out = folder / f"{method}_{name}"
        for mesh, steps in parts:
            assert run(words(text, target, method, out, mesh), method, steps) == 0
        log = read_log(out / "metrics.jsonl")
        names = "loss", "heldout_loss", "acceptance_length"
        values = {key: [entry[key] for entry in log if key in entry] for key in names}
        print(json.dumps({"run": [method, name]} | values), flush=True)


if __name__ == "__main__":
    text, target, folder = map(Path, sys.argv[1:4])
    if process := sys.argv[4:]:
        argv = words(text, target, "eagle", folder / "eagle_pair", (2, 2, 2))
        sys.exit(run([*argv, *process], "eagle", 3))
    else:
        main(text, target, folder)

"""The trainer killed, spread over 8 devices, and split over two processes."""

import contextlib
import json
import multiprocessing
import os
import random
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from training import pretrain
from training.trainer.metrics import read_log

ROOT = Path(__file__).resolve().parents[2]
OPTIONS = {
    "holdout": "secret",
    "vocab-size": 300,
    "hidden-size": 32,
    "intermediate-size": 64,
    "layers": 1,
    "heads": 2,
    "kv-heads": 1,
    "head-dim": 16,
    "length": 32,
    "batch": 8,
    "accumulate": 2,
    "optimizer": "muon",
    "schedule": "constant",
    "warmup": 2,
    "learning-rate": 1e-2,
    "eval-every": 10,
    "eval-windows": 8,
    "log-every": 1,
    "save-every": 2,
    "export-dtype": "float32",
}


@pytest.fixture(scope="module")
def words(sources):
    """Return a function to the options of a run on the tiny corpus."""
    options = [f"--data={sources}", *(f"--{name}={value}" for name, value in OPTIONS.items())]
    return lambda out, steps, *more: [*options, f"--out={out}", f"--steps={steps}", *more]


@pytest.fixture(scope="module")
def start(words):
    """Return a function that starts ``python -m training.pretrain``."""
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}

    def start(out: Path, steps: int, *more: str, cluster: dict | None = None) -> subprocess.Popen:
        return subprocess.Popen(
            [sys.executable, "-m", "training.pretrain", *words(out, steps, *more)],
            cwd=ROOT,
            text=True,
            env=environment | (cluster or {}),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )

    return start


class Fork(multiprocessing.get_context("forkserver").Process):
    """``training.pretrain`` forked off a process that has imported it; imports take seconds."""

    def __init__(self, argv: list[str], output: Path):
        super().__init__(target=_pretrain, args=(argv, output))
        self._output = output

    def poll(self) -> int | None:
        return self.exitcode

    def communicate(self) -> tuple[str]:
        """Wait for the end; return the output."""
        self.join()
        return (self._output.read_text(),)


def _pretrain(argv: list[str], output: Path) -> None:
    with output.open("w") as file:
        for stream in (1, 2):
            os.dup2(file.fileno(), stream)
        sys.exit(pretrain.main(argv))


@pytest.fixture(scope="module")
def fork(words, tmp_path_factory):
    """Return a function that starts the same run in a ``Fork``."""
    forks = multiprocessing.get_context("forkserver")
    forks.set_forkserver_preload([__name__, "tensorboardX", "matplotlib.figure"])
    output = tmp_path_factory.mktemp("forks")

    def fork(out: Path, steps: int) -> Fork:
        process = Fork(words(out, steps), output / "output.txt")
        process.start()
        return process

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JAX_PLATFORMS", "cpu")
        yield fork


@pytest.fixture(scope="module")
def uninterrupted(start, tmp_path_factory):
    """The folder of a run of 40 steps."""
    out = tmp_path_factory.mktemp("uninterrupted") / "run"
    process = start(out, 40)
    output = process.communicate()[0]
    assert process.returncode == 0, output
    return out


def losses(out: Path) -> list[tuple[int, float]]:
    return [(entry["step"], entry["loss"]) for entry in read_log(out / "metrics.jsonl")]


def wait_for_step(process: subprocess.Popen | Fork, out: Path, step: int) -> None:
    log = out / "metrics.jsonl"
    while not log.exists() or log.read_text().count("\n") < step:
        assert process.poll() is None, process.communicate()[0]
        time.sleep(0.002)


def test_a_run_killed_at_random_moments_ends_in_the_same_weights_bit_for_bit(
    fork, uninterrupted, tmp_path
):
    chance, out = random.Random(0), tmp_path / "run"
    for step in (3, 14):
        process = fork(out, 40)
        wait_for_step(process, out, step)
        time.sleep(chance.random() / 10)
        process.kill()
        process.communicate()
    stopped = fork(out, 40)
    wait_for_step(stopped, out, 25)
    stopped.terminate()
    output = stopped.communicate()[0]
    assert stopped.exitcode == 128 + signal.SIGTERM, output
    assert re.search(r"stopped and saved at step \d+; run the same command to resume", output)
    last = fork(out, 40)
    output = last.communicate()[0]
    assert last.exitcode == 0, output
    for name in ("export/model.safetensors", "export/config.json"):
        assert (out / name).read_bytes() == (uninterrupted / name).read_bytes()
    assert losses(out) == losses(uninterrupted)
    parts = json.loads((out / "provenance.json").read_text())["segments"]
    assert 1 < len(parts) <= 4 and all(part["from_step"] < 40 for part in parts)


def slurm_variables() -> tuple[dict, str]:
    """Return Slurm's variables for the second of two processes, and JAX's coordinator address."""
    for slurm in random.Random(0).sample(range(4096), 50):
        address = "localhost", 61440 + slurm
        with socket.socket() as free, contextlib.suppress(OSError):
            free.bind(address)
            variables = {
                "SLURM_JOB_ID": slurm,
                "SLURM_STEP_NODELIST": "localhost",
                "SLURM_NTASKS": 2,
                "SLURM_PROCID": 1,
                "SLURM_LOCALID": 1,
                "SLURM_STEP_NUM_NODES": 1,
            }
            return {name: str(value) for name, value in variables.items()}, "{}:{}".format(*address)
    raise OSError("all ports that were tried are taken")


def test_two_processes_train_as_one_and_stop_together(start, uninterrupted, tmp_path):
    out = tmp_path / "run"
    common = "--fsdp", "2", "--compute", "bfloat16"
    cluster, address = slurm_variables()
    first = "--coordinator", address, "--num-processes", "2", "--process-id", "0"
    pair = [
        start(out, 100_000, *common, *first),
        start(out, 100_000, *common, "--coordinator", "auto", cluster=cluster),
    ]
    wait_for_step(pair[0], out, 12)
    pair[1].send_signal(signal.SIGTERM)  # the step informs the other process
    output = [process.communicate(timeout=300)[0] for process in pair]
    assert [process.returncode for process in pair] == [143, 143], output
    assert "stopped and saved at step" in output[0] and "saved" not in output[1]
    ours, theirs = (np.array(losses(folder))[:12] for folder in (out, uninterrupted))
    assert ours[:, 0].tolist() == list(range(1, 13))
    np.testing.assert_allclose(ours[:, 1], theirs[:, 1], rtol=2e-3)  # bfloat16 factors


@pytest.fixture(scope="module")
def on_meshes(tmp_path_factory):
    environment = os.environ | {
        "XLA_FLAGS": f"{os.environ['XLA_FLAGS']} --xla_force_host_platform_device_count=8",
        "JAX_PLATFORMS": "cpu",
    }
    folder = str(tmp_path_factory.mktemp("meshes"))
    command = [sys.executable, "-m", "tests.training.on_meshes", folder]
    ran = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=900
    )
    assert ran.returncode == 0, ran.stderr
    assert "full rematerialization" not in ran.stderr  # weights are gathered, not the batch
    return [json.loads(line) for line in ran.stdout.splitlines()]


def test_every_mesh_has_the_loss_curve_of_one_device(on_meshes):
    alone, *others, model, spread, moved = on_meshes
    assert len(alone["losses"]) == 6 and alone["losses"][-1] < alone["losses"][0]
    for other in (*others, moved):
        np.testing.assert_allclose(other["losses"], alone["losses"], atol=1e-5)
    np.testing.assert_allclose(others[1]["heldout_loss"], alone["heldout_loss"], atol=1e-5)
    for name in ("losses", "heldout_loss"):
        np.testing.assert_allclose(spread[name], model[name], atol=5e-3)  # bfloat16 factors


def test_weights_and_frozen_weights_are_really_cut(on_meshes):
    _, spread, cut, _, model, _ = on_meshes
    head, layers, norm = cut["params"]
    assert head == [[16, 16], [4, 8]] and layers == [[8, 16], [4, 4]] and norm == [[8], [8]]
    assert cut["frozen"] == [[[16, 8], [4, 4]]] and spread["params"][0] == [[16, 16], [16, 16]]
    shapes = [shape for shape in model["params"] if len(shape[0]) == 2]
    embedding, *matrices = (
        shapes  # 257 tokens cannot be split in two; other matrices are split in four
    )
    assert embedding == [[257, 32], [257, 16]] and len(matrices) == 4
    assert all(4 * np.prod(part) == np.prod(whole) for whole, part in matrices)
